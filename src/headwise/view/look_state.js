// --- What the page of a live model shows now ---

import { byId } from './page/base.js';
import { data, heads, weights } from './report_state.js';

export const look = {
  words: [], second: [], // of the text and of the one beside it: {text, gap, lines, sign}
  text: '', at: -1, // the word that is looked from
  place: -1, rest: 0, // the place whose prediction is asked for, -1: behind the text; where the answer put it
  follow: -1, // the token whose chance is followed, -1: the likeliest
  changes: new Map(), // name of a head -> its factor, where it is not 1
  beside: false, // is there a second text?
  kinds: [], hardest: [], differ: null, // of each head, of each word
  next: null, goesOn: '', state: null, // what comes next, what it adds to the text, or how far the output has moved
  through: -1, open: -1, // heads by their numbers
  version: 0, number: Date.now(), // of the latest question: newer than those of a page that was open before
  isLatest: (number) => number === look.number,
};
export const maps = new Map(); // 'a:7' -> {rows, columns, weights}, of the latest reading

export function turn() { return ++look.number; }

// What an answer brings of a text.
export function keepWords(slot, answer) {
  const words = answer.words.map(([text, gap, lines, sign]) => ({ text, gap, lines, sign }));
  if (slot === 'a') {
    const behind = answer.at < 0 || words[answer.at].sign; // then it rests at the last word that is no sign
    const rest = behind ? Math.max(0, words.findLastIndex((word) => !word.sign)) : answer.at;
    Object.assign(look, { words, rest, kinds: answer.kinds, hardest: answer.hardest });
  } else look.second = words;
  look.differ = look.beside ? answer.differ ?? null : null;
  look.next = answer.next ?? null;
  look.goesOn = answer.goes_on ?? '';
  look.state = answer.state ?? null;
  if (look.next) look.follow = answer.follow;
  look.version += 1;
  for (const key of [...maps.keys()]) if (key.startsWith(slot)) maps.delete(key);
}

export function keepMaps(slot, answer) {
  for (const [number, [rows, columns, base64]] of Object.entries(answer.maps ?? {})) {
    maps.set(`${slot}:${number}`, { rows, columns, weights: weights(base64) });
  }
}

// What is written of a word where it stands alone.
export function labelOf(word) { return word.text || '⏎'.repeat(word.lines) || '·'; }

// Does a head look at a sound? Then its keys are places in time.
export function hearsSound(number) { return data.seconds !== null && number >= 0 && heads[number].part === 'cross'; }

// What a head looks at, by the number of the key: a word, or a time.
export function keyLabel(number, key) {
  return hearsSound(number) ? `${(key * data.seconds).toFixed(2)} s` : labelOf(look.words[key]);
}

export function fade(on) { byId('main').classList.toggle('asking', on); }
