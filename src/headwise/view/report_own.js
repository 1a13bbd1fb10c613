// --- The reader's own sentence: typed, run through the model in the page, and continued token by token ---

import { byId, element, say } from './page/base.js';
import { inputOf, step } from './page/model.js';
import { nearest } from './page/tokens.js';
import { changeAddress } from './report_address.js';
import { longer, model, modelMissing, think, visible, vocabulary } from './report_model.js';
import { next } from './report_next.js';
import { flatMap, mapOf, passage, sentence, showText } from './report_shown.js';
import { ranking } from './report_silence.js';
import { count, distinct, quoted, view } from './report_state.js';

const WAIT_MS = 60; // after a key, before the model runs
// whole, less: what the model makes of the sentence as it is, and without the silenced heads
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
  const known = (sentence || { tokens: passage.tokens.slice(0, FIRST) }).tokens.filter((token) => ids.has(token)).map((token) => ids.get(token));
  opening = known.reduce(longer, '');
  setOwn(opening, restingPlace);
}

// Where the page begins to look: where the last word is predicted, so that its truth is known.
export function restingPlace() { return Math.max(0, typed.ids.length - 2); }

export function lastPlace() { return typed.ids.length - 1; }

export function setOwn(text, placed = lastPlace) {
  const { ids, pieces } = inputOf(model, text);
  takeOwn(text, ids, pieces, placed);
}

function takeOwn(text, ids, pieces, placed) {
  if (byId('own-text').value !== text) byId('own-text').value = text;
  try {
    const whole = think(ids);
    Object.assign(typed, { text, ids, pieces, whole });
    typed.less = view.silenced.size ? think(ids, [...view.silenced]) : whole;
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
  showText({ tokens, exact: true, typed: true, maps: { this: mapsOf(typed.less) }, unknown: typed.pieces.map((piece) => !piece.known) });
  sayUnknown();
}

export function sayUnknown() {
  const strange = typed.pieces.map((piece, at) => ({ ...piece, at })).filter((piece) => !piece.known);
  byId('own-trouble').textContent = strange.length ? say('report.unknown_words',
    { words: distinct(strange.map((piece) => quoted(visible(piece.text)))).join(', '), sign: quoted(visible(vocabulary()[strange[0].id])) }) : '';
  const offers = distinct(strange.map((piece) => piece.text)).flatMap((word) => nearest(model.tokens, word).map((near) => [word, near]));
  if (offers.length) byId('own-trouble').append(' ', say('report.near'), ...offers.map(([word, near]) => replacement(word, near)));
}

// A button that puts a word that the model knows in the place of one that it does not.
function replacement(word, near) {
  const button = element('button', 'known', near);
  button.type = 'button';
  button.addEventListener('click', () => {
    const parts = typed.text.split(/(\s+)/); // whole words where the text has them
    setOwn(parts.includes(word) ? parts.map((part) => (part === word ? near : part)).join('') : typed.text.replaceAll(word, near));
    byId('own-text').focus();
  });
  return button;
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
  const { ids, id } = step(model, typed.ids, { temperature, silence: [...view.silenced] });
  const before = typed.pieces.slice(typed.pieces.length - (ids.length - 1));
  takeOwn(longer(typed.text, id), ids, [...before, { id, text: vocabulary()[id], known: true }], lastPlace);
}

// The words that the model knows; a click adds one.
function showVocabulary() {
  const list = byId('vocabulary-words');
  if (!byId('vocabulary').open || list.childElementCount) return;
  const known = vocabulary().map((name, id) => [visible(name), id]).filter(([, id]) => id !== model.tokens.boundary);
  known.sort(([a], [b]) => a.localeCompare(b));
  list.append(...known.slice(0, 600).map(([name, id]) => {
    const button = element('button', 'known', name);
    button.type = 'button';
    button.addEventListener('click', () => setOwn(longer(typed.text, id)));
    return button;
  }));
  if (known.length > 600) list.append(say('report.and_more', { count: count(known.length - 600) }));
}
