// --- What the page knows and what it shows now; how its numbers are put into words ---
//
// All scripts share `view`. Who changes it emits an event; what is shown of it is drawn by those that listen:
//   words     another text is shown             maps      the maps of the heads are new, or more of them are there
//   point     another token is looked at        pin       a token was pinned, or let go
//   through   another head is looked through    changes   a head was silenced, scaled, or taken back
//   large     another head is enlarged          closed    none is any more
//   switches  colours and scales                filter    which heads are looked at
//   address   what a link keeps has changed; with the detail true, in a step that Back takes again
//
// Heads and tokens are numbers: their places in `heads` and in the text.

import { PHRASES, byId, bytesOf, element, emit, grouped, language, putWords, readData, say, told } from './base.js';

export const LEVELS = 65535; // a stored weight is a whole number of this many parts, in two bytes
export const ROUNDS_TO_0 = 0.0005; // below it a weight of three decimals is written as 0.000
const UNMOVED = 0.005; // half a percentage point: a chance that changes by less counts as unchanged

// What `survey_data` of view/report.py gives; `served` is true on the page of a live model, which knows less
// (`look_html` in view/look.py).
export const data = readData('data');
export const heads = data.heads; // `_heads` in view/report.py says what its fields are
export const numberOf = new Map(heads.map((head, number) => [head.name, number]));

export const view = {
  // The text: its `tokens` as they are written; `exact`, has each head a map of just these, in `maps` by its name, or
  // else of blocks of the first document, whose first tokens these are? `typed`, is it the reader's own? `unknown`,
  // which are words that the model lacks; `words`, as tokens are set: {text, gap, lines, sign}.
  shown: { tokens: [], exact: true, maps: new Map() },
  at: -1, pinned: false, // the token that is looked at, -1: none; one that is pinned stays while the pointer moves on
  through: -1, answer: null, // the head seen through, -1: all of them; {name, at}, what the last question has found
  changes: new Map(), // name of a head -> its factor, where it is not 1
  scale: 'own', // the last colour is each picture's largest weight; 'fixed': it is 1
  hideFirst: false, log: false, // switches: without the first token, on a log scale
  roles: new Set(), words: [], // the filter: places in `data.roles`, and what is searched for
  open: -1, row: 0, column: 0, // the head that is enlarged, -1: none; the chosen cell of its map
  beside: '', // the name of the head that stands beside it, or ''
  temperature: 1, // of the prediction and of what is drawn
  follow: -1, // the id of the token whose chance is followed, -1: the one of the text, else the likeliest
  // Of a live model. Of each head [the kind of key that it looks at most, the part of its weight there]; of each token
  // the heads that look hardest from there, and between two texts those that differ most: [head, key, weight].
  kinds: [], hardest: [], differ: null,
};

// --- What changes it ---

// Looks at a token, at none where it is -1.
export function point(at) {
  if (at === view.at) return;
  view.at = at;
  emit('point');
}

// Looks at a token and stays there while the pointer moves on; the same token again, and -1, lets go.
export function pin(at) {
  view.pinned = at >= 0 && !(view.pinned && view.at === at);
  view.at = at;
  emit('point');
  emit('pin');
  emit('address');
}

// Sees the sentence through a head, or through all of them (-1).
export function lookThrough(number) {
  if (number === view.through || view.open >= 0) return; // an enlarged head stays the one
  view.through = number;
  emit('through');
}

export function factorOf(number) { return view.changes.get(heads[number].name) ?? 1; }

// Gives a head a factor: 0 silences it, 1 leaves it as it is.
export function scaleHead(number, factor) {
  if (factor === 1) view.changes.delete(heads[number].name);
  else view.changes.set(heads[number].name, factor);
  emit('changes');
}

export function toggleSilence(number) { scaleHead(number, factorOf(number) === 0 ? 1 : 0); }

