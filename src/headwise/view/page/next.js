// --- What comes next, what becomes of it with changed heads, and which head matters for it ---
//
// `engine.next` says what is found: rows of tokens with their chances; of a model that predicts none, {state}, how far
// what it gives has moved, as a cosine. Each head's silence is ranked alone, whatever is changed.

import { byId, element, emit, makeButton, on, putWords, remake, say, scoped } from './base.js';
import { engine } from './engine.js';
import { bar, changedNames, data, factorOf, heads, moved, numberOf, percent, points, quoted, setText,
  toggleSilence, view } from './state.js';

// The latest ranking: `key`, the text, place and token that were followed, its chance `before`, and in `rows` of each
// head [name, chance or cosine without it, the likeliest token then].
let ranking = null;

function markOf({ text, place, follow }) { return `${place} ${follow} ${view.temperature} ${text}`; }

// The panel: the tokens or the moved vector, the verdict, the ranking.
function showNext() {
  const found = engine.next(view.at), changed = view.changes.size > 0;
  byId('next-panel').hidden = byId('verdict').hidden = !found;
  if (!found) return;
  if (!data.served) setText('next-title', 'report.next_after', { token: quoted(found.after) });
  const [key, facts, turned] = found.state ? stateWords(found.state, changed) : tokenWords(found, changed);
  if (found.state) byId('next').replaceChildren();
  else showTokens(found, changed);
  // The verdict stands under the sentence, below the heads, and in the large view; another answer stands out.
  for (const id of ['verdict', 'verdict-below', 'large-verdict']) {
    setText(id, key, facts);
    byId(id).classList.toggle('turned', turned);
    const way = view.temperature > 1 ? 'report.warmer' : 'report.colder';
    if (view.temperature !== 1) byId(id).append(' ', say(way, { temperature: view.temperature.toFixed(1) }));
  }
  byId('verdict-below').hidden = !changed;
  byId('large-verdict').hidden = false;
  byId('wake').hidden = !changed;
  showRanking(found);
}

function showTokens({ rows, follow, truth }, changed) {
  const second = rows[0].length > 4; // where no word is hidden in a second text nothing is filled in there
  const keys = ['report.next_token', 'report.as_it_is'];
  if (changed) keys.push('report.as_changed', 'report.change');
  if (second) keys.push('look.in_second', 'report.change');
  const head = element('tr', '', ...keys.map((key) => scoped('col', say(key))));
  byId('next').classList.toggle('both', changed || second);
  remake(byId('next'), 'id', [head, ...rows.map((row) => tokenRow(row, changed, second, follow, truth))]);
}

// A token, whose button makes it the one that is followed, and its chances as bars.
function tokenRow([id, token, before, now, other], changed, second, follow, truth) {
  const button = makeButton('token', () => { view.follow = id; showNext(); }, element('bdi', '', token));
  const row = element('tr', id === follow ? 'chosen' : '', scoped('row', button), bar(before, 'ours'));
  button.dataset.id = id;
  button.setAttribute('aria-pressed', String(id === follow));
  if (id === truth) button.title = say('report.in_text');
  const change = (from, to) => element('td', moved(to - from), points(to - from));
  if (changed) row.append(bar(now, 'theirs'), change(before, now));
  if (second) row.append(bar(other, 'theirs'), change(now, other));
  return row;
}

// What the changed heads have changed; without any, what the model expects. [phrase, facts, is it another answer?]
function tokenWords({ rows, follow, after }, changed) {
  const best = (column) => rows.reduce((most, row) => (row[column] > most[column] ? row : most)); // the likeliest row
  const first = best(2), now = best(3), name = (row) => quoted(row[1]);
  const followed = rows.find(([id]) => id === follow) ?? first;
  if (!changed) {
    const key = after ? 'report.expects_after' : 'report.expects';
    return [key, { place: quoted(after), token: name(first), part: percent(first[2]) }, false];
  }
  const facts = { heads: changedNames(), first: name(first), now: name(now), part: percent(now[3]),
    token: name(followed), before: percent(followed[2]), after: percent(followed[3]) };
  return [first === now ? 'report.still' : 'report.now_says', facts, first !== now];
}

