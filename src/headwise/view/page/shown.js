// --- What a picture shows: rows, columns, and weights from 0 to 1 row by row; and where a head looks ---
//
// Three texts take turns in `view.shown`: the passage is the beginning of the survey's first document, of which the
// file has, for each head, a picture in blocks and the strongest looks of each token; the sentence has whole maps in
// the file; and the reader's own has those of the engine. Of the text's own tokens each is a row and a column; of a
// passage a row or column is a block of tokens, and `block` and `blocks`, how many there are, place it.

import { emit, say } from './base.js';
import { engine } from './engine.js';
import { LEVELS, cut, data, heads, inWords, largestOf, levels, named, view, weights } from './state.js';

const FAINT = 0.1; // of a live model the last colour is at least for this weight: a faint map stays pale

export const passage = data.tokens && { tokens: data.tokens.slice(0, data.passage), exact: false };
export const sentence = data.maps && { tokens: data.maps.tokens, exact: true, maps: mapsOf(data.maps) };
const unpack = once(weights); // base64 -> its weights
// A head's strongest keys and their weights, k for each token of the passage.
const lists = once((head) => ({ keys: levels(head.keys), top: weights(head.weights) }));

// Makes the value of a key when it is first asked for.
function once(make) {
  const made = new Map();
  return (key) => {
    if (!made.has(key)) made.set(key, make(key));
    return made.get(key);
  };
}

// The maps of the file by the names of heads: base64, without the zeros above the diagonal of a causal model.
function mapsOf(stored) {
  const size = stored.tokens.length, has = (name) => name in stored.weights;
  const get = once((name) => {
    const packed = weights(stored.weights[name]), full = new Float32Array(size * size);
    for (let row = 0, at = 0; row < size; row++) {
      const width = stored.causal ? row + 1 : size; // weights of the row that are stored
      full.set(packed.subarray(at, at + width), row * size);
      at += width;
    }
    return { rows: size, columns: size, weights: full };
  });
  return { has, get: (name) => (has(name) ? get(name) : undefined) };
}

// Shows a text everywhere. If only its maps are new, its words stay, so that one of them keeps the focus.
export function showText(text) {
  const before = view.shown, marked = ({ unknown }) => Boolean(unknown?.includes(true));
  const same = marked(text) === marked(before) && !text.words && text.tokens.length === before.tokens.length
    && text.tokens.every((token, at) => token === before.tokens[at]);
  view.shown = text;
  if (!same) {
    view.at = Math.min(view.at, text.tokens.length - 1);
    emit('words');
  }
  emit('maps');
  emit('point');
}

// The map of the text shown; of a passage, the fraction of its attention that a block of rows gives to each.
export function storedOf(number) {
  const head = heads[number];
  if (view.shown.exact) return view.shown.maps.get(head.name);
  const { rows, columns } = head;
  return { rows, columns, weights: unpack(head.shares), first: unpack(head.first), blocks: true };
}

// Without the first token. Of a block's column it has `first`; both are rounded, and it may have a little more.
function withoutFirst({ rows, columns, weights: all, first }) {
  const left = all.slice();
  for (let row = 0, at = 0; row < rows; row++, at += columns) left[at] = first ? Math.max(0, all[at] - first[row]) : 0;
  return left;
}

// The largest weight where a row has a choice. The first row of a causal map has none: it can look only at itself,
// and its 1 would leave all others pale. 1 where all weights are 0, since weights are divided by it.
function largestChoice(picture, drawn) {
  if (data.served) { // without the first row, the first column and the diagonal: 0, columns + 1, 2 (columns + 1), ...
    const { columns } = picture;
    return Math.max(FAINT, largestOf(drawn.filter((_, at) => at >= columns && at % columns && at % (columns + 1))));
  }
  // Has the first row nothing behind its first column? A weight below one level is 0 in the file.
  const forced = picture.rows > 1 && picture.weights.slice(1, picture.columns).every((weight) => weight < 1 / LEVELS);
  return largestOf(forced ? drawn.slice(picture.columns) : drawn) || 1;
}

