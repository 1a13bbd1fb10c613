// --- The grid of small pictures: a map for each head, layers down and heads across ---
//
// Heads are numbers, their places in the list `heads`; `view` (report_state.js) is what is shown now.

import { byId, element, isShortcut, say, worded } from './page/base.js';
import { drawLegend, paint } from './report_colours.js';
import { times } from './report_factor.js';
import { openHead } from './report_head.js';
import { hasModel, modelMissing } from './report_model.js';
import { pictureOf, rowOf, storedOf } from './report_pictures.js';
import { lookThrough } from './report_sentence.js';
import { shown } from './report_shown.js';
import { toggleSilence } from './report_silence.js';
import { cut, data, distinct, heads, inWords, roleName, shortName, view } from './report_state.js';

// Milliseconds of drawing before the page may answer again; a frame of the screen takes 16 at 60 a second.
const FRAME_MS = 12;
const DOTS = 96; // cells of a side of a small picture, at most
// Up to so many tokens and heads, each row and column of a small picture has a label;
// more would be too small to read.
const LABELLED = 12, MOST_LABELLED = 48;
const stale = new Set(), inSight = new Set(); // numbers of heads: with a picture to be drawn anew; in the window
export let pictures = [], boxes = []; // of all heads, by number: the button with the map, and the box around it
let watcher = null, drawing = 0; // tells which boxes come into sight; how often the grid was drawn

// The sign of a role, by its place in data.roles; the style sheet has ten kinds of colours and shapes, .r0 to .r9.
export function badge(role) {
  const { name, kind } = data.roles[role];
  return element('span', `badge r${kind}`, roleName(name));
}

// The names of a head's roles: "previous token, induction".
export function roleWords(head) { return head.roles.map((role) => roleName(data.roles[role].name)).join(', '); }

export function makeGrid() {
  // A model may have several stacks: encoder, decoder, and cross attention between them. Each has a grid.
  const parts = distinct(heads.map((head) => head.part));
  for (const part of parts) {
    if (parts.length > 1) byId('grid').append(worded('h3', '', `report.part_${part}`));
    byId('grid').append(makePart(part));
  }
  boxes = [...byId('grid').querySelectorAll('.head')].sort((a, b) => a.dataset.number - b.dataset.number);
  pictures = boxes.map((box) => box.querySelector('.picture'));
  pictures[0].tabIndex = 0;
  // 200 pixels before a box comes into sight, its picture is drawn.
  watcher = new IntersectionObserver(sighted, { rootMargin: '200px' });
  boxes.forEach((box) => watcher.observe(box));
}

// The grid of one stack.
function makePart(part) {
  const members = heads.map((head, number) => [head, number]).filter(([head]) => head.part === part);
  // The numbers of heads and of layers that there are, in order; some may be missing.
  const [across, down] = ['head', 'layer'].map(
    (key) => distinct(members.map(([head]) => head[key])).sort((a, b) => a - b));
  const grid = element('div', 'grid');
  grid.dataset.part = part;
  grid.style.setProperty('--across', across.length);
  // Up to six heads across, the grid has room beside the panel of the reader's own sentence, which needs the model.
  byId('bench').classList.toggle('two', across.length <= 6 && !modelMissing());
  for (const [head, number] of members) {
    const box = makeHead(head, number);
    box.style.setProperty('--row', down.indexOf(head.layer) + 1);
    box.style.setProperty('--column', across.indexOf(head.head) + 1);
    grid.append(box);
  }
  return grid;
}

