// --- The sentence: the token that is looked at, what it looks at, and arcs between them ---
//
// "The token that is looked at" is the one at which the reader points: the query, view.at, or -1. The sentence is
// seen through one head, view.through, or, where that is -1, through the mean of all heads.
// Heads and tokens are numbers.

import { byId, element, isShortcut, putWords, say, svg } from './page/base.js';
import { changeAddress } from './report_address.js';
import { colourOf, inkOn } from './report_colours.js';
import { times } from './report_factor.js';
import { lightRows } from './report_grid.js';
import { followPoint } from './report_head.js';
import { hasModel } from './report_model.js';
import { showNext } from './report_next.js';
import { looksOf, looksThrough, shown } from './report_shown.js';
import { ROUNDS_TO_0, data, heads, inWords, named, putSentence, quoted, view } from './report_state.js';
import { showNow } from './report_table.js';
import { showWalk } from './report_walk.js';

const MARKED = 0.2; // of the largest weight of a row: tokens from here on are underlined
const MARK = /^<.+>$/; // a token that stands for no text, such as <|end|>
export const NAMED = 3; // tokens that are named in words, at most
const ARC = 0.04; // the least weight that has an arc
const HIGH = 52, FLAT = 24; // the most pixels of an arc's height: where room is made for it, and where none is
let words = []; // the buttons of the sentence, one for each token

// The words are made once for a text, so that a chosen one keeps the focus while its marks change.
export function makeSentence() {
  words = shown.tokens.map((token, at) => {
    const word = element('button', 'word');
    word.type = 'button';
    word.tabIndex = at === Math.max(0, view.at) ? 0 : -1;
    word.append(element('bdi', '', token));
    word.classList.toggle('mark', MARK.test(token));
    word.classList.toggle('unknown', Boolean(shown.unknown?.[at]));
    word.addEventListener('pointerenter', (event) => { if (event.pointerType === 'mouse' && !view.pinned) point(at); });
    word.addEventListener('click', () => pin(at));
    word.addEventListener('focus', () => {
      stopAt(words, word);
      // By keyboard the focus points; by mouse it comes with a click, which pins or frees.
      if (!view.pinned && word.matches(':focus-visible')) point(at);
    });
    return word;
  });
  const box = byId('sentence'), letters = shown.tokens.reduce((sum, token) => sum + [...token].length, 0);
  // The style sheet has a size of letters for each length; the limits are round choices, and larger ones let a longer
  // text stand in large letters. Tokens that are mostly single characters have no gaps between them.
  box.dataset.length =
    words.length > 60 || letters > 260 ? 'long' : words.length > 16 || letters > 70 ? 'middle' : 'short';
  box.classList.toggle('letters', words.length > 3 && letters < 1.6 * words.length);
  box.replaceChildren(...words);
  sayBoundary();
}

// A sign such as <|end|> in front is no word of the text: it says what it is.
export function sayBoundary() {
  const first = shown.tokens[0] ?? '', sign = hasModel() && MARK.test(first);
  byId('boundary').textContent = sign ? say('report.boundary', { sign: first }) : '';
}

// Makes an element the one at which Tab stops among all of these.
export function stopAt(elements, chosen) {
  for (const stop of elements) if (stop.tabIndex === 0) stop.tabIndex = -1;
  chosen.tabIndex = 0;
}

// Looks at a token, at none where it is -1; everything follows.
export function point(at) {
  if (at === view.at) return;
  view.at = at;
  showPoint();
}

// Looks at a token and stays there while the pointer moves on; the same token again, and -1, lets go.
export function pin(at) {
  view.pinned = at >= 0 && !(view.pinned && view.at === at);
  view.at = at;
  showPoint();
  changeAddress();
}

// Lets the token go: none is looked at.
export function free() {
  view.pinned = false;
  view.at = -1;
  showPoint();
  changeAddress();
}

// Sees the sentence through a head, or through all of them (-1).
export function lookThrough(number) {
  if (number === view.through || view.open >= 0) return; // an enlarged head stays the one
  view.through = number;
  showTint();
}

// All that follows the token that is looked at.
export function showPoint() {
  showTint();
  lightRows();
  showNow();
  showNext();
  if (view.open >= 0) followPoint();
}

// The colours, arcs and words of the sentence, which follow the token and the head.
function showTint() {
  if (view.through >= 0) view.latest = view.through; // the link to the walk leads to it
  tint(words, view.at, view.through);
  byId('saying').textContent = view.at < 0 ? say('report.point_at') : lookWords(view.at, view.through);
  if (view.through >= 0) putSentence(byId('head-says'), heads[view.through]);
  else putWords(byId('head-says'), hasModel() ? 'report.how_to_silence' : 'report.how_to_read');
  byId('free').hidden = !view.pinned;
  drawArcs();
  showWalk();
}

// Colours words by what token `at` gives them in head `number`, and takes the colours away where no token is looked
// at. The last colour is the strongest weight of the whole row, in sight or not; on the fixed scale it is 1.
export function tint(words, at, number) {
  const look = at < 0 ? null : looksThrough(number, at), hidden = (key) => view.hideFirst && key === 0;
  const seen = look ? [...look.inside.filter((_, key) => !hidden(key)), ...look.outside.map((far) => far.weight)] : [];
  const top = view.scale === 'own' ? Math.max(...seen, 1e-9) : 1; // never 0: weights are divided by it
  words.forEach((word, key) => {
    const weight = look && !hidden(key) ? look.inside[key] : 0, colour = colourOf(weight, top, false);
    word.style.backgroundColor = look ? `rgb(${colour})` : '';
    word.style.color = look ? inkOn(colour) : '';
    word.title = look ? `${named(key, shown.tokens)}: ${inWords(look.inside[key])}` : '';
    word.setAttribute('aria-pressed', String(key === at && view.pinned));
    word.classList.toggle('looking', key === at);
    word.classList.toggle('left-out', Boolean(look) && hidden(key));
    word.classList.toggle('marked', weight > 0 && weight >= MARKED * top);
  });
}

