// --- The sentence as text: the word that is looked from, and the words that are looked at ---
//
// A "word" is a token as it is written, a button here; `look` (look_state.js) is what is shown now: look.at is the
// word that is looked from, look.place the one whose prediction is asked for, look.through the head,
// -1 where there is none.

import { byId, element, isShortcut, say } from './page/base.js';
import { changePlace, point } from './look.js';
import { labelOf, look, maps } from './look_state.js';
import { colourOf, inkOn } from './report_colours.js';
import { times } from './report_factor.js';
import { ROUNDS_TO_0, data, inWords, quoted } from './report_state.js';

const NAMED = 3; // words that are named in the line below, at most
const MARKED = 0.2; // the least weight of a look whose word is underlined
let buttons = []; // one for each word

// The words as buttons, each with its line ends behind it.
export function makeSentence() {
  const box = byId('sentence');
  // The buttons are made anew: the one at the same place gets the focus that the old one had.
  const before = box.contains(document.activeElement) ? buttons.indexOf(document.activeElement) : -1;
  buttons = look.words.map(wordButton);
  const letters = look.words.reduce((sum, word) => sum + word.text.length, 0);
  // The style sheet has a size of letters for each; the limits are round choices.
  box.dataset.length = letters > 260 ? 'long' : letters > 60 ? 'middle' : 'short';
  box.replaceChildren(...buttons.flatMap((button, at) => {
    const ends = Array.from({ length: look.words[at].lines }, () => element('span', 'break'));
    return [button, ...ends];
  }));
  if (before >= 0) buttons[Math.min(before, buttons.length - 1)]?.focus();
}

// A click asks for what is predicted behind the word, a second one again for what is predicted behind the text.
function wordButton(word, at) {
  const button = element('button', 'word');
  button.type = 'button';
  button.tabIndex = -1; // `markWords` gives the word that is looked from its stop for Tab
  button.append(element('bdi', '', word.lines ? `${word.text}⏎` : labelOf(word)));
  button.classList.toggle('gap', word.gap && at > 0);
  button.classList.toggle('mark', word.sign);
  button.classList.toggle('end', word.lines > 0 && !word.text); // a line end alone
  // While a place is chosen the pointer moves nothing.
  button.addEventListener('pointerenter', (event) => {
    if (event.pointerType === 'mouse' && look.place < 0) point(at);
  });
  button.addEventListener('click', () => changePlace(look.place === at ? -1 : at));
  button.addEventListener('focus', () => { if (button.matches(':focus-visible')) point(at); });
  return button;
}

// Colours and underlines the words that the head looks at; without a head, underlines those that the hardest looks of
// any head go to.
export function markWords() {
  const row = rowThrough();
  const targets = new Map(); // word -> the hardest look that goes there
  for (const [, key, weight] of look.hardest[look.at] ?? []) {
    targets.set(key, Math.max(weight, targets.get(key) ?? 0));
  }
  buttons.forEach((button, key) => {
    // A weight of 1 has the last colour.
    const colour = row && colourOf(row[key], 1, false);
    button.style.backgroundColor = row ? `rgb(${colour})` : '';
    button.style.color = row ? inkOn(colour) : '';
    button.tabIndex = key === look.at ? 0 : -1;
    button.setAttribute('aria-pressed', String(key === look.place));
    button.classList.toggle('looking', key === look.at);
    button.classList.toggle('marked', row ? row[key] >= MARKED : (targets.get(key) ?? 0) >= MARKED);
  });
  if (look.at < 0) return; // nothing was read yet
  const { at } = look;
  byId('saying').textContent = row ? lookWords(row) : say('look.point_at', { token: quoted(labelOf(look.words[at])) });
}

// The weights of the head that is looked through, from the word that is looked from; null where there are none: no
// head is looked through, its map is not there yet, or still of another text, or its keys are no words of this one.
function rowThrough() {
  const map = maps.get(`a:${look.through}`);
  if (!map || map.rows <= look.at || map.columns !== buttons.length) return null;
  return map.weights.subarray(look.at * map.columns, (look.at + 1) * map.columns);
}

// "At ‘to’, L5.H1 looks at ‘Mary’ (0.830), ..."
function lookWords(row) {
  const keys = [...row.keys()].filter((key) => row[key] >= ROUNDS_TO_0).sort((a, b) => row[b] - row[a]).slice(0, NAMED);
  const most = keys.map((key) => `${quoted(labelOf(look.words[key]))} (${inWords(row[key])})`).join(', ');
  const name = data.heads[look.through].name, factor = look.changes.get(name);
  let changed = '';
  if (factor !== undefined) changed = factor // the weights are still there, but count less, or nothing
    ? say('report.is_scaled', { factor: times(factor) })
    : say('report.is_silenced');
  return `${say('report.at_looks_head', { token: quoted(labelOf(look.words[look.at])), who: name, most })} ${changed}`;
}

// The arrow keys go from word to word.
export function walkWords(event) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const next = buttons[buttons.indexOf(event.target.closest('.word')) + step];
  if (!step || isShortcut(event)) return;
  event.preventDefault();
  next?.focus();
}