// Does the filter leave this head? It must have one of the chosen roles, and all words in its name or its roles' names.
export function matches(number) {
  const head = heads[number], text = `${head.name} ${roleWords(head)}`.toLowerCase();
  return (!view.roles.size || head.roles.some((role) => view.roles.has(role))) &&
    view.words.every((word) => text.includes(word));
}

// --- Numbers ---

// Whole numbers of two bytes, and weights from 0 to 1 in such levels, as `quantised` of view/report.py stores them.
export function levels(base64) { return new Uint16Array(bytesOf(base64).buffer); }
export function weights(base64) { return Float32Array.from(levels(base64), (level) => level / LEVELS); }
// Each value once, in the order in which they come first.
export function distinct(values) { return [...new Set(values)]; }
// The largest size, whatever the sign; 0 of no numbers.
export function largestOf(numbers) { return numbers.reduce((most, value) => Math.max(most, Math.abs(value)), 0); }

// A weight, or a difference, with three decimals: 0.310, −0.310; one above 0 that rounds to 0.000 is called tiny.
export function inWords(weight) {
  const size = Math.abs(weight);
  const value = size > 0 && size < ROUNDS_TO_0 ? say('report.tiny') : size.toFixed(3);
  return weight < -ROUNDS_TO_0 ? '−' + value : value;
}

// A part of a whole, with two digits that mean something: 95 %, 4.7 %, 0.03 %.
export function percent(part) {
  const hundred = 100 * part;
  if (hundred < 0.005) return '0\u00a0%'; // what two decimals would round to 0.00
  const decimals = hundred < 0.095 ? 2 : hundred < 9.95 ? 1 : 0; // what rounds to 0.1 has one, what rounds to 10 none
  return `${hundred.toFixed(decimals)}\u00a0%`; // a space at which no line ends
}

// The difference of two parts of a whole in percentage points: −93, +0.4, 0. Below a twentieth of a point it is 0.
export function points(change) {
  if (Math.abs(change) < 0.0005) return '0';
  return `${change > 0 ? '+' : '−'}${percent(Math.abs(change)).replace('\u00a0%', '')}`;
}

// What has become of a chance: the class of its cell, which is '' where it stays.
export function moved(change) { return change < -UNMOVED ? 'fall' : change > UNMOVED ? 'rise' : ''; }

// Decimals have a point in both languages.
export function count(number, digits = 0) {
  return grouped(number.toLocaleString('en-US', { minimumFractionDigits: digits, maximumFractionDigits: digits }));
}

// A number of a column of the table, with its decimals; no zero has a sign. A dash for what is not there.
export function figure(value, column, sign = column.signed) {
  if (value === null || value === undefined) return '–';
  const text = count(Math.abs(value), column.decimals);
  const zero = !/[1-9]/.test(text);
  return (zero || (value > 0 && !sign) ? '' : value > 0 ? '+' : '−') + text;
}

// The interval of a value, [mean, low, high, documents], in words, or why there is none.
export function intervalIn(value, column) {
  if (!value) return say('report.undefined'); // of this head the statistic is not defined
  if (!value[3]) return say('report.no_interval'); // importance, of whose spread nothing is known
  if (value[1] === null || value[2] === null) return say('report.single_document');
  if (value[3] === 1) return say('report.exact_value'); // a statistic of the weights alone, which no document changes
  return say('report.from_to', { low: figure(value[1], column), high: figure(value[2], column) });
}

// --- Names ---

// A phrase of the table where it has one, else the text that came with the data, which is English.
export function sayOr(key, text) { return key in PHRASES[language()] ? say(key) : text; }
// The key of a statistic or a role in the table of phrases: "previous token" -> previous_token.
function keyOf(name) { return name.replaceAll(' ', '_'); }
function roleName(name) { return sayOr(`role.${keyOf(name)}`, name); }
// The names of a head's roles: "previous token, induction".
export function roleWords(head) { return (head.roles ?? []).map((role) => roleName(data.roles[role].name)).join(', '); }

