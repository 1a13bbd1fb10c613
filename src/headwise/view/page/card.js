// --- A head's card: its small picture, whose click silences the head, and its name, which enlarges it ---

import { element, makeButton, on, say, worded } from './base.js';
import { paint } from './colours.js';
import { hasModel } from './engine.js';
import { openHead } from './head.js';
import { pictureOf } from './shown.js';
import { badge, data, factorOf, heads, inWords, lookThrough, roleWords, scaleHead, shortName, times, toggleSilence,
  view } from './state.js';

export const DOTS = 96; // cells of a side of a small picture, at most
let touched = false; // has a head been changed, or a question answered?
on('changes proofs', ({ detail }) => { touched ||= view.changes.size > 0 || detail?.size > 0; });

export function makeCard(number) {
  const box = element('div', 'head'), frame = element('span', 'square'), below = element('span', 'below');
  const picture = makeButton('picture', undefined, () => press(number)), name = makeButton('name');
  box.dataset.number = number;
  // The map; over it the row of the token that is looked at, "silenced", and what a click does.
  frame.append(element('canvas'), element('span', 'lit'), element('span', 'hush'), element('span', 'call'));
  picture.append(element('span', 'column-labels'), element('span', 'row-labels'), frame);
  name.append(element('span', 'title', data.served ? heads[number].name : shortName(heads[number].name)),
    element('span', 'larger', '⤢'));
  name.setAttribute('aria-haspopup', 'dialog');
  // Below it the roles, the largest weight, and what the head's silence does to the prediction.
  below.append(element('span', 'signs'), element('span', 'largest'), element('span', 'effect'));
  box.append(picture, name, worded('span', 'invite', 'report.click_head'), below);
  name.addEventListener('click', () => openHead(number));
  lookWhile(box, number);
  picture.addEventListener('focus', () => lookThrough(number));
  picture.addEventListener('blur', () => lookThrough(-1));
  nameCard(box);
  return box;
}

// Where there is a model a click silences the head. One that is scaled goes back to what it was on a live page.
function press(number) {
  if (!hasModel()) openHead(number);
  else if (data.served) scaleHead(number, factorOf(number) === 1 ? 0 : 1);
  else toggleSilence(number);
}

// While the pointer is on it, the sentence is seen through the head. A finger's touch is a click.
export function lookWhile(box, number) {
  box.addEventListener('pointerenter', (event) => { if (event.pointerType === 'mouse') lookThrough(number); });
  box.addEventListener('pointerleave', () => lookThrough(-1)); // -1: through all heads
}

// What a card says of its head and of what a click does, in the page's language and after every change of a factor.
export function nameCard(box) {
  const number = Number(box.dataset.number), { name, roles = [] } = heads[number], factor = factorOf(number);
  const silent = factor === 0, picture = box.querySelector('.picture');
  const does = !hasModel() ? 'report.enlarge' : silent ? 'report.wake' : 'report.silence';
  picture.setAttribute('aria-label', [say(does, { name }), roleWords(heads[number])].filter(Boolean).join('. '));
  if (hasModel()) picture.setAttribute('aria-pressed', String(silent));
  box.querySelector('.name').setAttribute('aria-label', say('report.enlarge', { name }));
  box.classList.toggle('silent', silent);
  box.querySelector('.hush').textContent = silent ? say('report.silenced') : '';
  // Over a picture stands its factor, or, while the pointer is there, what a click does; beside the first name of a
  // report, until a head is changed or a question answered, that a picture can be clicked.
  const scaled = factor !== 1 && !silent;
  box.querySelector('.invite').hidden = number > 0 || touched || Boolean(data.served);
  const offer = !hasModel() ? 'report.call_enlarge' : silent ? 'report.call_wake' : 'report.call_silence';
  const call = box.querySelector('.call');
  call.textContent = scaled ? times(factor) : say(offer);
  call.classList.toggle('stays', scaled);
  box.querySelector('.signs').replaceChildren(...roles.map(badge));
}

// Of a long text each dot is the largest weight of its block of cells, so that a thin line stays a line.
function thinned(picture) {
  const { rows, columns, drawn } = picture;
  if (Math.max(rows, columns) <= DOTS) return picture;
  const [down, across] = [Math.min(rows, DOTS), Math.min(columns, DOTS)], most = new Float32Array(down * across);
  drawn.forEach((weight, at) => {
    // Cell `at` is in row at / columns, column at % columns; its dot is that far along, in proportion.
    const row = Math.floor((Math.floor(at / columns) * down) / rows);
    const column = Math.floor(((at % columns) * across) / columns);
    if (Math.abs(weight) > Math.abs(most[row * across + column])) most[row * across + column] = weight;
  });
  return { ...picture, rows: down, columns: across, drawn: most };
}

// Paints the picture of a card, which is given back, and writes below it its largest weight, or why there is none.
export function drawCard(box) {
  const picture = pictureOf(Number(box.dataset.number)), canvas = box.querySelector('canvas');
  canvas.classList.toggle('missing', !picture && !data.served);
  if (picture) paint(canvas, thinned(picture));
  else canvas.width = canvas.height = 1; // which also wipes the picture that was there
  const largest = picture && picture.top !== 1 ? say('report.max', { value: inWords(picture.top) }) : '';
  if (!data.served) box.querySelector('.largest').textContent = picture ? largest : say('report.no_map');
  return picture;
}

// Draws what comes into sight, from 200 pixels before on; `inSight` has the numbers of the cards that are there.
export function watchCards(boxes, draw) {
  const inSight = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const number = Number(target.dataset.number);
      inSight[isIntersecting ? 'add' : 'delete'](number);
      if (isIntersecting) draw(number);
    }
  }, { rootMargin: '200px' });
  boxes.forEach((box) => watcher.observe(box));
  return inSight;
}
