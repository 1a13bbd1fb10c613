// --- The reader's own sentence: typed, run through the model in the page, and continued token by token ---

import { byId, element, say } from './page/base.js';
import { inputOf, step } from './page/model.js';
import { nearest } from './page/tokens.js';
import { changeAddress } from './report_address.js';
import { longer, model, modelMissing, think, visible, vocabulary } from './report_model.js';
import { chancesOf, next } from './report_next.js';
import { flatMap, mapOf, passage, sentence, showText } from './report_shown.js';
import { ranking } from './report_silence.js';
import { count, distinct, percent, quoted, setText, view } from './report_state.js';

const WAIT_MS = 60; // after a key, before the model runs
const FOLLOWING = 6, LEAST_CHANCE = 0.001; // words that can stand next, and the least chance of one
const INSTEAD = 2; // words in place of one that the model lacks
const KNOWN = 1500; // words of the list
// whole, less: what the model makes of the sentence as it is, and with the changed heads
export const typed = { text: '', ids: [], pieces: [], whole: null, less: null };
const FIRST = 48; // tokens of a passage that the page begins with
let typing = 0;

export function startOwn() {
  const why = modelMissing();
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

// The text that the page opens with, told by the tokens of its maps.
export let opening = '';

function begin() {
  const ids = new Map(vocabulary().map((name, id) => [visible(name), id]));
  const tokens = sentence ? sentence.tokens : passage.tokens.slice(0, FIRST);
  opening = tokens.filter((token) => ids.has(token)).map((token) => ids.get(token)).reduce(longer, '');
  setOwn(opening, restingPlace);
}

// Where the page begins to look: where the last word is predicted, so that its truth is known.
export function restingPlace() { return Math.max(0, typed.ids.length - 2); }

// The last token that is whole: what follows a word that is still typed nobody asks.
export function lastPlace() { return Math.max(0, typed.ids.length - (growing() ? 2 : 1)); }

export function setOwn(text, placed = lastPlace) {
  const { ids, pieces } = inputOf(model, text);
  takeOwn(text, ids, pieces, placed);
}

function takeOwn(text, ids, pieces, placed) {
  if (byId('own-text').value !== text) byId('own-text').value = text;
  try {
    const whole = think(ids);
    Object.assign(typed, { text, ids, pieces, whole });
    typed.less = view.changes.size ? think(ids, view.changes) : whole;
  } catch (trouble) { // longer than the model's context, or nothing at all
    byId('own-trouble').textContent = trouble.message;
    return;
  }
  view.pinned = false;
  view.at = placed();
  next.chosen = -1;
  ranking.clear();
  showOwn();
  changeAddress();
}

export function showOwn() {
  if (!typed.whole) {
    showText(sentence || passage);
    return;
  }
  const tokens = typed.ids.map((id, at) => visible(typed.pieces[at].known ? vocabulary()[id] : typed.pieces[at].text));
  showText({ tokens, exact: true, typed: true, maps: { this: mapsOf(typed.less) }, unknown: strange(typed.pieces) });
  sayUnknown();
}

// --- What can stand next, and what stands for a word that the model lacks ---

// The end of the text that may grow into a word that the model knows; '' behind a space and behind a whole word.
function growing() {
  const last = typed.pieces.at(-1);
  if (!last || last.known || /\s$/.test(typed.text)) return '';
  return vocabulary().some((name) => name.startsWith(last.text)) ? last.text : '';
}

function strange(pieces) {
  const ends = growing() ? pieces.length - 1 : pieces.length;
  return pieces.map((piece, at) => !piece.known && at < ends);
}

// Tokens by their chance at a place of the text, the likeliest first; in their own order where nothing stands before it.
function likelyAt(place) {
  const chances = place < 0 ? new Float32Array(vocabulary().length) : chancesOf(typed.whole, place);
  const ids = [...chances.keys()].filter((id) => id !== model.tokens.boundary && id !== model.tokens.unknown);
  return ids.sort((a, b) => chances[b] - chances[a]).map((id) => [id, chances[id]]);
}

// While a word is typed the words that it can become, else those that the model expects.
function showFollowing() {
  const begun = growing(), list = likelyAt(lastPlace());
  const fits = ([id, chance]) => (begun ? vocabulary()[id].startsWith(begun) : chance >= LEAST_CHANCE);
  const offers = list.filter(fits).slice(0, FOLLOWING);
  byId('offers').hidden = !offers.length;
  setText('offers-title', begun ? 'report.can_become' : 'report.can_follow', { word: quoted(begun) });
  byId('offers-list').replaceChildren(...offers.map(([id, chance]) => {
    const before = begun ? typed.text.slice(0, -begun.length) : typed.text;
    const button = wordButton(visible(vocabulary()[id]), () => setOwn(longer(before, id)));
    if (chance >= LEAST_CHANCE) button.append(' ', element('span', 'part', percent(chance)));
    return button;
  }));
}

// A button that changes the sentence; the next key goes on typing.
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

export function sayUnknown() {
  const wrong = strange(typed.pieces), places = new Map(); // word that the model lacks -> where it stands first
  typed.pieces.forEach(({ text }, at) => { if (wrong[at] && !places.has(text)) places.set(text, at); });
  byId('own-trouble').textContent = '';
  if (places.size) {
    const words = distinct([...places.keys()].map((word) => quoted(visible(word)))).join(', ');
    const sign = quoted(visible(vocabulary()[typed.pieces[[...places.values()][0]].id])); // which the model reads for it
    byId('own-trouble').textContent = say('report.unknown_words', { words, sign });
  }
  const offers = [...places].flatMap(([word, at]) => instead(word, at));
  if (offers.length) byId('own-trouble').append(' ', say('report.near'), ...offers.map(([word, near]) => replacement(word, near)));
  showFollowing();
}

// The words most like it, the likelier first where two are as near; where none is like it, what the model expects there.
function instead(word, at) {
  const likely = likelyAt(at - 1), near = nearest(model.tokens, word, new Map(likely));
  return (near.length ? near : likely.slice(0, INSTEAD).map(([id]) => vocabulary()[id])).map((name) => [word, name]);
}

// A button that puts a word that the model knows in the place of one that it does not.
function replacement(word, near) {
  return wordButton(near, () => {
    const parts = typed.text.split(/(\s+)/); // whole words where the text has them
    setOwn(parts.includes(word) ? parts.map((part) => (part === word ? near : part)).join('') : typed.text.replaceAll(word, near));
  });
}

// The maps of a run, each made flat when first needed.
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
  const before = typed.pieces.slice(typed.pieces.length - (ids.length - 1));
  takeOwn(longer(typed.text, id), ids, [...before, { id, text: vocabulary()[id], known: true }], lastPlace);
}

// The words that the model knows; a click adds one.
function showVocabulary() {
  const list = byId('vocabulary-words');
  if (!byId('vocabulary').open || list.childElementCount) return;
  const known = vocabulary().map((name, id) => [visible(name), id]).filter(([, id]) => id !== model.tokens.boundary);
  known.sort(([a], [b]) => a.localeCompare(b));
  list.append(...known.slice(0, KNOWN).map(([name, id]) => wordButton(name, () => setOwn(longer(typed.text, id)))));
  if (known.length > KNOWN) list.append(say('report.and_more', { count: count(known.length - KNOWN) }));
}