// The sign of a role, by its place in data.roles; the style sheet has ten kinds of colours, .r0 to .r9.
export function badge(role) {
  const { name, kind, meaning } = data.roles[role];
  return Object.assign(element('span', `badge r${kind}`, roleName(name)), { title: told(meaning) });
}

export function columnName(column) { return sayOr(`column.${keyOf(column.key)}`, roleName(column.label)); }
// What a statistic means, in a sentence.
export function columnMeaning(column) { return sayOr(`meaning.${keyOf(column.key)}`, column.meaning); }

// At what kind of key a head of a live model looks most, and how much: "first token 93 %".
export function kindWords(number) {
  const [kind, part] = view.kinds[number] ?? ['elsewhere', 0]; // no kinds before the first text was read
  return part ? `${kindName(kind)} ${percent(part)}` : '';
}

export function kindName(kind) { return kind === 'elsewhere' ? say('look.elsewhere') : roleName(kind); }

// What a head does, in the words made from its numbers when it was measured; of a live model the kind of its keys.
export function putSentence(target, number) {
  target.replaceChildren();
  for (const [key, values] of heads[number].says ?? []) {
    const part = element('span');
    const { role } = values, job = values.job && say(`job.${keyOf(role)}`); // both come in English
    putWords(part, key, { ...values, job, role: role && roleName(role) });
    const lacks = (word) => word && !view.shown.tokens.some((token) => token.replace('␣', '') === word);
    if (lacks(values.looks) || lacks(values.at)) part.prepend(say('report.in_example'), ' ');
    target.append(part, ' ');
  }
  if (data.served) target.append(kindWords(number));
}

// A token in quotes; U+2068 and U+2069 keep one that runs from right to left from turning the words around it.
export function quoted(token) { return '‘\u2068' + token + '\u2069’'; }

// At most so many characters of a token; whole code points, so that an emoji is not cut in half.
export function cut(token, most = 12) {
  const characters = [...token];
  return characters.length > most ? characters.slice(0, most - 1).join('') + '…' : characters.join('');
}

// A token of a text by its place and, where that is known, its text: token 3 ‘el’.
export function named(token, tokens) {
  return say('report.token', { token }) + (token in tokens ? ` ${quoted(tokens[token])}` : '');
}

// The name of a head without its stack: encoder.L0.H3 -> L0.H3.
export function shortName(name) { return name.split('.').slice(-2).join('.'); }
// Words in a row: "a, b and c".
export function enumerated(names) { return new Intl.ListFormat(language() === 'en' ? 'en-GB' : 'es').format(names); }

// A factor in words; the slider has steps of a tenth: × 0.5, × −1.
export function times(factor) { return `× ${String(Math.round(10 * factor) / 10).replace('-', '−')}`; }

// What is changed, in words: "without L5.H1, with L2.H3 × 2"; '' where nothing is.
export function changedNames() {
  const names = [...view.changes.keys()].sort();
  const silent = names.filter((name) => !view.changes.get(name)).join(', ');
  const scaled = names.filter((name) => view.changes.get(name))
    .map((name) => `${name} ${times(view.changes.get(name))}`).join(', ');
  const parts = [silent && say('report.without', { heads: silent }), scaled && say('report.with', { heads: scaled })];
  return parts.filter(Boolean).join(', ');
}

// --- Parts of a page ---

// A cell with a bar as long as a part of a whole, and that part in percent; `kind` is ours or theirs, for two colours.
export function bar(part, kind, tag = 'td') {
  const filled = element('span', kind);
  filled.style.width = `${(100 * part).toFixed(2)}%`;
  return element(tag, 'bar-cell', element('span', 'track', filled), element('span', 'part', percent(part)));
}

// Puts a phrase into the element of an id; it does not follow the language by itself.
export function setText(id, key, values = {}) { putWords(byId(id), key, values); }
