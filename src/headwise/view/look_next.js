// --- What comes next, what becomes of it without a head, and why ---
//
// A model predicts the next token, fills in a hidden one, or predicts none: then what counts is the direction of a
// vector, the mean of its last hidden states, and how far that moves is a cosine. heads/look.py answers;
// `look` keeps the answer.

import { byId, element, language, putWords, say } from './page/base.js';
import { changesChanged } from './look.js';
import { ask } from './look_ask.js';
import { openLarge, scale } from './look_heads.js';
import { labelOf, look } from './look_state.js';
import { changedNames } from './report_factor.js';
import { bar, data, heads, moved, movedWords, numberOf, percent, points, quoted, scoped,
  setText } from './report_state.js';

// The latest ranking: `follow` is the id that was followed, `before` its chance with all heads, and a row is [head,
// chance or cosine without it, the likeliest token then].
let ranked = null;
// The latest answer to "why": {answer, other, why}, both tokens, and in `why` for each head [name, {en, es}],
// a sentence.
let story = null;

// The panel of what comes next: the tokens or the moved vector, the verdict, the ranking and the story.
export function showNext() {
  const title = data.predicts === 'masked' ? 'look.fills'
    : data.predicts && look.next ? 'report.next_after' : 'look.output';
  setText('next-title', title, { token: look.words.length ? quoted(labelOf(look.words[look.rest])) : '' });
  byId('next').replaceChildren();
  if (look.next) showTokens();
  else if (look.state) showState();
  byId('verdict-below').hidden = !look.changes.size;
  // The same sentence stands below the heads, and in the large view.
  byId('verdict-below').textContent = byId('large-verdict').textContent = byId('verdict').textContent;
  showRanking();
  showStory();
}

function showTokens() {
  // A row: [id, token, its chance as the model is, with the changed heads, and in the second text where there is
  // one]. In a second text in which no word is hidden nothing is filled in, and the row is shorter.
  const rows = look.next, changed = look.changes.size > 0, second = look.beside && rows[0].length > 4;
  const head = element('tr');
  head.append(scoped('col', say('report.next_token')), scoped('col', say('report.as_it_is')));
  if (changed) head.append(scoped('col', say('report.as_changed')), scoped('col', say('report.change')));
  if (second) head.append(scoped('col', say('look.in_second')), scoped('col', say('look.difference')));
  byId('next').classList.toggle('both', changed || second);
  byId('next').replaceChildren(head, ...rows.map((row) => tokenRow(row, changed, second)));
  const best = (column) => rows.reduce((most, row) => (row[column] > most[column] ? row : most)); // the likeliest row
  const followed = rows.find(([id]) => id === look.follow) ?? best(2);
  const [first, now] = [best(2), best(3)], name = (row) => quoted(row[1]); // as the model is, and with the changes
  if (!changed) setText('verdict', 'report.expects', { token: name(first), part: percent(first[2]) });
  else {
    const facts = {
      heads: changedNames(look.changes), first: name(first), now: name(now), part: percent(now[3]),
      token: name(followed), before: percent(followed[2]), after: percent(followed[3]),
    };
    setText('verdict', first === now ? 'report.still' : 'report.now_says', facts);
  }
  byId('verdict').classList.toggle('turned', changed && first !== now);
}

// A token, whose button makes it the one that is followed, and its chances as bars.
function tokenRow([id, token, before, now, other], changed, second) {
  const row = element('tr', id === look.follow ? 'chosen' : '');
  const button = element('button', 'token'), name = scoped('row', '');
  button.type = 'button';
  button.dataset.id = id;
  button.append(element('bdi', '', token));
  button.setAttribute('aria-pressed', String(id === look.follow));
  button.addEventListener('click', () => {
    look.follow = id;
    stopRanking(); // it was of another token
    showNext();
    byId('next').querySelector(`[data-id="${id}"]`).focus(); // the row was made anew
  });
  name.append(button);
  row.append(name, bar(before, 'ours'));
  const change = (from, to) => element('td', moved(to - from), points(to - from));
  if (changed) row.append(bar(now, 'theirs'), change(before, now));
  if (second) row.append(bar(other, 'theirs'), change(now, other));
  return row;
}

