// --- What the page knows and what it shows now ---

import { PHRASES, byId, bytesOf, element, language, putWords, readData, say } from './page/base.js';

/**
 * @typedef {[number, number|null, number|null, number]} Interval  mean, low, high, number of documents
 *
 * @typedef {Object} Head  of `view/report.py`
 * @property {string} name
 * @property {(Interval|null)[]} values  of each column
 * @property {number[]} roles  places in `data.roles`
 * @property {[string, Object][]} says  the sentence, as keys of phrases with their values
 *
 * @typedef {Object} Column
 * @property {string} key
 * @property {string} label
 * @property {number} decimals
 * @property {boolean} signed
 */

export const LEVELS = 65535; // a stored weight is a whole number of this many parts
export const ROUNDS_TO_0 = 0.0005; // below it a weight of three decimals is written as 0.000
const UNMOVED = 0.005; // half a percentage point: a chance that changes by less counts as unchanged

/** @type {Object} what `survey_data` of `view/report.py` gives */
export const data = readData('data');
/** @type {Head[]} */
export const heads = data.heads;
/** @type {Map<string, number>} */
export const numberOf = new Map(heads.map((head, number) => [head.name, number]));

/** @type {Object} what is shown now */
export const view = {
  at: -1, pinned: false, // the token that is looked at; one that is pinned stays while the pointer moves on
  through: -1, // the head through which the sentence is seen; -1: all of them
  latest: 0, // the head that was so last
  changes: new Map(), // name of a head -> its factor, where it is not 1
  which: 'this', scale: 'own', hideFirst: false, log: false, arcs: false, // the pictures
  roles: new Set(), words: [], // the filter
  open: -1, row: 0, column: 0, beside: '', // the large view
};

/**
 * Whole numbers, little-endian, of two or four bytes each.
 * @param {string} base64
 * @param {number} [bytes]
 * @returns {number[]}
 */
export function unpacked(base64, bytes = 2) {
  const stored = bytesOf(base64), numbers = new Array(stored.length / bytes);
  for (let place = 0, at = 0; place < numbers.length; place++, at += bytes) {
    let value = 0;
    for (let byte = bytes - 1; byte >= 0; byte--) value = value * 256 + stored[at + byte];
    numbers[place] = value;
  }
  return numbers;
}

/**
 * @param {string} base64
 * @returns {Float32Array}
 */
export function weights(base64) { return Float32Array.from(unpacked(base64), (level) => level / LEVELS); }

/**
 * @template T
 * @param {T[]} values
 * @returns {T[]}
 */
export function distinct(values) { return [...new Set(values)]; }

/**
 * @param {number[]} numbers
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
 * The name of a statistic or a role as the table of phrases has it.
 * @param {string} name
 * @returns {string}
 */
export function keyOf(name) { return name.replaceAll(' ', '_'); }

/**
 * @param {string} name
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
    putWords(part, key, { ...values, role: values.role && roleName(values.role) });
    target.append(part, ' ');
  }
}

/**
 * @param {number} weight
 * @returns {string}
 */
export function inWords(weight) {
  const size = Math.abs(weight);
  const value = size > 0 && size < ROUNDS_TO_0 ? say('report.tiny') : size.toFixed(3);
  return weight < -ROUNDS_TO_0 ? '−' + value : value;
}

/**
 * @param {number} weight
 * @returns {string}
 */
export function signed(weight) { return weight >= ROUNDS_TO_0 ? '+' + inWords(weight) : inWords(weight); }

/**
 * 95 %, 4.7 %, 0.03 %: two digits that mean something.
 * @param {number} part
 * @returns {string}
 */
export function percent(part) {
  const hundred = 100 * part;
  if (hundred < 0.005) return '0 %';
  const decimals = hundred < 0.095 ? 2 : hundred < 9.95 ? 1 : 0; // what rounds to 0.1 has one, what rounds to 10 none
  return `${hundred.toFixed(decimals)} %`;
}

/**
 * The difference of two shares in percentage points: −93, +0.4, 0.
 * @param {number} change
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
export function movedWords(change) { return { fall: 'report.falls_to', rise: 'report.rises_to' }[moved(change)] ?? 'report.stays_at'; }

/**
 * A number of the table, with the decimals of its column; no zero has a sign.
 * @param {number|null|undefined} value
 * @param {Column} column
 * @param {boolean} [sign]
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
 * @param {number} number
 * @returns {string}
 */
export function count(number) { return number.toLocaleString('en-US'); }

/**
 * @param {Interval|null} value
 * @param {Column} column
 * @returns {string}
 */
export function intervalIn(value, column) {
  if (!value) return say('report.undefined');
  if (!value[3]) return say('report.no_interval');
  if (value[1] === null || value[2] === null) return say('report.single_document');
  if (value[3] === 1) return say('report.exact_value');
  return say('report.from_to', { low: figure(value[1], column), high: figure(value[2], column) });
}

/**
 * First strong isolates keep a right-to-left token from turning the words and numbers around it.
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
 * @param {number} token
 * @param {string[]} tokens
 * @returns {string}
 */
export function named(token, tokens) {
  return token in tokens ? say('report.token_named', { token, name: quoted(tokens[token]) }) : say('report.token', { token });
}

/**
 * The name without its stack.
 * @param {string} name
 * @returns {string}
 */
export function shortName(name) { return name.split('.').slice(-2).join('.'); }

// --- Parts of a page ---

/**
 * A cell with a bar as long as a part of a whole, and that part in words.
 * @param {number} part
 * @param {string} kind  the class of the bar
 * @param {string} [tag]
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
 * A phrase whose marks are elements; it is made anew with every change, so it does not follow the language by itself.
 * @param {string} id
 * @param {string} key
 * @param {Object} values
 */
export function setText(id, key, values) { putWords(byId(id), key, values); }

/**
 * @param {string} scope  row or col
 * @param {string} name
 * @returns {HTMLElement}
 */
export function scoped(scope, name) {
  const heading = element('th', '', name);
  heading.scope = scope;
  return heading;
}
