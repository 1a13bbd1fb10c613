// --- The text that is shown, one for the sentence, the grid, the large view and the table ---
//
// There are three: the passage is the beginning of the survey's first document, of which the file has, for each head,
// a picture in blocks and the strongest looks of each token; the sentence has whole maps in the file; and the
// reader's own has those of the model in the page.

import { drawGrid, makeLabels } from './report_grid.js';
import { showHead } from './report_head.js';
import { makeSentence, showPoint } from './report_sentence.js';
import { data, heads, unpacked, view, weights } from './report_state.js';

/**
 * @typedef {Object} Shown
 * @property {string[]} tokens  what is written
 * @property {boolean} exact  has each head a map of just these tokens? Otherwise pictures are of blocks of the first
 *   document, of which these are the first tokens
 * @property {Object} [maps]  a head's name -> its map (a `Picture`), made when needed
 * @property {boolean} [typed]  is it the reader's own?
 * @property {boolean[]} [unknown]  which tokens stand for words that the model lacks
 *
 * @typedef {Object} Look
 * @property {Float32Array} inside  the weights on the tokens shown
 * @property {{key: number, weight: number}[]} outside  the strongest keys beyond them
 * @property {boolean} whole  are these all weights? Otherwise `inside` has only the strongest, and 0 for the others
 */

/** @type {Shown} */
export const passage = { tokens: data.tokens.slice(0, data.passage), exact: false };
/** @type {Shown|null} none without maps */
export const sentence = data.maps && { tokens: data.maps.tokens, exact: true, maps: unpackedMaps(data.maps) };
export let shown = sentence || passage;

// The maps of the file, by the names of heads as in a Map, each unpacked when first needed. They are base64, without
// the zeros above the diagonal where the model is causal.
function unpackedMaps(stored) {
  const made = new Map();
  return {
    has: (name) => name in stored.weights,
    get: (name) => {
      if (!(name in stored.weights)) return undefined;
      if (!made.has(name)) made.set(name, squareOf(stored, name));
      return made.get(name);
    },
  };
}

// One of these maps with the zeros put back.
function squareOf(stored, name) {
  const size = stored.tokens.length, packed = weights(stored.weights[name]), full = new Float32Array(size * size);
  for (let row = 0, at = 0; row < size; row++) {
    const width = stored.causal ? row + 1 : size; // weights of the row that are stored
    full.set(packed.subarray(at, at + width), row * size);
    at += width;
  }
  return mapOf(full, size);
}

// A square map as a `Picture`; `first` is its first column, since there a column is one token.
export function mapOf(full, size) {
  return { rows: size, columns: size, weights: full, first: full.filter((_, at) => at % size === 0) };
}

// The rows of a map as one list, which may be one already: then its first entry is a number, and has no length.
export function flatMap(rows) {
  return rows.length && rows[0].length ? Float32Array.from(rows.flatMap((row) => [...row])) : rows;
}

// Shows a text everywhere. If only its maps are new, its words stay, so that one of them keeps the focus.
export function showText(text) {
  const marked = ({ unknown }) => Boolean(unknown?.includes(true)); // has it words that the model lacks?
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

// Has a head a map of the text that is shown?
export function hasMap(number) { return shown.exact && shown.maps.has(heads[number].name); }

/**
 * Where a head looks from a token; nowhere, where it is not known.
 * @param {number} number  of the head
 * @param {number} token  its place in the text
 * @returns {Look}
 */
export function looksOf(number, token) {
  const inside = new Float32Array(shown.tokens.length), outside = [];
  if (shown.exact) {
    const map = shown.maps.get(heads[number].name);
    return {
      inside: map ? map.weights.slice(token * map.columns, (token + 1) * map.columns) : inside, outside, whole: true,
    };
  }
  // In a passage: the k strongest keys of each token, which the file has of so many tokens.
  const head = heads[number];
  if (!head.k || token >= lists(head).keys.length / head.k) return {
    inside, outside, whole: false,
  };
  const { keys, top } = lists(head);
  for (let at = token * head.k; at < (token + 1) * head.k; at++) {
    if (top[at] <= 0) continue; // a token that sees fewer than k keys has 0 in the other places
    if (!head.cross && keys[at] < inside.length) inside[keys[at]] = top[at]; // in cross attention keys lie elsewhere
    else outside.push({ key: keys[at], weight: top[at] });
  }
  return { inside, outside, whole: false };
}

const listed = new Map(); // head -> what `lists` gave

/**
 * A head's strongest keys and their weights, k for each token of the passage, one token after the other; unpacked
 * when first needed. Positions of keys are numbers of two bytes, or of four in a long document (`wide`).
 * @param {Head} head
 * @returns {{keys: number[], top: Float32Array}}
 */
export function lists(head) {
  if (!listed.has(head)) listed.set(head, { keys: unpacked(head.keys, data.wide ? 4 : 2), top: weights(head.weights) });
  return listed.get(head);
}

/**
 * The same as `looksOf` through one head, or, where it is -1, as the mean over all heads whose keys are of this text.
 * @param {number} number  of the head
 * @param {number} token  its place in the text
 * @returns {Look}
 */
export function looksThrough(number, token) {
  if (number >= 0) return looksOf(number, token);
  const readers = heads.map((_, at) => at).filter((at) => !heads[at].cross && (!shown.exact || hasMap(at)));
  const inside = new Float32Array(shown.tokens.length);
  for (const at of readers) looksOf(at, token).inside
    .forEach((weight, key) => { inside[key] += weight / readers.length; });
  return { inside, outside: [], whole: shown.exact };
}

/**
 * What each token of the text receives from a head, the mean over the queries; an empty list where it is not known.
 * @param {number} number  of the head
 * @returns {number[]}
 */
export function receivedBy(number) {
  const size = shown.tokens.length, map = shown.exact && shown.maps.get(heads[number].name);
  if (map) return shown.tokens.map((_, key) => // the mean of a column
    shown.tokens.reduce((sum, _t, row) => sum + map.weights[row * size + key], 0) / size);
  const head = heads[number];
  if (shown.exact || head.cross || !head.received) return [];
  return Array.from(weights(head.received), (part) => part * head.largest); // stored as parts of the largest
}
