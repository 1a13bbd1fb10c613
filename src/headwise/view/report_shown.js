// --- The text that is shown, one for the sentence, the grid, the large view and the table ---

import { drawGrid, makeLabels } from './report_grid.js';
import { showHead } from './report_head.js';
import { makeSentence, showPoint } from './report_sentence.js';
import { data, heads, unpacked, view, weights } from './report_state.js';

/**
 * @typedef {Object} Shown
 * @property {string[]} tokens  what is written
 * @property {boolean} exact  has each head a map of just these tokens? Otherwise pictures are of blocks of the first
 *   document, of which these are the first tokens
 * @property {Object} maps  for each view, 'this' and 'other', a head's name -> its map (a `Picture`), made when needed
 * @property {boolean} [typed]  is it the reader's own?
 * @property {boolean[]} [unknown]  which tokens stand for words that the model lacks
 *
 * @typedef {Object} Look
 * @property {Float32Array} inside  the weights on the tokens shown
 * @property {{key: number, weight: number}[]} outside  the strongest keys beyond them
 * @property {boolean} whole  are these all weights?
 */

/** @type {Shown} */
export const passage = { tokens: data.tokens.slice(0, data.passage), exact: false, maps: {} };
export const sentence = data.maps && (data.against === null || data.other_maps) && {
  tokens: data.maps.tokens, exact: true, maps: { this: unpackedMaps(data.maps), other: unpackedMaps(data.other_maps) },
};
export let shown = sentence || passage;

// Maps in the file: base64, and without the zeros above the diagonal where the model is causal.
function unpackedMaps(stored) {
  const made = new Map();
  if (!stored) return made;
  return {
    has: (name) => name in stored.weights,
    get: (name) => {
      if (!(name in stored.weights)) return undefined;
      if (!made.has(name)) made.set(name, squareOf(stored, name));
      return made.get(name);
    },
  };
}

function squareOf(stored, name) {
  const size = stored.tokens.length, packed = weights(stored.weights[name]), full = new Float32Array(size * size);
  for (let row = 0, at = 0; row < size; row++) {
    const width = stored.causal ? row + 1 : size;
    full.set(packed.subarray(at, at + width), row * size);
    at += width;
  }
  return mapOf(full, size);
}

export function mapOf(full, size) {
  return { rows: size, columns: size, weights: full, first: full.filter((_, at) => at % size === 0) };
}

// The rows of a map as one list, which may be one already.
export function flatMap(rows) { return rows.length && rows[0].length ? Float32Array.from(rows.flatMap((row) => [...row])) : rows; }

export function showText(text) {
  const marked = ({ unknown }) => Boolean(unknown?.includes(true));
  const same = marked(text) === marked(shown) && text.tokens.length === shown.tokens.length
    && text.tokens.every((token, at) => token === shown.tokens[at]);
  shown = text;
  if (!same) {
    view.at = Math.min(view.at, text.tokens.length - 1);
    makeSentence();
    makeLabels();
  }
  drawGrid();
  if (view.open >= 0) showHead();
  showPoint();
}

export function hasMap(number, which = view.which) { return shown.exact && Boolean(shown.maps[which]?.has(heads[number].name)); }

// The map behind the sentence: the difference of two models is seen in pictures, and its sentence is that of this model.
function ownMap(number) { return shown.maps[view.which === 'other' ? 'other' : 'this']?.get(heads[number].name); }

/**
 * Where a head looks from a token.
 * @param {number} number
 * @param {number} token
 * @returns {Look}
 */
export function looksOf(number, token) {
  const inside = new Float32Array(shown.tokens.length), outside = [];
  if (shown.exact) {
    const map = ownMap(number);
    return { inside: map ? map.weights.slice(token * map.columns, (token + 1) * map.columns) : inside, outside, whole: true };
  }
  const head = heads[number];
  if (view.which === 'other' || !head.k || token >= lists(head).keys.length / head.k) return { inside, outside, whole: false };
  const { keys, top } = lists(head);
  for (let at = token * head.k; at < (token + 1) * head.k; at++) {
    if (top[at] <= 0) continue;
    if (!head.cross && keys[at] < inside.length) inside[keys[at]] = top[at];
    else outside.push({ key: keys[at], weight: top[at] });
  }
  return { inside, outside, whole: false };
}

const listed = new Map(); // head -> its strongest keys and their weights, unpacked when first needed

export function lists(head) {
  if (!listed.has(head)) listed.set(head, { keys: unpacked(head.keys, data.wide ? 4 : 2), top: weights(head.weights) });
  return listed.get(head);
}

/**
 * The same through one head, or, where it is -1, as the mean over all heads that read this text.
 * @param {number} number
 * @param {number} token
 * @returns {Look}
 */
export function looksThrough(number, token) {
  if (number >= 0) return looksOf(number, token);
  const readers = heads.map((_, at) => at).filter((at) => !heads[at].cross && (!shown.exact || hasMap(at)));
  const inside = new Float32Array(shown.tokens.length);
  for (const at of readers) looksOf(at, token).inside.forEach((weight, key) => { inside[key] += weight / readers.length; });
  return { inside, outside: [], whole: shown.exact };
}

/**
 * What each token receives, the mean over the queries.
 * @param {number} number
 * @returns {number[]}
 */
export function receivedBy(number) {
  const size = shown.tokens.length, map = shown.exact && ownMap(number);
  if (map) return shown.tokens.map((_, key) => shown.tokens.reduce((sum, _t, row) => sum + map.weights[row * size + key], 0) / size);
  const head = heads[number];
  if (shown.exact || head.cross || !head.received || view.which === 'other') return [];
  return Array.from(weights(head.received), (part) => part * head.largest);
}
