// A text as ids: characters, words between spaces, or byte-pair encoding, as corpus/tokens.py and the library
// `tokenizers` do it. As there, a text is first normalised, then divided into words (the "pre-tokenizer"), then each
// word becomes tokens of the vocabulary. Words that the vocabulary lacks are marked, never left out. The kinds of
// tokenizers that are read here are listed in models/pack.py.

const BOUNDARY = '<|end|>'; // stands before a text
// How GPT-2 divides a text (Radford et al. 2019); `\s+(?!\S)` leaves the last of several spaces to the word behind.
const BYTE_WORDS = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/gu;
// What the pre-tokenizer "Whitespace" calls a word, in Rust's regular expressions `\w+|[^\w\s]+`: letters, marks,
// digits, connectors such as `_` and joiners, which shape letters; or signs, several of which stand together.
const WORDS_AND_SIGNS =
  /[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]+|[^\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}\s]+/gu;

// A tokenizer of tokenizer.json and, where they differ, the tokens as a reader sees them: `ids` by token, `strings` and
// `shown` by id; the ids of BOUNDARY and of what is `unknown`; `ranks` of pairs that are joined; `byteNames`, or null.
export function readTokens(layout, shown) {
  const { model } = layout, ids = new Map(Object.entries(model.vocab));
  for (const added of layout.added_tokens ?? []) ids.set(added.content, added.id);
  const strings = [];
  for (const [string, id] of ids) strings[id] = string;
  // Older files write a pair as "t h", newer ones as ["t", "h"].
  const pairs = (model.merges ?? []).map((pair) => (Array.isArray(pair) ? pair.join(' ') : pair));
  return {
    layout, ids, strings, shown: shown ?? strings,
    boundary: ids.get(BOUNDARY), areWords: JSON.stringify(layout.pre_tokenizer ?? '').includes('WhitespaceSplit'),
    // The token for unknown words, or where there is none another one: the model has to read something.
    unknown: ids.get(model.unk_token) ?? ids.get(BOUNDARY) ?? ids.get(' ') ?? 0,
    ranks: new Map(pairs.map((pair, rank) => [pair, rank])),
    byteNames: usesBytes(layout.pre_tokenizer) ? namesOfBytes() : null,
  };
}

// A piece {id, text, known} for each token; a word that the vocabulary lacks is read as the unknown one.
export function encode(tokens, text) {
  const words = divided(tokens, tokens.layout.pre_tokenizer, [normalText(tokens.layout.normalizer, text)]);
  // Without byte-pair encoding ("WordLevel") a word is one token.
  return words.flatMap((word) =>
    (tokens.layout.model.type === 'BPE' ? joined(tokens, word) : [wholeToken(tokens, word)]));
}

// A text in whose words signs stand for themselves, as the vocabulary has them: "perro?" is read as "perro ?".
export function apart(tokens, text) {
  if (!tokens.areWords) return text;
  return text.replace(/\S+/gu, (word) => (tokens.ids.has(word) || tokens.layout.model.type === 'BPE' ? word
    : word.replace(/^([¿¡]+)(?=\p{L})/u, '$1 ').replace(/(?<=\p{L})([.,;:?!]+)$/u, ' $1')));
}

// The piece of a word that is one token, or that the vocabulary lacks.
function wholeToken(tokens, word) {
  const id = tokens.ids.get(word);
  return id === undefined ? { id: tokens.unknown, text: word, known: false } : { id, text: word, known: true };
}

// --- What the vocabulary has instead of a word that it lacks ---

// Round choices. With a larger NEAR words are offered that have less in common with the one that was typed.
const NEAR = 0.3; // edits for each letter of the longer word, at most
const OFFERED = 2; // words, at most

// The tokens most like a word that the vocabulary lacks; of two as near, the one of the larger of `chances`, by id.
export function nearest(tokens, word, chances = new Map()) {
  const chance = (name) => chances.get(tokens.ids.get(name)) ?? 0;
  const known = [...tokens.ids.keys()].filter((name) => tokens.ids.get(name) !== tokens.boundary);
  // Token -> edits for each letter of the longer word.
  const far = new Map(known.map((name) =>
    [name, edits([...bare(name)], [...bare(word)]) / Math.max(name.length, word.length)]));
  const near = known.filter((name) => far.get(name) <= NEAR);
  return near.sort((a, b) => far.get(a) - far.get(b) || chance(b) - chance(a)).slice(0, OFFERED);
}

// Other words of the same letters, but for capitals and accents.
export function alike({ ids }, word) { return [...ids.keys()].filter((it) => it !== word && bare(it) === bare(word)); }

// A text with another word in the place of one: as a whole word where the text has it as one, so that "a" is not
// replaced in "cat"; else wherever it stands.
export function replaced(text, word, near) {
  const parts = text.split(/(\s+)/), isWord = (part) => part.toLowerCase() === word.toLowerCase(); // spaces stay
  return parts.some(isWord) ? parts.map((part) => (isWord(part) ? near : part)).join('') : text.replaceAll(word, near);
}

