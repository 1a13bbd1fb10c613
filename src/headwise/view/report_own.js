// --- The reader's own sentence: typed, run through the model in the page, and continued token by token ---
//
// A `piece` is a token of the sentence, {id, text, known} (`encode` in tokens.js); where the model lacks a word,
// `known` is false, `text` is the word, and the id that of the sign that the model reads for it.

import { byId, element, say } from './page/base.js';
import { inputOf, step } from './page/model.js';
import { nearest } from './page/tokens.js';
import { changeAddress } from './report_address.js';
import { longer, model, modelMissing, think, visible, vocabulary } from './report_model.js';
import { chancesOf, next } from './report_next.js';
import { flatMap, mapOf, passage, sentence, showText } from './report_shown.js';
import { ranking } from './report_silence.js';
import { count, distinct, percent, quoted, setText, view } from './report_state.js';

// Round choices, all at most but for the chance: larger counts show more, and a longer wait lets the page lag.
const WAIT_MS = 60; // after a key, before the model runs, so that it does not run for each key of a fast typist
const FOLLOWING = 6, LEAST_CHANCE = 0.001; // words offered as the next, and the least chance of one
const INSTEAD = 2; // words offered in place of one that the model lacks, where none is like it
const KNOWN = 1500; // words in the list of those that the model knows
const FIRST = 48; // tokens of a passage that the page begins with
// The sentence now. whole, less: the `Run` of the model as it is, and with the changed heads; the same where none is
// changed, and null before the first.
export const typed = { text: '', ids: [], pieces: [], whole: null, less: null };
let typing = 0; // the timer that runs while a key may follow

// Listens to the panel and puts the first sentence there; hides the panel where there is no model in the page.
export function startOwn() {
  const why = modelMissing(); // in words, '' where there is one
  byId('own').hidden = byId('next-panel').hidden = Boolean(why);
  byId('workbench').hidden = Boolean(why);
  if (why) return;
  byId('own-text').addEventListener('input', () => {
    clearTimeout(typing);
    typing = setTimeout(() => setOwn(byId('own-text').value), WAIT_MS);
  });
  byId('likeliest').addEventListener('click', () => goOn(0));
  byId('sampled').addEventListener('click', () => goOn(1));
  byId('again').addEventListener('click', () => setOwn(opening, restingPlace));
  byId('vocabulary').addEventListener('toggle', showVocabulary);
  begin();
}

// The text that the page opens with.
export let opening = '';

// Puts it together from the tokens of the page's maps, which are written as a reader sees them: those that the
// vocabulary has, one after the other.
function begin() {
  const ids = new Map(vocabulary().map((name, id) => [visible(name), id]));
  const tokens = sentence ? sentence.tokens : passage.tokens.slice(0, FIRST);
  // `longer` appends one id after the other.
  opening = tokens.filter((token) => ids.has(token)).map((token) => ids.get(token)).reduce(longer, '');
  setOwn(opening, restingPlace);
}

// Where the page begins to look: at the token before the last.
// There the last one is predicted, so that the truth is known.
export function restingPlace() { return Math.max(0, typed.ids.length - 2); }

// The place of the last token that is whole. What follows a word that is still being typed is of no interest.
export function lastPlace() { return Math.max(0, typed.ids.length - (growing() ? 2 : 1)); }

// Takes another sentence; `placed` says at which token the page looks then.
export function setOwn(text, placed = lastPlace) {
  const { ids, pieces } = inputOf(model, text);
  takeOwn(text, ids, pieces, placed);
}

// The same of a sentence whose ids are known. A sentence that the model cannot read leaves the last one in place.
function takeOwn(text, ids, pieces, placed) {
  // Only where it differs: a field that is written to loses its cursor.
  if (byId('own-text').value !== text) byId('own-text').value = text;
  const longest = model.config.context;
  if (!ids.length || ids.length > longest) {
    const key = ids.length ? 'report.beyond_context' : 'report.no_tokens';
    byId('own-trouble').textContent = say(key, { tokens: ids.length, longest });
    return;
  }
  const whole = think(ids);
  Object.assign(typed, { text, ids, pieces, whole });
  typed.less = view.changes.size ? think(ids, view.changes) : whole;
  view.pinned = false;
  view.at = placed();
  next.chosen = -1; // what was chosen and ranked was of the sentence before
  ranking.clear();
  showOwn();
  changeAddress();
}

// Shows the sentence with the maps of the changed heads.
// Without a model it is the sentence or the passage of the file.
export function showOwn() {
  if (!typed.whole) {
    showText(sentence || passage);
    return;
  }
  const tokens = typed.ids.map((id, at) => visible(typed.pieces[at].known ? vocabulary()[id] : typed.pieces[at].text));
  showText({ tokens, exact: true, typed: true, maps: mapsOf(typed.less), unknown: strange(typed.pieces) });
  sayUnknown();
}

// --- What can stand next, and what stands for a word that the model lacks ---

// The end of the text that may grow into a word that the model knows; '' behind a space and behind a whole word.
function growing() {
  const last = typed.pieces.at(-1);
  if (!last || last.known || /\s$/.test(typed.text)) return '';
  return vocabulary().some((name) => name.startsWith(last.text)) ? last.text : '';
}