// Of a model that predicts no word here. kept: the cosine of the vectors without and with the changes. alike: those of
// the vectors of both texts, without the changes and with them; undefined where there is one text.
function stateWords({ kept, alike }, changed) {
  const facts = { heads: changedNames(), cosine: kept.toFixed(4), mask: data.mask };
  if (!alike) return [changed ? 'look.moved' : data.mask ? 'look.nothing_hidden' : 'look.output_how', facts, false];
  [facts.before, facts.after] = alike.map((cosine) => cosine.toFixed(4));
  return [changed ? 'look.alike_changed' : 'look.alike', facts, false];
}

// --- Each head in turn ---

// Runs the model once without each head alone. The page answers in between, and what has changed by then ends it.
async function silenceEach() {
  await engine.ready?.();
  if (!engine.next(view.at)) return; // the text was refused
  const found = engine.next(view.at), key = markOf(found), rows = [];
  const followed = found.rows.find(([id]) => id === found.follow);
  for await (const part of engine.each(found)) {
    const now = engine.next(view.at);
    if (!now || markOf(now) !== key) return;
    rows.push(...part);
    setText('ranking-note', 'report.matches', { count: rows.length, all: heads.length });
  }
  if (rows.length < heads.length) return; // nobody answers any more
  const adds = found.state ? {} : await engine.adds(found);
  // The cosine of what has not moved is 1; the head that is missed most comes first.
  rows.sort((a, b) => a[1] - b[1]);
  ranking = { key, adds, before: followed ? followed[2] : 1, token: followed?.[1], rows };
  showRanking(found);
}

function showRanking(found) {
  const list = byId('ranking'), fits = ranking?.key === markOf(found);
  list.hidden = !fits;
  if (!fits) setText('ranking-note', 'report.ranking_offer');
  else if (found.state) setText('ranking-note', 'look.ranking_output');
  else setText('ranking-note', 'report.ranking', { token: quoted(ranking.token), part: percent(ranking.before) });
  const isAdded = fits && Object.keys(ranking.adds).length > 0, byAdds = isAdded && byId('by-adds').checked;
  byId('by-adds').parentElement.hidden = !isAdded;
  const rows = fits ? [...ranking.rows] : [];
  if (byAdds) rows.sort(([a], [b]) => ranking.adds[b] - ranking.adds[a]);
  remake(list, 'name', rows.map((row) => rankingRow(row, !found.state, byAdds)));
  emit('ranking', fits && !found.state ? ranking : null);
}

// A line of the ranking: the head's button, and the chance without it, or of a vector what the cosine lacks to 1.
function rankingRow([name, part, then], isToken, byAdds) {
  const words = element('span', 'then'), silent = factorOf(numberOf.get(name)) === 0;
  const button = makeButton('token', () => toggleSilence(numberOf.get(name)), name);
  button.dataset.name = name;
  button.setAttribute('aria-pressed', String(silent));
  button.setAttribute('aria-label', say(silent ? 'report.wake' : 'report.silence', { name }));
  const becomes = { fall: 'report.falls_to', rise: 'report.rises_to' }[moved(part - ranking.before)];
  const adds = ranking.adds[name] ?? 0;
  if (byAdds) words.textContent = say('report.adds', { nats: `${adds < 0 ? '−' : '+'}${Math.abs(adds).toFixed(2)}` });
  else if (isToken) putWords(words, becomes ?? 'report.stays_at', { token: quoted(then) });
  else words.textContent = part.toFixed(4);
  return element('li', '', button, bar(isToken ? part : Math.max(0, 1 - part), 'theirs', 'span'), words);
}

byId('temperature')?.addEventListener('input', ({ target }) => { // of a model in the page
  view.temperature = Number(target.value);
  byId('temperature-shown').textContent = view.temperature.toFixed(1);
  emit('point');
});
byId('each').addEventListener('click', silenceEach);
byId('by-adds').addEventListener('change', showNext);
byId('wake').addEventListener('click', () => { // the button, which has the focus, is hidden then
  view.changes.clear();
  emit('changes');
  byId('own-text').focus();
});
// The ranking was of another text; of a live model the words are new after every reading.
on('words', () => { if (!data.served) ranking = null; });
on(data.served ? 'read language' : 'point language', showNext);