// A picture silences its head where the model is in the page, and enlarges it elsewhere; the name always enlarges.
function makeHead(head, number) {
  const box = element('div', 'head'), picture = element('button', 'picture'), frame = element('span', 'square');
  const name = element('button', 'name');
  box.dataset.number = number;
  picture.type = name.type = 'button';
  picture.tabIndex = name.tabIndex = -1; // one stop for Tab, the arrow keys do the rest
  // The map; over it the row of the token that is looked at, "silenced", and what a click does.
  frame.append(element('canvas'), element('span', 'lit'), element('span', 'hush'), element('span', 'call'));
  picture.append(element('span', 'column-labels'), element('span', 'row-labels'), frame);
  name.append(element('span', 'title', shortName(head.name)), element('span', 'larger', '⤢'));
  name.setAttribute('aria-haspopup', 'dialog');
  // Below it the roles, the largest weight, and what the head's silence does to the prediction.
  const below = element('span', 'below'), signs = element('span', 'signs');
  below.append(signs, element('span', 'largest'), element('span', 'effect'));
  box.append(picture, name, below);
  picture.addEventListener('click', () => (hasModel() ? toggleSilence(number) : openHead(number)));
  name.addEventListener('click', () => openHead(number));
  picture.addEventListener('focus', () => { stopAtHead(number); lookThrough(number); });
  // A finger has no place before it touches, and a touch is a click.
  box.addEventListener('pointerenter', (event) => { if (event.pointerType === 'mouse') lookThrough(number); });
  box.addEventListener('pointerleave', () => lookThrough(-1)); // -1: through all heads
  picture.addEventListener('blur', () => lookThrough(-1));
  return box;
}

// Makes a head the one at which Tab stops in the grid: first at its picture, then at its name.
function stopAtHead(number) {
  const before = pictures.findIndex((picture) => picture.tabIndex === 0);
  for (const kind of ['.picture', '.name']) {
    if (before >= 0) boxes[before].querySelector(kind).tabIndex = -1;
    boxes[number].querySelector(kind).tabIndex = 0;
  }
}

// What each picture says of its head and of what a click does,
// in the page's language and after every change of a factor.
export function nameHeads() {
  heads.forEach((head, number) => {
    const factor = view.changes.get(head.name) ?? 1, silent = factor === 0, picture = pictures[number];
    const does = !hasModel() ? 'report.enlarge' : silent ? 'report.wake' : 'report.silence';
    picture.setAttribute('aria-label', [say(does, { name: head.name }), roleWords(head)].filter(Boolean).join('. '));
    if (hasModel()) picture.setAttribute('aria-pressed', String(silent));
    boxes[number].querySelector('.name').setAttribute('aria-label', say('report.enlarge', { name: head.name }));
    boxes[number].classList.toggle('silent', silent);
    boxes[number].querySelector('.hush').textContent = silent ? say('report.silenced') : '';
    // Over a picture stands its factor; over the first one, until a head is changed, that it can be clicked; over the
    // others, while the pointer is there, what a click does.
    const scaled = factor !== 1 && !silent, invites = number === 0 && !view.changes.size;
    const offer = !hasModel() ? 'report.call_enlarge' : silent ? 'report.call_wake' : 'report.call_silence';
    const call = boxes[number].querySelector('.call');
    call.textContent = scaled ? times(factor) : say(invites ? 'report.click_head' : offer);
    call.classList.toggle('stays', scaled || invites);
    boxes[number].querySelector('.signs').replaceChildren(...head.roles.map(badge));
  });
}

// Labels of rows and columns, where they can be read: the tokens of the text that is shown.
export function makeLabels() {
  const labelled = shown.exact && shown.tokens.length <= LABELLED && heads.length <= MOST_LABELLED;
  byId('grid').classList.toggle('labelled', labelled);
  for (const box of boxes) {
    for (const kind of ['.row-labels', '.column-labels']) {
      const labels = labelled ? shown.tokens.map((token) => element('span', '', cut(token, 9))) : [];
      box.querySelector(kind).replaceChildren(...labels);
    }
  }
}

// A small picture of a long text, with at most DOTS rows and columns: each dot is the weight of its block of cells
// that is largest in size, so that a thin line stays a line.
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

// Paints the picture of a head, and writes below it its largest weight, or why there is none.
function drawPicture(number) {
  const picture = pictureOf(number), box = boxes[number], canvas = box.querySelector('canvas');
  canvas.classList.toggle('missing', !picture);
  if (!picture) canvas.width = canvas.height = 1; // which also wipes the picture that was there
  else paint(canvas, thinned(picture));
  let words = '';
  if (!picture) words = say('report.no_map');
  else if (picture.top !== 1) words = say('report.max', { value: inWords(picture.top) });
  box.querySelector('.largest').textContent = words;
  stale.delete(number);
}

