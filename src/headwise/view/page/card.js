// --- A head's card: its small picture, whose click silences the head, and its name, which enlarges it ---
//
// Only the cards in the window, and 200 pixels around it, are drawn; the others follow as they come into sight.

import { element, makeButton, on, say, worded } from './base.js';
import { paint } from './colours.js';
import { hasModel } from './engine.js';
import { openHead } from './head.js';
import { pictureOf, rowOf, storedOf } from './shown.js';
import { badge, data, factorOf, heads, inWords, kindWords, lookThrough, roleWords, shortName, times, toggleSilence,
  view } from './state.js';

export const DOTS = 96; // cells of a side of a small picture, at most
const inSight = new Set();
const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    inSight[isIntersecting ? 'add' : 'delete'](target);
    if (isIntersecting) drawCard(target);
  }
}, { rootMargin: '200px' });
let touched = false; // has a head been changed, or a question answered?

export function makeCard(number) {
  const { name } = heads[number], act = hasModel() ? toggleSilence : openHead;
  const picture = makeButton('picture', () => act(number),
    element('span', 'column-labels'), element('span', 'row-labels'),
    // The map; over it the row of the token that is looked at, "silenced", and what a click does.
    element('span', 'square unlit', element('canvas'), element('span', 'lit'), element('span', 'hush'),
      element('span', 'call')));
  const title = makeButton('name', () => openHead(number),
    element('span', 'title', data.served ? name : shortName(name)), element('span', 'larger', '⤢'));
  // Below it the roles, the largest weight or look, and what the head's silence does to the prediction.
  const box = element('div', 'head', picture, title, worded('span', 'invite', 'report.click_head'),
    element('div', 'below', element('span', 'signs'), element('span', 'largest'), element('span', 'effect')));
  box.dataset.number = number;
  title.setAttribute('aria-haspopup', 'dialog');
  lookWhile(box, number);
  picture.addEventListener('focus', () => lookThrough(number));
  picture.addEventListener('blur', () => lookThrough(-1));
  nameCard(box);
  watcher.observe(box);
  return box;
}

// While the pointer is on it, the sentence is seen through the head. A finger's touch is a click.
export function lookWhile(box, number) {
  box.addEventListener('pointerenter', (event) => { if (event.pointerType === 'mouse') lookThrough(number); });
  box.addEventListener('pointerleave', () => lookThrough(-1)); // -1: through all heads
}

// What a card says of its head and of what a click does, in the page's language and after every change of a factor.
function nameCard(box) {
  const number = Number(box.dataset.number), { name, roles = [] } = heads[number], factor = factorOf(number);
  const silent = factor === 0, picture = box.querySelector('.picture');
  const does = !hasModel() ? 'report.enlarge' : silent ? 'report.wake' : 'report.silence';
  const offer = !hasModel() ? 'report.call_enlarge' : silent ? 'report.call_wake' : 'report.call_silence';
  const label = [say(does, { name }), roleWords(heads[number])];
  picture.setAttribute('aria-label', label.filter(Boolean).join('. '));
  if (hasModel()) picture.setAttribute('aria-pressed', String(silent));
  box.querySelector('.name').setAttribute('aria-label', say('report.enlarge', { name }));
  box.classList.toggle('silent', silent);
  box.querySelector('.hush').textContent = silent ? say('report.silenced') : '';
  // Over a picture stands its factor, or, while the pointer is there, what a click does; beside the first name of a
  // report, until a head is changed or a question answered, that a picture can be clicked.
  const scaled = factor !== 1 && !silent, call = box.querySelector('.call');
  box.querySelector('.invite').hidden = number > 0 || touched || Boolean(data.served);
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

// Paints the picture of a card, and writes below it its largest weight, or why there is none.
export function drawCard(box) {
  const picture = pictureOf(Number(box.dataset.number)), canvas = box.querySelector('canvas');
  canvas.classList.toggle('missing', !picture && !data.served);
  if (picture) paint(canvas, thinned(picture));
  else canvas.width = canvas.height = 1; // which also wipes the picture that was there
  const most = picture && picture.top !== 1 ? say('report.max', { value: inWords(picture.top) }) : '';
  if (data.served) sayLook(box);
  else box.querySelector('.largest').textContent = picture ? most : say('report.no_map');
  light(box);
}

// Of a live model there stands what the head looks at: the word (`data-words`), or the kind of key, or its factor.
function sayLook(box) {
  const number = Number(box.dataset.number), factor = factorOf(number);
  const look = factor === 1 || factor === 0 ? kindWords(number) : times(factor);
  box.querySelector('.largest').textContent = box.dataset.words ?? look;
}

// Lights the row of the token that is looked at.
function light(box) {
  const number = Number(box.dataset.number), picture = storedOf(number), square = box.querySelector('.square');
  const row = picture ? rowOf(view.at, number, picture) : -1;
  square.classList.toggle('unlit', row < 0 || row >= picture.rows);
  square.style.setProperty('--lit', row);
  square.style.setProperty('--rows', picture?.rows ?? 1);
  box.querySelectorAll('.row-labels > span').forEach((label, at) => label.classList.toggle('here', at === view.at));
}

on('maps switches language', () => inSight.forEach(drawCard));
on('point', () => inSight.forEach(light));
if (data.served) on('read language', () => document.querySelectorAll('.head').forEach(sayLook));
on('changes proofs language', ({ detail }) => {
  touched ||= view.changes.size > 0 || detail?.size > 0;
  document.querySelectorAll('.head').forEach(nameCard);
});
window.addEventListener('beforeprint', () => document.querySelectorAll('.head').forEach(drawCard));