// Of each piece: does the model lack it? A word that is still being typed does not count.
function strange(pieces) {
  const ends = growing() ? pieces.length - 1 : pieces.length;
  return pieces.map((piece, at) => !piece.known && at < ends);
}

// [id, chance] of all tokens at a place of the text, the likeliest first; in their own order, with a chance of 0,
// where nothing stands before it. The two signs that stand for no word are left out.
function likelyAt(place) {
  const chances = place < 0 ? new Float32Array(vocabulary().length) : chancesOf(typed.whole, place);
  const ids = [...chances.keys()].filter((id) => id !== model.tokens.boundary && id !== model.tokens.unknown);
  return ids.sort((a, b) => chances[b] - chances[a]).map((id) => [id, chances[id]]);
}

// Offers words as buttons: while a word is typed those that it can become, else those that the model expects.
function showFollowing() {
  const begun = growing(), list = likelyAt(lastPlace());
  const fits = ([id, chance]) => (begun ? vocabulary()[id].startsWith(begun) : chance >= LEAST_CHANCE);
  const offers = list.filter(fits).slice(0, FOLLOWING);
  byId('offers').hidden = !offers.length;
  setText('offers-title', begun ? 'report.can_become' : 'report.can_follow', { word: quoted(begun) });
  byId('offers-list').replaceChildren(...offers.map(([id, chance]) => {
    // The word replaces its own beginning.
    const before = begun ? typed.text.slice(0, -begun.length) : typed.text;
    const button = wordButton(visible(vocabulary()[id]), () => setOwn(longer(before, id)));
    if (chance >= LEAST_CHANCE) button.append(' ', element('span', 'part', percent(chance)));
    return button;
  }));
}

// A button that changes the sentence, and puts the cursor behind it: the next key goes on typing.
function wordButton(name, change) {
  const button = element('button', 'known', name), text = byId('own-text');
  button.type = 'button';
  button.addEventListener('click', () => {
    change();
    text.focus();
    text.setSelectionRange(text.value.length, text.value.length);
  });
  return button;
}

// Names the words that the model lacks, and offers others in their place.
export function sayUnknown() {
  const wrong = strange(typed.pieces), places = new Map(); // word that the model lacks -> where it stands first
  typed.pieces.forEach(({ text }, at) => { if (wrong[at] && !places.has(text)) places.set(text, at); });
  byId('own-trouble').textContent = '';
  if (places.size) {
    const words = distinct([...places.keys()].map((word) => quoted(visible(word)))).join(', ');
    // What the model reads for the first of them, and so for each.
    const sign = quoted(visible(vocabulary()[typed.pieces[[...places.values()][0]].id]));
    byId('own-trouble').textContent = say('report.unknown_words', { words, sign });
  }
  const offers = [...places].flatMap(([word, at]) => instead(word, at));
  if (offers.length) byId('own-trouble').append(
    ' ', say('report.near'), ...offers.map(([word, near]) => replacement(word, near)),
  );
  showFollowing();
}

// Words to offer for one that the model lacks, each [word, what may replace it]: those most like it, the likelier
// first where two are as near; where none is like it, what the model expects at this place.
function instead(word, at) {
  const likely = likelyAt(at - 1), near = nearest(model.tokens, word, new Map(likely));
  return (near.length ? near : likely.slice(0, INSTEAD).map(([id]) => vocabulary()[id])).map((name) => [word, name]);
}

// A button that puts a word that the model knows in the place of one that it does not.
function replacement(word, near) {
  return wordButton(near, () => {
    const parts = typed.text.split(/(\s+)/); // words, and in brackets, so that they stay, the spaces between
    // As a whole word where the text has it as one, so that "a" is not replaced in "cat"; else wherever it stands.
    setOwn(parts.includes(word)
      ? parts.map((part) => (part === word ? near : part)).join('')
      : typed.text.replaceAll(word, near));
  });
}

// The maps of a run, by the names of heads as in a Map, each made flat when first needed.
function mapsOf(run) {
  const made = new Map();
  return {
    has: (name) => name in run.maps,
    get: (name) => {
      if (!made.has(name)) made.set(name, mapOf(flatMap(run.maps[name]), typed.ids.length));
      return made.get(name);
    },
  };
}

// One token more: the likeliest where the temperature is 0, else drawn by its probability.
function goOn(temperature) {
  const { ids, id } = step(model, typed.ids, { temperature, scale: Object.fromEntries(view.changes) });
  if (ids.length > model.config.context) { // the page reads the new token, too: the older half makes room for it
    setOwn(ids.slice(-Math.max(1, model.config.context >> 1)).reduce(longer, ''));
    return;
  }
  takeOwn(longer(typed.text, id), ids, [...typed.pieces, { id, text: vocabulary()[id], known: true }], lastPlace);
}

// The words that the model knows, made when the list is first opened; a click adds one.
function showVocabulary() {
  const list = byId('vocabulary-words');
  if (!byId('vocabulary').open || list.childElementCount) return;
  const known = vocabulary().map((name, id) => [visible(name), id]).filter(([, id]) => id !== model.tokens.boundary);
  known.sort(([a], [b]) => a.localeCompare(b));
  list.append(...known.slice(0, KNOWN).map(([name, id]) => wordButton(name, () => setOwn(longer(typed.text, id)))));
  if (known.length > KNOWN) list.append(say('report.and_more', { count: count(known.length - KNOWN) }));
}