// Of a model that predicts no word here: how far what it gives has moved, and how alike two texts are.
function showState() {
  // kept: the cosine of the vectors without and with the changes. alike: those of the vectors of both texts, without
  // the changes and with them; undefined where there is one text.
  const { kept, alike } = look.state, shown = (cosine) => cosine.toFixed(4);
  const changed = look.changes.size > 0, names = changedNames(look.changes);
  if (alike) {
    const facts = { heads: names, before: shown(alike[0]), after: shown(alike[1]) };
    setText('verdict', changed ? 'look.alike_changed' : 'look.alike', facts);
  } else if (changed) setText('verdict', 'look.moved', { heads: names, cosine: shown(kept) });
  else if (data.mask) setText('verdict', 'look.nothing_hidden', { mask: data.mask });
  else setText('verdict', 'look.output_how', { heads: names, cosine: shown(kept) });
  byId('verdict').classList.remove('turned');
}

// What the likeliest token adds to the text that was typed: its text with the space before it.
export function goOn() { return look.goesOn; }

// Takes all factors back; the button that did so and had the focus is hidden then.
export function wakeAll() {
  look.changes.clear();
  changesChanged();
  byId('own-text').focus();
}

// --- Each head in turn ---

// Forgets ranking and story, which were of another text, place or token.
export function stopRanking() {
  ranked = story = null;
}

// One layer a question, so that the page can say how far it is; what has changed by then ends it.
export async function silenceEach() {
  const version = look.version, follow = look.follow, rows = [];
  const before = look.next ? look.next.find(([id]) => id === follow)[2] : 1; // the cosine of what has not moved is 1
  for (let layer = 0, left = 1; left > 0; layer++) { // an answer says how many layers are left
    const answer = await ask({ do: 'each', slot: 'a', layer, follow });
    if (!answer.each || version !== look.version || follow !== look.follow) return;
    rows.push(...answer.each);
    left = answer.left;
    setText('ranking-note', 'report.ranking_at_work', { done: rows.length, all: heads.length });
  }
  ranked = { before, follow, rows: rows.sort((a, b) => a[1] - b[1]) }; // the head that is missed most comes first
  showRanking();
}

function showRanking() {
  // words: is a token predicted? fits: is there a ranking, and of the token that is followed now?
  const list = byId('ranking'), words = Boolean(look.next), fits = ranked && ranked.follow === look.follow;
  const followed = look.next?.find(([id]) => id === look.follow);
  list.hidden = !fits;
  if (!fits) setText('ranking-note', 'look.each_offer', {});
  else if (words) setText('ranking-note', 'look.ranking', { token: quoted(followed[1]), part: percent(ranked.before) });
  else setText('ranking-note', 'look.ranking_output', {});
  list.replaceChildren(...(fits ? ranked.rows : []).map(([name, part, then]) => rankingRow(name, part, then, words)));
}

// A line of the ranking: the head, the bar of the chance without it and what is likeliest then; of a vector the bar
// is what the cosine lacks to 1.
function rankingRow(name, part, then, words) {
  const item = element('li'), said = element('span', 'then');
  if (words) putWords(said, movedWords(part - ranked.before), { token: quoted(then) });
  else said.textContent = part.toFixed(4);
  item.append(headButton(name), bar(words ? part : Math.max(0, 1 - part), 'theirs', 'span'), said);
  return item;
}

// A name that silences its head, or wakes it.
function headButton(name) {
  const button = element('button', 'token', name), silent = look.changes.get(name) === 0;
  button.type = 'button';
  button.setAttribute('aria-pressed', String(silent));
  button.setAttribute('aria-label', say(silent ? 'report.wake' : 'report.silence', { name }));
  button.addEventListener('click', () => scale(numberOf.get(name), silent ? 1 : 0));
  return button;
}

// --- Why ---

// Asks for the story of the prediction, which takes longer than the rest; meanwhile the text may have changed.
export async function tellWhy() {
  const version = look.version;
  setText('story-note', 'look.why_at_work', {});
  const answer = await ask({ do: 'why', slot: 'a' });
  story = version === look.version && answer.why ? answer : null;
  showStory();
}

function showStory() {
  byId('story').hidden = !story;
  if (story) setText('story-note', 'look.why_of', {
    answer: quoted(story.answer.trim()), other: quoted(story.other.trim()),
  });
  else byId('story-note').textContent = '';
  byId('story').replaceChildren(...(story ? story.why : []).map(([name, sentences]) => {
    const item = element('li'), button = element('button', 'token', name);
    button.type = 'button';
    button.setAttribute('aria-label', say('report.enlarge', { name }));
    button.addEventListener('click', () => openLarge(numberOf.get(name)));
    // The sentence without its marks, and without the head with which it begins, since the button says it.
    item.append(button, sentences[language()].replaceAll('*', '').replace(name, ''));
    return item;
  }));
}
