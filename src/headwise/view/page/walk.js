// --- The guided walk through one head, in eight steps: what is chosen, the bar of tokens, going forth and back ---

import { byId, element, isShortcut, language, putWords, readData, say, setWord, worded } from './base.js';
import { forward, headName, headNames, inputOf, offer, readModel } from './model.js';
import { DRAW, STEPS } from './walk_steps.js';
import { origins, tellOf } from './walk_tables.js';

const PAUSE = 6000; // milliseconds that a step stands while the walk plays
const SIGNS = { '\n': '⏎', '\t': '⇥', ' ': '␣', '\r': '␍' };
// What the page begins with: {text, layer, head, at, report} as Python wrote it,
// and over it what the address asks for.
const begin = { ...readData('start'), ...asked() };
// What is shown now. walk_steps.js and walk_tables.js read it, and this file imports them:
// they use it only once it is there.
export const walk = {
  model: readModel(readData('model')),
  layer: begin.layer, head: begin.head, at: begin.at, // the head that is walked through, and the token that asks
  step: 0, // place in STEPS
  numbers: false, // does each cell of a table show its number?
  timer: 0, // of the walk that plays by itself; 0 while it stands
  ids: [], pieces: [], run: null, // the text's tokens, and what the model makes of them, as model.js has them
};

/**
 * A token as it is written, with signs for spaces and the like. Of a word that the vocabulary lacks, the word itself.
 * @param {{id?: number, text: string, known?: boolean}} piece  of `inputOf`; or {text} alone, which is written
 * @returns {string}
 */
export function visible(piece) {
  const text = piece.known === false || piece.id === undefined ? piece.text : walk.model.tokens.shown[piece.id];
  return text.replace(/[\n\t\r ]/g, (sign) => SIGNS[sign]);
}

// What the address asks for, as the report writes it: #L0.H3/5/a text.
function asked() {
  const parts = location.hash.slice(1).split('/'), head = /^L(\d+)\.H(\d+)$/.exec(parts[0]);
  if (!head || parts.length !== 3 || !/^\d+$/.test(parts[1])) return {};
  try {
    return { layer: Number(head[1]), head: Number(head[2]), at: Number(parts[1]), text: decodeURIComponent(parts[2]) };
  } catch { // `decodeURIComponent` fails on an address that nobody made here, such as one with a lone %
    return {};
  }
}

// The link back to the report, at the same head, token and text; hidden where the page lies beside no report.
function showWayBack() {
  const place = [headName(walk.layer, walk.head), walk.at, byId('text').value];
  byId('to-report').hidden = !begin.report;
  byId('to-report').href = `${begin.report}?lang=${language()}#${place.map(encodeURIComponent).join('/')}`;
}

// Reads the text, as much of it as the model can, and runs the model on it.
function readText() {
  const { ids, pieces } = inputOf(walk.model, byId('text').value), { context } = walk.model.config;
  walk.cut = Math.max(0, ids.length - context); // tokens at the end of the text that the model cannot read
  walk.ids = ids.slice(0, context);
  walk.pieces = pieces.slice(0, context);
  // An empty text in a model without a token that begins a text: so that there is something to show, its first token.
  if (!walk.ids.length) [walk.ids, walk.pieces] = [[0], [{ id: 0, text: walk.model.tokens.strings[0], known: true }]];
  walk.run = forward(walk.model, walk.ids);
  walk.at = Math.min(walk.at, walk.ids.length - 1);
}

function draw() {
  drawTokens();
  drawSteps();
  drawStage();
  showWayBack();
}

// The bar of tokens, each a button that makes it the one that asks.
function drawTokens() {
  const weights = walk.run.layers[walk.layer].heads[walk.head].weights[walk.at];
  const focused = document.activeElement?.dataset?.at; // the buttons are made anew, and the focus would be lost
  byId('tokens').replaceChildren(...walk.pieces.map((piece, at) => {
    const chip = element('button', 'token');
    chip.type = 'button';
    chip.dataset.at = at;
    // bdi: a right-to-left token does not turn what stands around it.
    chip.append(element('sup', '', String(at)), element('bdi', '', visible(piece)));
    chip.setAttribute('aria-pressed', String(at === walk.at));
    chip.classList.toggle('later', at > walk.at); // which the model hides from the one that asks
    chip.classList.toggle('unknown', !piece.known);
    if (!piece.known) chip.title = say('walk.unknown', { seen: walk.model.tokens.shown[piece.id] });
    // From the step on in which the weights come up, each token is tinted by its own.
    if (STEPS.indexOf('softmax') <= walk.step) chip.style.setProperty('--share', String(weights[at]));
    chip.addEventListener('click', () => { walk.at = at; draw(); });
    return chip;
  }));
  if (focused !== undefined) byId('tokens').querySelector(`[data-at="${focused}"]`)?.focus();
  const unknown = walk.pieces.find((piece) => !piece.known);
  const note = byId('tokens-note');
  if (walk.cut) setWord(note, 'walk.cut', { count: walk.ids.length, left: walk.cut });
  else if (unknown) setWord(note, 'walk.unknown_note', {
    word: unknown.text, seen: walk.model.tokens.shown[unknown.id],
  });
  else setWord(note, 'walk.choose_token');
}

