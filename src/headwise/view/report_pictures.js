// --- What a picture shows: rows, columns, and weights from 0 to 1 row by row ---
//
// Of the text's own tokens each is a row and a column. Of a long document the survey stored fewer: a row or column is
// then a block of tokens, and `number` of a head, `block` of a row or column, and `blocks`, how many there are,
// place it.

import { say } from './page/base.js';
import { hasMap, shown } from './report_shown.js';
import { LEVELS, cut, data, heads, inWords, largestOf, named, view, weights } from './report_state.js';

const unpackedOnce = new Map(); // base64 -> its weights

function kept(base64) {
  if (!unpackedOnce.has(base64)) unpackedOnce.set(base64, weights(base64));
  return unpackedOnce.get(base64);
}

/**
 * @typedef {Object} Picture
 * @property {number} rows
 * @property {number} columns
 * @property {Float32Array} weights  row by row
 * @property {Float32Array} first  of each row, what of its first column goes to the first token alone
 * @property {boolean} [blocks]  is it of blocks of tokens?
 *
 * What `asDrawn` adds:
 * @property {Float32Array} [drawn]  the weights that have colours: without the first token, where the reader hides it
 * @property {number} [top]  the weight that has the last colour
 */

// The map of the text shown; for a passage what the survey stored of its document: the fraction of its attention that
// a block of rows gives a block of columns. Nothing where there is none.
export function storedOf(number) {
  const head = heads[number];
  if (shown.exact) return hasMap(number) ? shown.maps.get(head.name) : null;
  return { rows: head.rows, columns: head.columns, weights: kept(head.shares), first: kept(head.first), blocks: true };
}

// What is left without the first token; the first column of a picture of blocks holds others, too. Both
// numbers are rounded, so that the token may have a little more than its column: hence the 0.
function withoutFirst(picture) {
  const left = picture.weights.slice();
  picture.first.forEach((weight, row) => {
    left[row * picture.columns] = Math.max(0, left[row * picture.columns] - weight);
  });
  return left;
}

// The largest weight where a row has a choice. The first row of a causal map has none: it can look only at itself,
// and its 1 would leave all others pale. 1 where all weights are 0, since weights are divided by it.
function largestChoice(picture, drawn) {
  // Has the first row nothing behind its first column? A weight below one level is 0 in the file.
  const forced = picture.rows > 1 && picture.weights.slice(1, picture.columns).every((weight) => weight < 1 / LEVELS);
  return largestOf(forced ? drawn.slice(picture.columns) : drawn) || 1;
}

// A picture after the reader's switches: the first token hidden or not, a scale of its own or up to 1.
function asDrawn(picture) {
  const drawn = view.hideFirst ? withoutFirst(picture) : picture.weights;
  const top = view.scale === 'own' ? largestChoice(picture, drawn) : 1;
  return { ...picture, drawn, top };
}

/**
 * The picture of a head, or null where it has no map.
 * @param {number} number  of the head
 * @returns {Picture|null}
 */
export function pictureOf(number) {
  const stored = storedOf(number);
  return stored && asDrawn(stored);
}

// --- Where a row or a column lies in the text ---

// [first, last] token of a block; null where the length of the text is not known. Token i lies in the block
// floor(i * blocks / length), so a block begins at the first i that reaches it.
function spanOf(block, blocks, length) {
  if (!length) return null;
  return [Math.ceil((block * length) / blocks), Math.ceil(((block + 1) * length) / blocks) - 1];
}

// Where a block lies in a text of unknown length: the third of four is "50–75 %".
function share(block, blocks) {
  return `${Math.round((100 * block) / blocks)}–${Math.round((100 * (block + 1)) / blocks)} %`;
}

/**
 * The row of a picture in which a token lies; -1 where that is not known, and where no token is looked at.
 * @param {number} token  its place in the text, or -1
 * @param {number} number  of the head
 * @param {Picture} picture
 * @returns {number}
 */
export function rowOf(token, number, picture) {
  if (token < 0 || !picture.blocks) return token;
  const head = heads[number];
  return head.length ? Math.floor((token * picture.rows) / head.length) : -1;
}

// The label of a row or column: its token, or the tokens of its block, "16–23".
export function placeLabel(number, picture, block, blocks) {
  if (!picture.blocks) return cut(shown.tokens[block]);
  const span = spanOf(block, blocks, heads[number].length);
  if (!span) return share(block, blocks);
  return span[0] < span[1] ? `${span[0]}–${span[1]}` : cut(data.tokens[span[0]] ?? String(span[0]));
}

// A row or column in words, and whether these are several tokens, so that the verb is a plural. `isKey`: it is a
// column, which in cross attention lies in the other text.
function placeWords(number, picture, block, blocks, isKey) {
  if (!picture.blocks) return [named(block, shown.tokens), false];
  const span = spanOf(block, blocks, heads[number].length);
  const text = say(isKey && heads[number].cross ? 'report.other_text' : 'report.the_text');
  if (!span) return [say('report.share_of', { share: share(block, blocks), text }), false];
  return span[0] < span[1]
    ? [say('report.tokens_to', { from: span[0], to: span[1] }), true]
    : [named(span[0], data.tokens), false];
}

// "Token 5 ‘el’ looks at token 3 ‘la’: 0.310", or of blocks "tokens 16 to 23 look at ...".
export function wordsForCell(number, picture, row, column) {
  const value = inWords(picture.weights[row * picture.columns + column]);
  const [from, many] = placeWords(number, picture, row, picture.rows, false);
  const [to] = placeWords(number, picture, column, picture.columns, true);
  return say(many ? 'report.look_at' : 'report.looks_at', { from, to, value });
}
