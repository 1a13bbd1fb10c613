// --- The sentence as text: the word that is looked from, and the words that are looked at ---

import { byId, element, isShortcut, say } from './page/base.js';
import { changePlace, point } from './look.js';
import { hearsSound, keyLabel, labelOf, look, maps } from './look_state.js';
import { colourOf, inkOn } from './report_colours.js';
import { times } from './report_factor.js';
import { ROUNDS_TO_0, data, inWords, quoted } from './report_state.js';

const NAMED = 3; // words that are named
const MARKED = 0.2; // the least weight of a look whose word is underlined
let buttons = [];

export function makeSentence() {
  const box = byId('sentence'), before = box.contains(document.activeElement) ? buttons.indexOf(document.activeElement) : -1;
  buttons = look.words.map(wordButton);
  const letters = look.words.reduce((sum, word) => sum + word.text.length, 0);
  // The style sheet has a size of letters for each.
  box.dataset.length = letters > 260 ? 'long' : letters > 60 ? 'middle' : 'short';
  box.replaceChildren(...buttons.flatMap((button, at) => {
    const ends = Array.from({ length: look.words[at].lines }, () => element('span', 'break'));
    return [button, ...ends];
  }));
  if (before >= 0) buttons[Math.min(before, buttons.length - 1)]?.focus();
}

function wordButton(word, at) {
  const button = element('button', 'word');
  button.type = 'button';
  button.tabIndex = -1;
  button.append(element('bdi', '', word.lines ? `${word.text}⏎` : labelOf(word)));
  button.classList.toggle('gap', word.gap && at > 0);
  button.classList.toggle('mark', word.sign);
  button.classList.toggle('end', word.lines > 0 && !word.text);
  button.addEventListener('pointerenter', (event) => { if (event.pointerType === 'mouse' && look.place < 0) point(at); });
  button.addEventListener('click', () => changePlace(look.place === at ? -1 : at));
  button.addEventListener('focus', () => { if (button.matches(':focus-visible')) point(at); });
  return button;
}

// Colours the words that the head looks at; without a head those are underlined that the hardest looks go to.
export function markWords() {
  const sound = hearsSound(look.through), row = rowThrough(sound);
  const targets = new Map(); // word -> the hardest look that goes there
  for (const [number, key, weight] of look.hardest[look.at] ?? []) {
    if (!hearsSound(number)) targets.set(key, Math.max(weight, targets.get(key) ?? 0));
  }
  buttons.forEach((button, key) => {
    const words = sound ? null : row, colour = words && colourOf(words[key], 1, false);
    button.style.backgroundColor = words ? `rgb(${colour})` : '';
    button.style.color = words ? inkOn(colour) : '';
    button.tabIndex = key === look.at ? 0 : -1;
    button.setAttribute('aria-pressed', String(key === look.place));
    button.classList.toggle('looking', key === look.at);
    button.classList.toggle('marked', row ? !sound && row[key] >= MARKED : (targets.get(key) ?? 0) >= MARKED);
  });
  if (look.at < 0) return;
  const { at } = look;
  byId('saying').textContent = row ? lookWords(row) : say('look.point_at', { token: quoted(labelOf(look.words[at])) });
}

// The weights of the head that is looked through, from the word that is looked from; null where there are none, also
// while a map of another text is still there.
function rowThrough(sound) {
  const map = maps.get(`a:${look.through}`);
  if (!map || map.rows <= look.at || !(sound || map.columns === buttons.length)) return null;
  return map.weights.subarray(look.at * map.columns, (look.at + 1) * map.columns);
}

// "At ‘to’, L5.H1 looks at ‘Mary’ (0.830), ..."
function lookWords(row) {
  const keys = [...row.keys()].filter((key) => row[key] >= ROUNDS_TO_0).sort((a, b) => row[b] - row[a]).slice(0, NAMED);
  const target = (key) => (hearsSound(look.through) ? keyLabel(look.through, key) : quoted(labelOf(look.words[key])));
  const most = keys.map((key) => `${target(key)} (${inWords(row[key])})`).join(', ');
  const name = data.heads[look.through].name, factor = look.changes.get(name);
  let changed = '';
  if (factor !== undefined) changed = factor ? say('report.is_scaled', { factor: times(factor) }) : say('report.is_silenced');
  return `${say('report.at_looks_head', { token: quoted(labelOf(look.words[look.at])), who: name, most })} ${changed}`;
}

export function walkWords(event) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const next = buttons[buttons.indexOf(event.target.closest('.word')) + step];
  if (!step || isShortcut(event)) return;
  event.preventDefault();
  next?.focus();
}