// The list of the eight steps, each a button.
function drawSteps() {
  const focused = document.activeElement?.dataset?.step; // as in `drawTokens`
  byId('steps').replaceChildren(...STEPS.map((name, step) => {
    const item = element('li'), button = worded('button', '', `walk.${name}`);
    button.type = 'button';
    button.dataset.step = step;
    if (step === walk.step) button.setAttribute('aria-current', 'step');
    button.addEventListener('click', () => goTo(step));
    item.append(button);
    return item;
  }));
  if (focused !== undefined) byId('steps').querySelector(`[data-step="${focused}"]`)?.focus();
}

// The step itself.
function drawStage() {
  origins.clear(); // of the step that was shown before; drawing fills it again
  putWords(byId('stage-title'), `walk.${STEPS[walk.step]}`);
  byId('stage-title').prepend(`${walk.step + 1}. `);
  byId('content').classList.toggle('with-numbers', walk.numbers);
  byId('content').replaceChildren(...DRAW[STEPS[walk.step]]());
  byId('back').disabled = walk.step === 0;
  byId('next').disabled = walk.step === STEPS.length - 1;
  byId('play').textContent = say(walk.timer ? 'walk.pause' : 'walk.play');
  tellOf(null);
}

function goTo(step) {
  walk.step = Math.min(STEPS.length - 1, Math.max(0, step));
  if (walk.step === STEPS.length - 1) stop(); // at the last step a walk that plays ends
  draw();
}

/**
 * Goes on with another head, at the same step and token.
 * @param {number} layer
 * @param {number} head
 */
export function chooseHead(layer, head) {
  Object.assign(walk, { layer, head });
  byId('head').value = headName(layer, head);
  draw();
}

function stop() { // ends the playing
  clearInterval(walk.timer);
  walk.timer = 0;
}

// Plays the walk, a step after the other; or stops it.
function play() {
  if (walk.timer) stop();
  else {
    if (walk.step === STEPS.length - 1) walk.step = 0; // from the end it begins anew
    walk.timer = setInterval(() => goTo(walk.step + 1), PAUSE);
  }
  draw();
}

// The arrows go on and back, except in the field of the text, in the list of heads and in tables, where they have a
// meaning of their own.
function keys(event) {
  if (isShortcut(event) || event.target.closest('[type=text], select, table')) return;
  if (event.key === 'ArrowRight') go(event, 1);
  else if (event.key === 'ArrowLeft') go(event, -1);
  else if (event.key === 'p') play();
}

function go(event, by) {
  event.preventDefault();
  goTo(walk.step + by);
}

function listenToWalk() {
  byId('head').append(...headNames(walk.model).map((name) => new Option(name, name)));
  byId('head').value = headName(walk.layer, walk.head);
  byId('head').addEventListener('change', (event) =>
    chooseHead(...event.target.value.slice(1).split('.H').map(Number))); // "L0.H3" -> 0, 3
  byId('text').value = begin.text;
  byId('text').addEventListener('input', () => {
    walk.at = Infinity; // the last token: `readText` puts it there
    readText();
    draw();
  });
  byId('choices').addEventListener('submit', (event) => event.preventDefault());
  byId('numbers').addEventListener('change', (event) => { walk.numbers = event.target.checked; drawStage(); });
  byId('back').addEventListener('click', () => goTo(walk.step - 1));
  byId('next').addEventListener('click', () => goTo(walk.step + 1));
  byId('play').addEventListener('click', play);
  document.addEventListener('keydown', keys);
  document.addEventListener('language', draw);
}

// An address may ask for a head that the model lacks.
if (!headNames(walk.model).includes(headName(walk.layer, walk.head))) walk.layer = walk.head = 0;
listenToWalk();
readText();
draw();
offer(walk.model);
byId('walk').hidden = false; // without a script there would be nothing in it