// "At ‘él’ L0.H3 looks at ‘write’ (0.970), ..." and the strongest looks that go beyond the text shown.
export function lookWords(at, number) {
  const { inside, outside, whole } = looksThrough(number, at);
  const keys = [...inside.keys()].filter((key) => inside[key] >= ROUNDS_TO_0).sort((a, b) => inside[b] - inside[a]);
  const most = keys.slice(0, NAMED).map((key) => `${quoted(shown.tokens[key])} (${inWords(inside[key])})`).join(', ');
  const who = number < 0 ? say('report.all_heads') : heads[number].name;
  const key = number < 0 ? 'report.at_looks' : 'report.at_looks_head'; // of the phrase
  const lines = [];
  if (most) lines.push(say(key, { token: quoted(shown.tokens[at]), who, most }));
  else if (!outside.length) lines.push(say('report.looks_nowhere', { who }));
  const factor = number < 0 ? 1 : view.changes.get(heads[number].name) ?? 1;
  if (factor !== 1) lines.push(factor ? say('report.is_scaled', { factor: times(factor) }) : say('report.is_silenced'));
  if (outside.length) { // of one head only: the mean over all has none
    const cross = heads[number].cross; // then keys are of another text, and only their numbers are known
    const far = outside.map(({ key, weight }) =>
      `${cross ? say('report.key', { key }) : named(key, data.tokens)} (${inWords(weight)})`);
    lines.push(say(cross ? 'report.in_other' : 'report.beyond', { far: far.join(', ') }));
  }
  if (!whole && number >= 0 && heads[number].k) lines.push(say('report.only_strongest', { count: heads[number].k }));
  return lines.join(' ');
}

// The arrow keys go from word to word; the sentence and the text of the large view both listen with this.
export function walkSentence(event) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step || isShortcut(event)) return;
  const list = [...event.currentTarget.children], next = list[list.indexOf(event.target.closest('.word')) + step];
  event.preventDefault();
  if (!next) return;
  next.focus();
  if (!view.pinned) point(list.indexOf(next));
}

// --- Arcs: from the word that is looked from, one to each word that it looks at ---

// One quiet motion when the page opens: from the word that is looked from, where the head with the hardest look goes.
export function invite() {
  if (view.at < 0 || !shown.exact || view.arcs || matchMedia('(prefers-reduced-motion: reduce)').matches) return;
  let weight = 0, key = 0;
  heads.forEach((_, number) => looksOf(number, view.at).inside.forEach((each, to) => {
    // Many heads rest on the first token, or on the query's own: a look there says little.
    const isElsewhere = to !== 0 && to !== view.at;
    if (isElsewhere && each > weight) [weight, key] = [each, to];
  }));
  if (weight < ARC) return;
  setViewBox();
  const path = arc(view.at, key, weight, FLAT);
  path.setAttribute('pathLength', '1'); // the style sheet draws it out by parts of its length
  path.classList.add('invites');
  path.addEventListener('animationend', () => path.remove());
  byId('arcs').append(path);
}

// Draws the arcs anew, where the reader has switched them on.
export function drawArcs() {
  const drawing = byId('arcs');
  byId('line').classList.toggle('arched', view.arcs); // makes room for the arcs above the words
  drawing.replaceChildren();
  if (!view.arcs || view.at < 0 || !words.length) return;
  setViewBox();
  looksThrough(view.through, view.at).inside.forEach((weight, key) => {
    if (weight < ARC || (view.hideFirst && key === 0)) return;
    drawing.append(arc(view.at, key, weight, HIGH));
  });
}

// Arcs are drawn in the pixels of the frame around the sentence.
function setViewBox() {
  const frame = byId('line').getBoundingClientRect();
  byId('arcs').setAttribute('viewBox', `0 0 ${frame.width} ${frame.height}`);
}

// From one word to another, above them; the further apart they are the higher, at most `high` pixels. A word that
// looks at itself has a loop. The larger the weight, the thicker and the less transparent the line. Its pixels and
// thicknesses are round choices.
function arc(from, to, weight, high) {
  const frame = byId('line').getBoundingClientRect(), middle = (word) => { // [x, y] of the middle of its upper edge
    const box = word.getBoundingClientRect();
    return [box.left - frame.left + box.width / 2, box.top - frame.top];
  };
  const [x, y] = middle(words[from]), [toX, toY] = middle(words[to]);
  const height = Math.min(high, 14 + Math.abs(toX - x) / 5);
  const d = from === to
    ? `M${x - 7} ${y}C${x - 16} ${y - 24} ${x + 16} ${y - 24} ${x + 7} ${y}`
    : `M${x} ${y}C${x} ${y - height} ${toX} ${toY - height} ${toX} ${toY}`;
  return svg('path', { d, 'stroke-width': 1 + 5 * weight, 'stroke-opacity': 0.35 + 0.65 * weight });
}
