// --- What the page of a live model shows now ---
//
// Places are numbers of tokens in the text, heads their places in the list `heads`. There are two texts, called
// slots: a, and b beside it.

import { byId } from './page/base.js';
import { weights } from './report_state.js';

export const look = {
  // The tokens of the text and of the one beside it, each {text, gap, lines, sign}: what is written, whether a gap
  // stands before it, how many line ends are in it, and whether it stands for no text, as [CLS] does.
  words: [], second: [],
  text: '', at: -1, // what was typed; the word that is looked from
  place: -1, rest: 0, // the place whose prediction is asked for, -1: behind the text; where the answer put it
  follow: -1, // the id of the token whose chance is followed, -1: the likeliest
  changes: new Map(), // name of a head -> its factor, where it is not 1
  beside: false, // is there a second text?
  // Of each head [the kind of key that it looks at most, the part of its weight there]. Of each word the heads that
  // look hardest from there, and where two texts can be compared those that differ most: [head, key, weight].
  kinds: [], hardest: [], differ: null,
  next: null, goesOn: '', state: null, // what comes next, what it adds to the text, or how far the output has moved
  through: -1, open: -1, // the head through which the sentence is seen, and the one that is enlarged; -1: none
  version: 0, // of what was read: it grows with each answer
  number: Date.now(), // of the latest question: larger than those of a page that was open before
  isLatest: (number) => number === look.number,
};
export const maps = new Map(); // 'a:7' -> {rows, columns, weights}, of the latest reading

// The number of a new question.
export function turn() { return ++look.number; }

// Keeps what an answer brings of a text: `Desk._read` and `_next` in heads/look.py say what its fields are.
export function keepWords(slot, answer) {
  const words = answer.words.map(([text, gap, lines, sign]) => ({ text, gap, lines, sign }));
  if (slot === 'a') {
    // The prediction rests at its own place; where that is none, or a sign, at the last word that is no sign.
    const behind = answer.at < 0 || words[answer.at].sign;
    const rest = behind ? Math.max(0, words.findLastIndex((word) => !word.sign)) : answer.at;
    Object.assign(look, { words, rest, kinds: answer.kinds, hardest: answer.hardest });
  } else look.second = words;
  look.differ = look.beside ? answer.differ ?? null : null;
  look.next = answer.next ?? null;
  look.goesOn = answer.goes_on ?? '';
  look.state = answer.state ?? null;
  if (look.next) look.follow = answer.follow;
  look.version += 1;
  for (const key of [...maps.keys()]) if (key.startsWith(slot)) maps.delete(key); // those of the text before
}

// Keeps the maps that an answer brings: number of a head -> [rows, columns, weights in base64].
export function keepMaps(slot, answer) {
  for (const [number, [rows, columns, base64]] of Object.entries(answer.maps ?? {})) {
    maps.set(`${slot}:${number}`, { rows, columns, weights: weights(base64) });
  }
}

// What is written of a word where it stands alone: never nothing, for a token may be a line end, or a space.
export function labelOf(word) { return word.text || '⏎'.repeat(word.lines) || '·'; }

// The page is pale while it waits for an answer.
export function fade(on) { byId('main').classList.toggle('asking', on); }