// The letters of a word without capitals and accents, which NFD writes as marks of their own.
function bare(word) { return word.toLowerCase().normalize('NFD').replace(/\p{M}/gu, ''); }

// How many letters must be put in, taken out or changed to make one word of the other (Levenshtein 1966). `row` has the
// edits from the letters of `from` read so far to each beginning of `to`; a new entry comes from three neighbours.
function edits(from, to) {
  let row = to.map((_, at) => at + 1); // from nothing: each letter is put in
  from.forEach((letter, n) => {
    let left = n + 1, corner = n; // to nothing: each letter is taken out
    row = row.map((above, at) => {
      // Put a letter in, take one out, or change one, which is free where both are the same (a boolean adds 0 or 1).
      const least = Math.min(left + 1, above + 1, corner + (letter !== to[at]));
      [left, corner] = [least, above];
      return least;
    });
  });
  return row.length ? row[row.length - 1] : from.length; // the whole of both; all letters out where `to` is empty
}

// --- Before the vocabulary ---

// `rule` is an entry of tokenizer.json, by its type; null where there is none.
function normalText(rule, text) {
  switch (rule?.type) {
    case undefined: return text;
    case 'Sequence': return rule.normalizers.reduce((done, next) => normalText(next, done), text);
    case 'Lowercase': return text.toLowerCase();
    case 'Prepend': return text ? rule.prepend + text : text;
    // A function, since in a string `$` would have a meaning.
    case 'Replace': return text.replaceAll(patternOf(rule), () => rule.content);
    default: return text.normalize(rule.type); // NFC, NFD, NFKC, NFKD
  }
}

// Divides words further, by a rule as above; models/pack.py refuses other types.
function divided(tokens, rule, words) {
  switch (rule?.type) {
    case undefined: return words;
    case 'Sequence': return rule.pretokenizers.reduce((done, next) => divided(tokens, next, done), words);
    case 'WhitespaceSplit': return words.flatMap((word) => word.split(/\s+/u)).filter(Boolean);
    case 'Whitespace': return words.flatMap((word) => word.match(WORDS_AND_SIGNS) ?? []);
    case 'Split': return words.flatMap((word) => splitAt(rule, word));
    case 'ByteLevel': return words.flatMap((word) => byteWords(tokens, rule, word));
  }
}

// One of the two; in a string no sign has a meaning of its own.
function patternOf({ pattern: { Regex: regex, String: string } }) {
  return new RegExp(regex ?? string.replace(/[\\^$.*+?()[\]{}|/]/g, '\\$&'), 'gu');
}

// What matches becomes a piece ("Isolated") or goes ("Removed"); what lies between is always a piece.
function splitAt(rule, word) {
  const parts = [];
  let end = 0;
  for (const match of word.matchAll(patternOf(rule))) {
    parts.push(word.slice(end, match.index));
    if (rule.behavior === 'Isolated') parts.push(match[0]);
    end = match.index + match[0].length;
  }
  return [...parts, word.slice(end)].filter(Boolean);
}

// Words whose bytes (UTF-8) are written as characters, one for each: "é", of two bytes, becomes "Ã©".
function byteWords(tokens, rule, word) {
  const spaced = rule.add_prefix_space && word && !word.startsWith(' ') ? ' ' + word : word;
  const parts = rule.use_regex === false ? [spaced] : spaced.match(BYTE_WORDS) ?? [];
  return parts.map((text) => Array.from(new TextEncoder().encode(text), (byte) => tokens.byteNames[byte]).join(''));
}

// Is there a ByteLevel among these rules, at any depth?
function usesBytes(rule) {
  return rule?.type === 'ByteLevel' || (rule?.type === 'Sequence' && rule.pretokenizers.some(usesBytes));
}

// GPT-2's names of the 256 bytes: visible characters of Latin-1 as they are, the others from U+0100 on ("Ġ": space).
function namesOfBytes() {
  let next = 256; // U+0100
  const plain = (byte) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  return Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(plain(byte) ? byte : next++));
}

// --- Byte-pair encoding (Sennrich, Haddow and Birch 2016) ---

// Of the pairs beside each other the one that was learned first is joined, until none of them has been learned.
function joined(tokens, word) {
  const { model } = tokens.layout;
  // Some tokenizers, such as that of Llama 3, take a word that is a token as it is, whatever its pairs.
  if (model.ignore_merges && tokens.ids.has(word)) return [wholeToken(tokens, word)];
  const parts = [...word]; // characters
  for (;;) {
    let best = Infinity, place = -1; // the lowest rank of a pair, and where it begins
    for (let at = 0; at + 1 < parts.length; at++) {
      const rank = tokens.ranks.get(`${parts[at]} ${parts[at + 1]}`) ?? Infinity;
      if (rank < best) [best, place] = [rank, at];
    }
    if (place < 0) return parts.map((part) => wholeToken(tokens, part));
    parts.splice(place, 2, parts[place] + parts[place + 1]); // in place of both, the pair
  }
}
