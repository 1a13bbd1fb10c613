// A text as the model's numbers: characters, words between spaces, and byte-pair encoding, as corpus/tokens.py and the
// library `tokenizers` do it. What a vocabulary lacks is marked, never left out; models/pack.py lists what is read here.

const BOUNDARY = '<|end|>'; // stands before a text
// GPT-2's division of a text before its bytes are paired (Radford et al. 2019).
const BYTE_WORDS = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/gu;
const WORDS_AND_SIGNS = /[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}]+|[^\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\s]+/gu;

/**
 * @param {Object} layout  the content of tokenizer.json
 * @param {string[]} [shown]  the tokens as a reader sees them
 * @returns {Object} a tokenizer, for the functions below
 */
export function readTokens(layout, shown) {
  const { model } = layout, ids = new Map(Object.entries(model.vocab));
  for (const added of layout.added_tokens ?? []) ids.set(added.content, added.id);
  const strings = [];
  for (const [string, id] of ids) strings[id] = string;
  const pairs = (model.merges ?? []).map((pair) => (Array.isArray(pair) ? pair.join(' ') : pair));
  return {
    layout, ids, strings, shown: shown ?? strings,
    boundary: ids.get(BOUNDARY),
    unknown: ids.get(model.unk_token) ?? ids.get(BOUNDARY) ?? ids.get(' ') ?? 0,
    ranks: new Map(pairs.map((pair, rank) => [pair, rank])),
    byteNames: usesBytes(layout.pre_tokenizer) ? namesOfBytes() : null,
  };
}

/**
 * @param {Object} tokens
 * @param {string} text
 * @returns {{id: number, text: string, known: boolean}[]} a piece for each token; an unknown one has the id that stands for it
 */
export function encode(tokens, text) {
  const words = divided(tokens, tokens.layout.pre_tokenizer, [normalText(tokens.layout.normalizer, text)]);
  return words.flatMap((word) => (tokens.layout.model.type === 'BPE' ? joined(tokens, word) : [wholeToken(tokens, word)]));
}

function wholeToken(tokens, word) {
  const id = tokens.ids.get(word);
  return id === undefined ? { id: tokens.unknown, text: word, known: false } : { id, text: word, known: true };
}

// --- What the vocabulary has instead of a word that it lacks ---

const NEAR = 0.5, OFFERED = 2; // edits for each letter of the longer word at most, and so many words

/**
 * @param {Object} tokens
 * @param {string} word  which the vocabulary lacks
 * @param {Map<number, number>} [chances]  id -> its probability
 * @returns {string[]} the tokens most like it; of two as near the likelier
 */
export function nearest(tokens, word, chances = new Map()) {
  const chance = (name) => chances.get(tokens.ids.get(name)) ?? 0;
  const known = [...tokens.ids.keys()].filter((name) => tokens.ids.get(name) !== tokens.boundary);
  const apart = new Map(known.map((name) => [name, edits(bare(name), bare(word)) / Math.max(name.length, word.length)]));
  const near = known.filter((name) => apart.get(name) <= NEAR);
  return near.sort((a, b) => apart.get(a) - apart.get(b) || chance(b) - chance(a)).slice(0, OFFERED);
}

// Without capitals and accents: `ella` is nearer to `él` than the letters say.
function bare(word) { return [...word.toLowerCase().normalize('NFD').replace(/\p{M}/gu, '')]; }

// Letters that must be put in, taken out or changed to make one word of the other (Levenshtein 1966). `row` has the edits
// from the letters read so far to each beginning of `to`; `corner` is the one above and to the left.
function edits(from, to) {
  let row = to.map((_, at) => at + 1);
  from.forEach((letter, n) => {
    let left = n + 1, corner = n;
    row = row.map((above, at) => {
      const least = Math.min(left + 1, above + 1, corner + (letter !== to[at]));
      [left, corner] = [least, above];
      return least;
    });
  });
  return row.length ? row[row.length - 1] : from.length;
}

// --- Before the vocabulary ---

function normalText(rule, text) {
  switch (rule?.type) {
    case undefined: return text;
    case 'Sequence': return rule.normalizers.reduce((done, next) => normalText(next, done), text);
    case 'Lowercase': return text.toLowerCase();
    case 'Prepend': return text ? rule.prepend + text : text;
    case 'Replace': return text.replaceAll(rule.pattern.String, () => rule.content);
    default: return text.normalize(rule.type); // NFC, NFD, NFKC, NFKD
  }
}

function divided(tokens, rule, words) {
  switch (rule?.type) {
    case undefined: return words;
    case 'Sequence': return rule.pretokenizers.reduce((done, next) => divided(tokens, next, done), words);
    case 'WhitespaceSplit': return words.flatMap((word) => word.split(/\s+/u)).filter(Boolean);
    case 'Whitespace': return words.flatMap((word) => word.match(WORDS_AND_SIGNS) ?? []);
    case 'Split': return words.flatMap((word) => splitAt(rule, word));
    case 'ByteLevel': return words.flatMap((word) => byteWords(tokens, rule, word));
    default: throw new Error(`this page cannot divide a text by ${rule.type}`);
  }
}

// What matches stands alone or goes; what lies between always stands alone.
function splitAt(rule, word) {
  const { Regex: regex, String: string } = rule.pattern;
  const pattern = new RegExp(regex ?? string.replace(/[\\^$.*+?()[\]{}|/]/g, '\\$&'), 'gu');
  const parts = [];
  let end = 0;
  for (const match of word.matchAll(pattern)) {
    parts.push(word.slice(end, match.index));
    if (rule.behavior === 'Isolated') parts.push(match[0]);
    end = match.index + match[0].length;
  }
  return [...parts, word.slice(end)].filter(Boolean);
}

function byteWords(tokens, rule, word) {
  const spaced = rule.add_prefix_space && word && !word.startsWith(' ') ? ' ' + word : word;
  const parts = rule.use_regex === false ? [spaced] : spaced.match(BYTE_WORDS) ?? [];
  return parts.map((text) => Array.from(new TextEncoder().encode(text), (byte) => tokens.byteNames[byte]).join(''));
}

function usesBytes(rule) {
  return rule?.type === 'ByteLevel' || (rule?.type === 'Sequence' && rule.pretokenizers.some(usesBytes));
}

// Printable Latin bytes are called by their own character, the others by those from U+0100 on, in order.
function namesOfBytes() {
  let next = 256;
  const plain = (byte) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  return Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(plain(byte) ? byte : next++));
}

// --- Byte-pair encoding (Sennrich, Haddow and Birch 2016) ---

// The pair learned first is joined first, until no pair of the word is in the table.
function joined(tokens, word) {
  const { model } = tokens.layout;
  if (model.ignore_merges && tokens.ids.has(word)) return [wholeToken(tokens, word)];
  const parts = [...word];
  for (;;) {
    let best = Infinity, place = -1;
    for (let at = 0; at + 1 < parts.length; at++) {
      const rank = tokens.ranks.get(`${parts[at]} ${parts[at + 1]}`) ?? Infinity;
      if (rank < best) [best, place] = [rank, at];
    }
    if (place < 0) return parts.map((part) => wholeToken(tokens, part));
    parts.splice(place, 2, parts[place] + parts[place + 1]);
  }
}