// The picture of a head after the reader's switches, undefined where it has no map: {rows, columns, weights}; `drawn`,
// the weights that have colours, `top`, the one that has the last colour, and `diverging`, are there weights below 0?
// Between two texts it is their difference.
export function pictureOf(number) {
  const picture = storedOf(number), apart = picture && engine.difference(number);
  if (!picture) return undefined;
  if (apart) return { ...picture, drawn: apart, diverging: true, top: Math.max(FAINT, largestOf(apart)) };
  const drawn = view.hideFirst ? withoutFirst(picture) : picture.weights;
  return { ...picture, drawn, top: view.scale === 'own' ? largestChoice(picture, drawn) : 1, diverging: false };
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

// The row of a picture in which a token lies; -1 where that is not known, and where no token is looked at.
export function rowOf(token, number, picture) {
  if (token < 0 || !picture.blocks) return token;
  const { length } = heads[number];
  return length ? Math.floor((token * picture.rows) / length) : -1;
}

// The label of a row or column: its token, or the tokens of its block, "16–23".
export function placeLabel(number, picture, block, blocks) {
  if (!picture.blocks) return cut(view.shown.tokens[block] ?? ''); // in cross attention there may be more keys
  const span = spanOf(block, blocks, heads[number].length);
  if (!span) return share(block, blocks);
  return span[0] < span[1] ? `${span[0]}–${span[1]}` : cut(data.tokens[span[0]] ?? String(span[0]));
}

// A row or column in words, and of how many tokens, so that the verb agrees. `isKey`: it is a column, which in cross
// attention lies in the other text.
function placeWords(number, picture, block, blocks, isKey) {
  if (!picture.blocks) return [named(block, view.shown.tokens), 1];
  const span = spanOf(block, blocks, heads[number].length);
  const text = say(isKey && heads[number].cross ? 'report.other_text' : 'report.the_text');
  if (!span) return [say('report.share_of', { share: share(block, blocks), text }), 1];
  const [from, to] = span;
  return from < to ? [say('report.tokens_to', { from, to }), to - from + 1] : [named(from, data.tokens), 1];
}

// "Token 5 ‘el’ looks at token 3 ‘la’: 0.310", or of blocks "tokens 16 to 23 look at ...".
export function wordsForCell(number, picture, row, column) {
  const at = row * picture.columns + column, value = inWords((picture.diverging ? picture.drawn : picture.weights)[at]);
  const [from, n] = placeWords(number, picture, row, picture.rows, false);
  const [to] = placeWords(number, picture, column, picture.columns, true);
  return say('report.looks_at', { from, n, to, value });
}

// --- Where a head looks ---

// Of how many tokens of the text is it known where the head looks?
export function knownOf(number) {
  const head = heads[number];
  return view.shown.exact ? view.shown.tokens.length : head.k ? lists(head).keys.length / head.k : 0;
}

// Where a head looks from a token: `inside`, the weights on the tokens shown; `outside`, the strongest keys beyond
// them, {key, weight}; `whole`, are these all weights? Otherwise `inside` has only the strongest, and 0 for the others.
export function looksOf(number, token) {
  const inside = new Float32Array(view.shown.tokens.length), outside = [], head = heads[number];
  if (view.shown.exact) {
    const map = storedOf(number), row = map?.weights.slice(token * map.columns, (token + 1) * map.columns);
    return { inside: row?.length === inside.length ? row : inside, outside, whole: true };
  }
  // In a passage: the k strongest keys of each token, which the file has of so many tokens.
  if (token >= knownOf(number)) return { inside, outside, whole: false };
  const { keys, top } = lists(head);
  for (let at = token * head.k; at < (token + 1) * head.k; at++) {
    if (top[at] <= 0) continue; // a token that sees fewer than k keys has 0 in the other places
    if (!head.cross && keys[at] < inside.length) inside[keys[at]] = top[at]; // in cross attention keys lie elsewhere
    else outside.push({ key: keys[at], weight: top[at] });
  }
  return { inside, outside, whole: false };
}

// The same through one head, or, where it is -1, as the mean over all heads whose keys are of this text; null where the
// maps of all are not there.
export function looksThrough(number, token) {
  if (number >= 0) return data.served && !storedOf(number) ? null : looksOf(number, token);
  if (data.served) return null;
  const readers = [...heads.keys()]
    .filter((at) => !heads[at].cross && (!view.shown.exact || view.shown.maps.has(heads[at].name)));
  const inside = new Float32Array(view.shown.tokens.length);
  for (const at of readers) looksOf(at, token).inside
    .forEach((weight, key) => { inside[key] += weight / readers.length; });
  return { inside, outside: [], whole: view.shown.exact };
}

// What each token of the text receives from a head, the mean over the queries; an empty list where it is not known.
export function receivedBy(number) {
  const { tokens, exact } = view.shown, size = tokens.length, map = exact && storedOf(number);
  if (map) return tokens.map((_, key) => // the mean of a column
    tokens.reduce((sum, _t, row) => sum + map.weights[row * size + key], 0) / size);
  const head = heads[number];
  if (exact || head.cross || !head.received) return [];
  return Array.from(weights(head.received), (part) => part * head.largest); // stored as parts of the largest
}
