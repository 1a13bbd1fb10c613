// --- What the page knows and what it shows now; how its numbers are put into words ---

import { PHRASES, byId, bytesOf, element, language, putWords, readData, say } from './page/base.js';

/**
 * @typedef {[number, number|null, number|null, number]} Interval  mean, low, high, number of documents; no low and
 *   high where they are not known
 *
 * @typedef {Object} Head  of `_heads` in `view/report.py`
 * @property {string} name  such as L0.H3
 * @property {string} part  the stack: '' , or such as encoder, and cross for attention from one to the other
 * @property {(Interval|null)[]} values  of each column
 * @property {(number|null)[]} uniform  of each column, what even attention would have
 * @property {number[]} roles  places in `data.roles`
 * @property {[string, Object][]} says  the sentence, as keys of phrases with their values
 * Its pictures and its strongest looks are explained at `_numbers` and `_text_of` there.
 *
 * @typedef {Object} Column  a statistic
 * @property {string} key
 * @property {string} label  in English
 * @property {number} decimals
 * @property {boolean} signed  does a number above 0 have a +?
 */

export const LEVELS = 65535; // a stored weight is a whole number of this many parts, in two bytes
export const ROUNDS_TO_0 = 0.0005; // below it a weight of three decimals is written as 0.000
const UNMOVED = 0.005; // half a percentage point: a chance that changes by less counts as unchanged

/** @type {Object} what `survey_data` of `view/report.py` gives; on the page of a live model less (`look_html`) */
export const data = readData('data');
/** @type {Head[]} */
export const heads = data.heads;
/** @type {Map<string, number>} name -> place in `heads`, by which the scripts call a head */
export const numberOf = new Map(heads.map((head, number) => [head.name, number]));

/** @type {Object} what is shown now */
export const view = {
  at: -1, pinned: false, // the token that is looked at, -1: none; one that is pinned stays while the pointer moves on
  through: -1, // the head through which the sentence is seen; -1: all of them
  latest: 0, // the head through which it was seen last
  changes: new Map(), // name of a head -> its factor, where it is not 1
  scale: 'own', // the last colour is each picture's largest weight; 'fixed': it is 1
  hideFirst: false, log: false, arcs: false, // switches: without the first token, on a log scale, with arcs
  roles: new Set(), words: [], // the filter: places in `data.roles`, and what is searched for
  open: -1, row: 0, column: 0, // the head that is enlarged, -1: none; the chosen cell of its map
  beside: '', // the name of the head that stands beside it, or ''
};

/**
 * Whole numbers from 0 on, little-endian, of two or four bytes each.
 * @param {string} base64
 * @param {number} [bytes]  of each number
 * @returns {number[]}
 */
export function unpacked(base64, bytes = 2) {
  const stored = bytesOf(base64), numbers = new Array(stored.length / bytes);
  for (let place = 0, at = 0; place < numbers.length; place++, at += bytes) {
    let value = 0;
    for (let byte = bytes - 1; byte >= 0; byte--) value = value * 256 + stored[at + byte]; // the last counts most
    numbers[place] = value;
  }
  return numbers;
}

/**
 * Weights from 0 to 1, as `quantised` of `view/report.py` stores them.
 * @param {string} base64
 * @returns {Float32Array}
 */
export function weights(base64) { return Float32Array.from(unpacked(base64), (level) => level / LEVELS); }

/**
 * Each value once, in the order in which they come first.
 * @template T
 * @param {T[]} values
 * @returns {T[]}
 */
export function distinct(values) { return [...new Set(values)]; }

/**
 * The largest size, whatever the sign; 0 of no numbers.
 * @param {number[]|Float32Array} numbers
 * @returns {number}
 */
export function largestOf(numbers) { return numbers.reduce((most, value) => Math.max(most, Math.abs(value)), 0); }

// --- Numbers and words ---

/**
 * A phrase of the table where it has one, else the text that came with the data, which is English.
 * @param {string} key
 * @param {string} text
 * @returns {string}
 */
export function sayOr(key, text) { return key in PHRASES[language()] ? say(key) : text; }

/**
 * The key of a statistic or a role in the table of phrases: "previous token" -> previous_token.
 * @param {string} name
 * @returns {string}
 */
export function keyOf(name) { return name.replaceAll(' ', '_'); }

/**
 * The name of a role in the page's language.
 * @param {string} name  in English
 * @returns {string}
 */
export function roleName(name) { return sayOr(`role.${keyOf(name)}`, name); }

/**
 * What a head does, in the words made from its numbers when it was measured.
 * @param {Element} target
 * @param {Head} head
 */
export function putSentence(target, head) {
  target.replaceChildren();
  for (const [key, values] of head.says) {
    const part = element('span');
    putWords(part, key, { ...values, role: values.role && roleName(values.role) }); // a role comes in English
    target.append(part, ' ');
  }
}

/**
 * A weight, or a difference of weights, with three decimals: 0.310, −0.310. One above 0 that would round to 0.000 is
 * called tiny, so that it is not taken for none.
 * @param {number} weight
 * @returns {string}
 */
export function inWords(weight) {
  const size = Math.abs(weight);
  const value = size > 0 && size < ROUNDS_TO_0 ? say('report.tiny') : size.toFixed(3);
  return weight < -ROUNDS_TO_0 ? '−' + value : value;
}

