// --- The guided walk through one head, in eight steps: what is chosen, the bar of tokens, going forth and back ---

import { arrowOf, byId, element, hashOf, hashParts, isShortcut, language, makeButton, on, putWords, readData, remake,
  say, worded } from './base.js';
import { byWeight, forward, headName, headNames, inputOf, offer } from './model.js';
import { nearest, replaced } from './tokens.js';
import { DRAW, STEPS } from './walk_steps.js';
import { chooseHead, origins, tellOf, walk, written } from './walk_tables.js';

const PAUSE = 6000; // milliseconds that a step stands while the walk plays
// What the page begins with: {text, layer, head, at, report}, and over it what the address asks for.
const begin = { ...readData('start'), ...asked() };

// What the address asks for, as the report writes it: #L0.H3/5/a text.
function asked() {
  const [name, at, text] = hashParts(), head = /^L(\d+)\.H(\d+)$/.exec(name);
  if (!head || !/^\d+$/.test(at) || text === undefined) return {};
  return { layer: Number(head[1]), head: Number(head[2]), at: Number(at), text };
}

// The link back to the report, at the same head, token and text; hidden where the page lies beside no report.
function showWayBack() {
  const place = [headName(walk.layer, walk.head), walk.at, byId('text').value];
  byId('to-report').hidden = !begin.report;
  byId('to-report').href = `${begin.report}?lang=${language()}${hashOf(place)}`;
}

// Reads the text, as much of it as the model can, and runs the model on it.
function readText() {
  const { ids, pieces } = inputOf(walk.model, byId('text').value), { context } = walk.model.config;
  walk.cut = Math.max(0, ids.length - context); // tokens at the end of the text that the model cannot read
  walk.ids = ids.slice(0, context);
  walk.pieces = pieces.slice(0, context);
  // An empty text in a model without a token that begins a text: so that there is something to show, its first token.
  if (!walk.ids.length) [walk.ids, walk.pieces] = [[0], [{ id: 0, text: walk.model.tokens.strings[0], known: true }]];
  walk.unknown = walk.pieces.find((piece) => !piece.known)?.text ?? ''; // of such a word nothing is shown
  walk.run = forward(walk.model, walk.ids);
  walk.at = Math.min(walk.at, walk.ids.length - 1);
}

function draw() {
  byId('head').value = headName(walk.layer, walk.head);
  drawTokens();
  for (const id of ['steps', 'stage']) byId(id).hidden = Boolean(walk.unknown);
  drawSteps();
  drawStage();
  showWayBack();
}

function numbersOf(name) { return name.slice(1).split('.H').map(Number); } // "L0.H3" -> 0, 3

// Another text, of which the last token asks: `readText` puts Infinity there.
function takeText(text) {
  if (byId('text').value !== text) byId('text').value = text; // a field that is written to loses its cursor
  walk.at = Infinity;
  readText();
  draw();
}

// The bar of tokens, each a button that makes it the one that asks.
function drawTokens() {
  const weights = walk.run.layers[walk.layer].heads[walk.head].weights[walk.at];
  remake(byId('tokens'), 'at', walk.pieces.map((piece, at) => {
    // bdi: a right-to-left token does not turn what stands around it.
    const chip = makeButton('token', () => { walk.at = at; draw(); }, element('sup', '', String(at)),
      element('bdi', '', written(piece)));
    chip.dataset.at = at;
    chip.setAttribute('aria-pressed', String(at === walk.at));
    chip.classList.toggle('later', at > walk.at); // which the model hides from the one that asks
    chip.classList.toggle('unknown', !piece.known);
    // From the step on in which the weights come up, each token is tinted by its own.
    if (STEPS.indexOf('softmax') <= walk.step && !walk.unknown) chip.style.setProperty('--share', String(weights[at]));
    return chip;
  }));
  const { unknown } = walk, note = byId('tokens-note');
  if (unknown) putWords(note, 'walk.unknown_note', { word: unknown });
  else if (walk.cut) putWords(note, 'walk.cut', { count: walk.ids.length, left: walk.cut });
  else putWords(note, 'walk.choose_token');
  if (unknown) note.append(...nearest(walk.model.tokens, unknown).flatMap((near) => [' ', makeButton('', () =>
    takeText(replaced(byId('text').value, unknown, near)), near)]));
}

// The list of the eight steps, each a button.
function drawSteps() {
  remake(byId('steps'), 'step', STEPS.map((name, step) => {
    const button = makeButton('', () => goTo(step), worded('span', '', `walk.${name}`));
    button.dataset.step = step;
    if (step === walk.step) button.setAttribute('aria-current', 'step');
    return element('li', '', button);
  }));
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
  if (document.activeElement.disabled) byId('stage-title').focus(); // at either end, where a key held down stays
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

// The arrows go on and back, except where they have a meaning of their own.
function keys(event) {
  if (isShortcut(event) || event.target.closest('[type=text], select, table')) return;
  const [down, by] = arrowOf(event) ?? [1, 0];
  if (event.key === 'p') play();
  if (down) return;
  event.preventDefault();
  goTo(walk.step + by);
}

byId('head').append(...headNames(walk.model).map((name) => new Option(name, name)));
byId('head').addEventListener('change', (event) => chooseHead(...numbersOf(event.target.value)));
byId('text').value = begin.text;
byId('text').addEventListener('input', () => takeText(byId('text').value));
byId('choices').addEventListener('submit', (event) => event.preventDefault());
byId('numbers').addEventListener('change', (event) => { walk.numbers = event.target.checked; drawStage(); });
byId('back').addEventListener('click', () => goTo(walk.step - 1));
byId('next').addEventListener('click', () => goTo(walk.step + 1));
byId('play').addEventListener('click', play);
document.addEventListener('keydown', keys);
on('language head', draw);

Object.assign(walk, { layer: begin.layer, head: begin.head, at: begin.at });
readText();
// Nobody asks for a head, or for one that the model lacks: the walk opens at the one that matters most here.
if (!headNames(walk.model).includes(headName(walk.layer, walk.head))) {
  [walk.layer, walk.head] = numbersOf(byWeight(walk.model, walk.ids, walk.at)[0]);
}
draw();
offer(walk.model);
byId('walk').hidden = false; // without a script there would be nothing in it
