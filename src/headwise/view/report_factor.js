// --- A factor on what a head gives: 0 silences it, 1 leaves it as it is ---
//
// The report and the page of a live model both have it, with the same slider and button in their large views.

import { byId, say } from './page/base.js';

const SLIDE_MS = 40; // while the slider moves, before the model is asked

/**
 * Gives a head a factor.
 * @param {Map<string, number>} changes  name of a head -> its factor, where it is not 1
 * @param {string} name
 * @param {number} factor
 */
export function setFactor(changes, name, factor) {
  if (factor === 1) changes.delete(name);
  else changes.set(name, factor);
}

/**
 * A factor in words; the slider has steps of a tenth.
 * @param {number} factor
 * @returns {string} such as × 0.5 or × −1
 */
export function times(factor) { return `× ${String(Math.round(10 * factor) / 10).replace('-', '−')}`; }

/**
 * What is changed, in words.
 * @param {Map<string, number>} changes  name of a head -> its factor
 * @returns {string} "without L5.H1, with L2.H3 × 2"; '' where nothing is changed
 */
export function changedNames(changes) {
  const names = [...changes.keys()].sort();
  const silent = names.filter((name) => !changes.get(name)).join(', ');
  const scaled = names.filter((name) => changes.get(name))
    .map((name) => `${name} ${times(changes.get(name))}`).join(', ');
  const parts = [silent && say('report.without', { heads: silent }), scaled && say('report.with', { heads: scaled })];
  return parts.filter(Boolean).join(', ');
}

/**
 * Listens to the slider and the button of the enlarged head.
 * @param {() => string} nameNow  gives the name of the head that is enlarged
 * @param {(name: string, factor: number) => void} set  gives a head a factor, and asks the model
 */
export function listenToFactor(nameNow, set) {
  let waiting = 0; // a timer
  byId('factor').addEventListener('input', (event) => {
    const name = nameNow(), factor = Number(event.target.value);
    byId('factor-shown').textContent = times(factor);
    clearTimeout(waiting);
    waiting = setTimeout(() => set(name, factor), SLIDE_MS);
  });
  byId('large-silence').addEventListener('click', (event) => {
    const isSilent = event.currentTarget.getAttribute('aria-pressed') === 'true';
    set(nameNow(), isSilent ? 1 : 0);
  });
}

/**
 * Sets slider and button to the factor that a head has.
 * @param {string} name
 * @param {number} factor
 */
export function showFactor(name, factor) {
  const button = byId('large-silence');
  button.setAttribute('aria-pressed', String(factor === 0));
  button.textContent = say(factor === 0 ? 'report.wake' : 'report.silence', { name });
  byId('factor').value = String(factor);
  byId('factor-shown').textContent = times(factor);
}