/**
 * 95 %, 4.7 %, 0.03 %: two digits that mean something.
 * @param {number} part
 * @returns {string}
 */
export function percent(part) {
  const hundred = 100 * part;
  if (hundred < 0.005) return '0 %'; // what two decimals would round to 0.00
  const decimals = hundred < 0.095 ? 2 : hundred < 9.95 ? 1 : 0; // what rounds to 0.1 has one, what rounds to 10 none
  return `${hundred.toFixed(decimals)} %`;
}

/**
 * The difference of two parts of a whole in percentage points: −93, +0.4, 0. Below a twentieth of a point it is 0.
 * @param {number} change  a difference of numbers from 0 to 1
 * @returns {string}
 */
export function points(change) {
  return Math.abs(change) < 0.0005 ? '0' : `${change > 0 ? '+' : '−'}${percent(Math.abs(change)).replace(' %', '')}`;
}

/**
 * What has become of a chance: the class of its cell, which is '' where it stays.
 * @param {number} change
 * @returns {'fall'|'rise'|''}
 */
export function moved(change) { return change < -UNMOVED ? 'fall' : change > UNMOVED ? 'rise' : ''; }

/**
 * What has become of a chance: the key of the phrase.
 * @param {number} change
 * @returns {string}
 */
export function movedWords(change) {
  return { fall: 'report.falls_to', rise: 'report.rises_to' }[moved(change)] ?? 'report.stays_at';
}

/**
 * A number of the table, with the decimals of its column; no zero has a sign. A dash for what is not there.
 * @param {number|null|undefined} value
 * @param {Column} column
 * @param {boolean} [sign]  does a number above 0 have a +?
 * @returns {string}
 */
export function figure(value, column, sign = column.signed) {
  if (value === null || value === undefined) return '–';
  const text = Math.abs(value).toLocaleString('en-US',
    { minimumFractionDigits: column.decimals, maximumFractionDigits: column.decimals });
  const zero = !/[1-9]/.test(text);
  return (zero || (value > 0 && !sign) ? '' : value > 0 ? '+' : '−') + text;
}

/**
 * A count with a comma at the thousands, in every language: 12,000.
 * @param {number} number
 * @returns {string}
 */
export function count(number) { return number.toLocaleString('en-US'); }

/**
 * The interval of a value in words, or why there is none.
 * @param {Interval|null} value
 * @param {Column} column
 * @returns {string}
 */
export function intervalIn(value, column) {
  if (!value) return say('report.undefined'); // of this head the statistic is not defined
  if (!value[3]) return say('report.no_interval'); // importance, of whose spread nothing is known
  if (value[1] === null || value[2] === null) return say('report.single_document');
  if (value[3] === 1) return say('report.exact_value'); // a statistic of the weights alone, which no document changes
  return say('report.from_to', { low: figure(value[1], column), high: figure(value[2], column) });
}

/**
 * A token in quotation marks. U+2068 and U+2069 (first strong isolate) keep a right-to-left token from turning the
 * words and numbers around it.
 * @param {string} token
 * @returns {string}
 */
export function quoted(token) { return '‘\u2068' + token + '\u2069’'; }

/**
 * At most twelve characters of a token; whole code points, so that an emoji is not cut in half.
 * @param {string} token
 * @param {number} [most]
 * @returns {string}
 */
export function cut(token, most = 12) {
  const characters = [...token];
  return characters.length > most ? characters.slice(0, most - 1).join('') + '…' : characters.join('');
}

/**
 * A token by its place and, where that is known, its text: token 3 ‘el’.
 * @param {number} token  its place in the text
 * @param {string[]} tokens  the text, or its beginning
 * @returns {string}
 */
export function named(token, tokens) {
  return token in tokens // is there an entry at this place?
    ? say('report.token_named', { token, name: quoted(tokens[token]) })
    : say('report.token', { token });
}

/**
 * The name of a head without its stack: encoder.L0.H3 -> L0.H3.
 * @param {string} name
 * @returns {string}
 */
export function shortName(name) { return name.split('.').slice(-2).join('.'); }

// --- Parts of a page ---

/**
 * A cell with a bar as long as a part of a whole, and that part in percent.
 * @param {number} part  from 0 to 1
 * @param {string} kind  the class of the bar: ours or theirs, for two colours
 * @param {string} [tag]  of the cell
 * @returns {HTMLElement}
 */
export function bar(part, kind, tag = 'td') {
  const cell = element(tag, 'bar-cell'), track = element('span', 'track'), filled = element('span', kind);
  filled.style.width = `${(100 * part).toFixed(2)}%`;
  track.append(filled);
  cell.append(track, element('span', 'part', percent(part)));
  return cell;
}

/**
 * Puts a phrase into the element of an id, its marks as elements. Who calls it makes it anew with every change, so
 * that it does not follow the language by itself.
 * @param {string} id
 * @param {string} key  of the phrase
 * @param {Object} values
 */
export function setText(id, key, values) { putWords(byId(id), key, values); }

/**
 * The heading of a row or column of a table.
 * @param {string} scope  row, col or colgroup
 * @param {string} name
 * @returns {HTMLElement}
 */
export function scoped(scope, name) {
  const heading = element('th', '', name);
  heading.scope = scope;
  return heading;
}
