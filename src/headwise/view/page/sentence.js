// --- The sentence: the token that is looked at, and what it looks at ---
//
// The reader points at the query, view.at, or -1. The sentence is seen through one head, view.through, or, where that
// is -1, through the mean of all heads; of a live model then through the hardest looks of any head.

import { byId, element, makeButton, on, putWords, say, walkable } from './base.js';
import { colourOf, inkOn } from './colours.js';
import { hasModel } from './engine.js';
import { looksThrough } from './shown.js';
import { ROUNDS_TO_0, data, factorOf, heads, inWords, named, pin, point, putSentence, quoted, times,
  view } from './state.js';

const MARKED = 0.2; // of the largest weight of a row: tokens from here on are underlined
const MARK = /^<.+>$/; // a token that stands for no text, such as <|end|>
export const NAMED = 3; // tokens that are named in words, at most
let words = []; // the buttons of the sentence, one for each token

// The words are made once for a text, so that a chosen one keeps the focus while its marks change.
function makeSentence() {
  const box = byId('sentence'), { tokens } = view.shown, focused = words.indexOf(document.activeElement);
  words = tokens.map((_, at) => makeWord(at));
  const letters = tokens.reduce((sum, token) => sum + [...token].length, 0);
  // The style sheet has a size of letters for each length; the limits are round choices, and larger ones let a longer
  // text stand in large letters. Tokens that are mostly single characters have no gaps between them.
  box.dataset.length =
    words.length > 60 || letters > 260 ? 'long' : words.length > 16 || letters > 70 ? 'middle' : 'short';
  box.classList.toggle('letters', !view.shown.words && words.length > 3 && letters < 1.6 * words.length);
  box.replaceChildren(...words.flatMap((word, at) =>
    [word, ...Array.from({ length: view.shown.words?.[at].lines ?? 0 }, () => element('span', 'break'))]));
  if (focused >= 0) words[Math.min(focused, words.length - 1)]?.focus();
}

function makeWord(at) {
  const { tokens, unknown, words: set } = view.shown, text = set?.[at].lines ? `${set[at].text}⏎` : tokens[at];
  const button = makeButton('word', () => pin(at), element('bdi', '', text));
  button.tabIndex = at === Math.max(0, view.at) ? 0 : -1;
  button.classList.toggle('mark', set ? set[at].sign : MARK.test(tokens[at]));
  button.classList.toggle('unknown', Boolean(unknown?.[at]));
  if (set) {
    button.classList.toggle('gap', set[at].gap && at > 0);
    button.classList.toggle('end', set[at].lines > 0 && !set[at].text); // a line end alone
  }
  button.addEventListener('pointerenter', (event) => { if (event.pointerType === 'mouse' && !view.pinned) point(at); });
  // By keyboard the focus points; by mouse it comes with a click, which pins or frees.
  button.addEventListener('focus', () => { if (!view.pinned && button.matches(':focus-visible')) point(at); });
  return button;
}

// A sign such as <|end|> in front is no word of the text: it says what it is.
function sayBoundary() {
  const first = view.shown.tokens[0] ?? '', sign = hasModel() && MARK.test(first);
  if (byId('boundary')) byId('boundary').textContent = sign ? say('report.boundary', { sign: first }) : '';
}

// The colours and words of the sentence, which follow the token and the head.
function showTint() {
  if (view.at >= words.length) return; // the words of another text are about to come
  tint(words, view.at, view.through);
  byId('saying').textContent = view.at < 0 ? say('report.point_at')
    : view.shown.unknown?.includes(true) ? '' : lookWords(view.at, view.through);
  const says = byId('head-says');
  if (says && view.through >= 0) putSentence(says, view.through);
  else if (says) putWords(says, hasModel() ? 'report.how_to_silence' : 'report.how_to_read');
  byId('free').hidden = !view.pinned;
}

// Colours words by what token `at` gives them in head `number`, and takes the colours away where no token is looked
// at. The last colour is the strongest weight of the whole row, in sight or not; on the fixed scale it is 1.
export function tint(buttons, at, number) {
  const look = at < 0 ? null : looksThrough(number, at), hidden = (key) => view.hideFirst && key === 0;
  const seen = look ? [...look.inside.filter((_, key) => !hidden(key)), ...look.outside.map((far) => far.weight)] : [];
  const top = view.scale === 'own' && !data.served ? Math.max(...seen, 1e-9) : 1; // never 0: weights are divided by it
  const hardest = new Map(); // token -> the hardest look of any head that goes there
  for (const [, key, weight] of (look ? [] : view.hardest[at]) ?? []) {
    hardest.set(key, Math.max(weight, hardest.get(key) ?? 0));
  }
  buttons.forEach((word, key) => {
    const weight = look && !hidden(key) ? look.inside[key] : 0, colour = colourOf(weight, top, false);
    word.style.backgroundColor = look ? `rgb(${colour})` : '';
    word.style.color = look ? inkOn(colour) : '';
    word.title = look ? `${named(key, view.shown.tokens)}: ${inWords(look.inside[key])}` : '';
    word.setAttribute('aria-pressed', String(key === at && view.pinned));
    word.classList.toggle('looking', key === at);
    word.classList.toggle('left-out', Boolean(look) && hidden(key));
    const marked = look ? weight > 0 && weight >= MARKED * top : (hardest.get(key) ?? 0) >= MARKED;
    word.classList.toggle('marked', marked);
  });
}

// "At ‘él’ L0.H3 looks at ‘write’ (0.970), ..." and the strongest looks that go beyond the text shown.
export function lookWords(at, number) {
  const { tokens } = view.shown, look = looksThrough(number, at);
  if (!look) return say('look.point_at', { token: quoted(tokens[at]) });
  const { inside, outside, whole } = look, who = number < 0 ? say('report.all_heads') : heads[number].name;
  const keys = [...inside.keys()].filter((key) => inside[key] >= ROUNDS_TO_0).sort((a, b) => inside[b] - inside[a]);
  const most = keys.slice(0, NAMED).map((key) => `${quoted(tokens[key])} (${inWords(inside[key])})`).join(', ');
  const key = number < 0 ? 'report.at_looks' : 'report.at_looks_head'; // of the phrase
  const lines = [];
  if (most) lines.push(say(key, { token: quoted(tokens[at]), who, most }));
  else if (!outside.length) lines.push(say('report.looks_nowhere', { who }));
  const factor = number < 0 ? 1 : factorOf(number);
  if (factor !== 1) lines.push(factor ? say('report.is_scaled', { factor: times(factor) }) : say('report.is_silenced'));
  if (outside.length) { // of one head only: the mean over all has none
    const { cross } = heads[number]; // then keys are of another text, and only their numbers are known
    const far = outside.map((key) =>
      `${cross ? say('report.key', { key: key.key }) : named(key.key, data.tokens)} (${inWords(key.weight)})`);
    lines.push(say(cross ? 'report.in_other' : 'report.beyond', { far: far.join(', ') }));
  }
  if (!whole && number >= 0 && heads[number].k) lines.push(say('report.only_strongest', { count: heads[number].k }));
  return lines.join(' ');
}

walkable(byId('sentence'), () => [words]);
byId('free').addEventListener('click', () => pin(-1));
on('words', makeSentence);
on('words language', sayBoundary);
on('point pin through maps switches changes language', showTint);
