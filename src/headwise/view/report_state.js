// --- What the page knows and what it shows now ---

const LEVELS = 65535; // a stored weight is a whole number of this many parts

const data = readData('data');
const heads = data.heads;
const numberOf = new Map(heads.map((head, number) => [head.name, number]));

const view = {
  at: -1, pinned: false, // the token that is looked at; one that is pinned stays while the pointer moves on
  through: -1, // the head through which the sentence is seen; -1: all of them
  silenced: new Set(), // names of heads
  which: 'this', scale: 'own', hideFirst: false, log: false, arcs: false, // the pictures
  roles: new Set(), words: [], // the filter
  open: -1, row: 0, column: 0, beside: '', // the large view
};

// Whole numbers, little-endian, of two or four bytes each.
function unpacked(base64, bytes = 2) {
  const stored = bytesOf(base64), numbers = new Array(stored.length / bytes);
  for (let place = 0, at = 0; place < numbers.length; place++, at += bytes) {
    let value = 0;
    for (let byte = bytes - 1; byte >= 0; byte--) value = value * 256 + stored[at + byte];
    numbers[place] = value;
  }
  return numbers;
}

function weights(base64) { return Float32Array.from(unpacked(base64), (level) => level / LEVELS); }

function distinct(values) { return [...new Set(values)]; }

function largestOf(numbers) { return numbers.reduce((most, value) => Math.max(most, Math.abs(value)), 0); }

// --- Numbers and words ---

// A phrase of the table where it has one, else the text that came with the data, which is English.
function sayOr(key, text) { return key in PHRASES[language()] ? say(key) : text; }

// Words that Python wrote in English: those of the phrases of this section follow the language, others stay as they are.
function translated(section, text) {
  const key = Object.keys(PHRASES.en).find((key) => key.startsWith(`${section}.`) && PHRASES.en[key] === text);
  return key ? say(key) : text;
}

// The name of a statistic or a role as the table of phrases has it.
function keyOf(name) { return name.replaceAll(' ', '_'); }

function roleName(name) { return sayOr(`role.${keyOf(name)}`, name); }

// What a head does, in the words made from its numbers when it was measured.
function putSentence(target, head) {
  target.replaceChildren();
  for (const [key, values] of head.says) {
    const part = element('span');
    putWords(part, key, { ...values, role: values.role && roleName(values.role) });
    target.append(part, ' ');
  }
}

function inWords(weight) {
  const size = Math.abs(weight);
  const value = size > 0 && size < 0.0005 ? say('report.tiny') : size.toFixed(3);
  return weight < -0.0005 ? '−' + value : value;
}

function signed(weight) { return weight >= 0.0005 ? '+' + inWords(weight) : inWords(weight); }

// 95 %, 4.7 %, 0.03 %: two digits that mean something.
function percent(part) {
  const hundred = 100 * part;
  return hundred < 0.005 ? '0 %' : `${hundred < 0.095 ? hundred.toFixed(2) : hundred < 9.95 ? hundred.toFixed(1) : hundred.toFixed(0)} %`;
}

// The difference of two shares in percentage points: −93, +0.4, 0.
function points(change) {
  return Math.abs(change) < 0.0005 ? '0' : `${change > 0 ? '+' : '−'}${percent(Math.abs(change)).replace(' %', '')}`;
}

// A number of the table, with the decimals of its column; no zero has a sign.
function figure(value, column, sign = column.signed) {
  if (value === null || value === undefined) return '–';
  const text = Math.abs(value).toLocaleString('en-US',
    { minimumFractionDigits: column.decimals, maximumFractionDigits: column.decimals });
  const zero = !/[1-9]/.test(text);
  return (zero || (value > 0 && !sign) ? '' : value > 0 ? '+' : '−') + text;
}

function count(number) { return number.toLocaleString('en-US'); }

function intervalIn(value, column) {
  if (!value) return say('report.undefined');
  if (!value[3]) return say('report.no_interval');
  if (value[1] === null || value[2] === null) return say('report.single_document');
  if (value[3] === 1) return say('report.exact_value');
  return say('report.from_to', { low: figure(value[1], column), high: figure(value[2], column) });
}

// First strong isolates keep a right-to-left token from turning the words and numbers around it.
function quoted(token) { return '‘\u2068' + token + '\u2069’'; }

// At most twelve characters of a token; whole code points, so that an emoji is not cut in half.
function cut(token, most = 12) {
  const characters = [...token];
  return characters.length > most ? characters.slice(0, most - 1).join('') + '…' : characters.join('');
}

function named(token, tokens) {
  return token in tokens ? say('report.token_named', { token, name: quoted(tokens[token]) }) : say('report.token', { token });
}

// The name without its stack.
function shortName(name) { return name.split('.').slice(-2).join('.'); }