// Lights the row of the token that is looked at: one change of the style of a grid does so in all its pictures.
export function lightRows() {
  for (const grid of byId('grid').querySelectorAll('.grid')) {
    const number = heads.findIndex((head) => head.part === grid.dataset.part); // its maps are all of one size
    const picture = storedOf(number);
    const row = picture ? rowOf(view.at, number, picture) : -1;
    grid.classList.toggle('pointing', row >= 0);
    grid.style.setProperty('--lit', row);
    grid.style.setProperty('--rows', picture ? picture.rows : 1);
    grid.dataset.lit = row;
  }
  if (byId('grid').classList.contains('labelled')) {
    for (const box of boxes) {
      box.querySelectorAll('.row-labels > span').forEach((label, at) => label.classList.toggle('here', at === view.at));
    }
  }
}

// Boxes came into sight or went out of it.
function sighted(entries) {
  for (const entry of entries) {
    const number = Number(entry.target.dataset.number);
    if (entry.isIntersecting) inSight.add(number);
    else inSight.delete(number);
    if (entry.isIntersecting && stale.has(number)) drawPicture(number);
  }
  countDrawn();
}

// How many pictures are up to date, written where a test can wait for it.
function countDrawn() { byId('main').dataset.drawn = String(heads.length - stale.size); }

// Draws all pictures: those in sight at once, the others a few at a time, so that the page can answer in between. A
// later call replaces one that is still under way.
export function drawGrid() {
  const turn = ++drawing;
  heads.forEach((_, number) => stale.add(number));
  inSight.forEach(drawPicture);
  sayScale();
  const some = () => {
    if (turn !== drawing) return; // a later call has begun
    const until = performance.now() + FRAME_MS;
    for (const number of stale) {
      if (performance.now() > until) break;
      drawPicture(number);
    }
    countDrawn();
    if (stale.size) setTimeout(some, 0);
  };
  some();
}

// What the colours and the dots stand for, in words below the grid; and the strip of colours above it.
function sayScale() {
  const lines = [], scaled = view.scale === 'own';
  if (view.hideFirst) lines.push(say('report.scale_hidden'));
  lines.push(say(scaled ? 'report.scale_own' : 'report.scale_fixed'));
  if (view.log) lines.push(say('report.scale_log'));
  if (shown.exact && shown.tokens.length > DOTS) lines.push(say('report.scale_thin'));
  // A picture has a block of tokens for each dot where the text is longer than the picture is wide; where the length
  // is not known, it may have.
  if (!shown.exact && heads.some((head) => !head.length || head.length > head.columns)) lines.push(
    say('report.scale_blocks'),
  );
  byId('scale-note').textContent = lines.join(' ');
  drawLegend(document.querySelector('.tools .legend'), scaled ? say('report.its_largest') : '1');
}

// The arrow keys walk over the grid; above and below the last row of a part lies the next part.
export function walkGrid(event) {
  const here = event.target.closest('.head');
  if (!here || isShortcut(event)) return;
  const number = Number(here.dataset.number);
  if (event.key === 'Enter' && event.target.matches('.picture')) { // a click would silence; the space bar is a click
    event.preventDefault();
    openHead(number);
    return;
  }
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!step) return;
  const place = (box, side) => Number(box.style.getPropertyValue(side));
  const row = place(here, '--row') + step[0], column = place(here, '--column') + step[1];
  const there = [...here.parentElement.children]
    .find((box) => place(box, '--row') === row && place(box, '--column') === column)
    ?? (step[0] ? beyond(here.parentElement, step[0]) : null);
  event.preventDefault();
  if (there) there.querySelector('.picture').focus();
}

// The first head of the grid below (by 1), or the last one of the grid above (by -1).
function beyond(grid, by) {
  const grids = [...byId('grid').querySelectorAll('.grid')], next = grids[grids.indexOf(grid) + by];
  return next && (by > 0 ? next.firstElementChild : next.lastElementChild);
}
