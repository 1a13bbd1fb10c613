// --- The grid of small pictures of a report: a card for each head, layers down and heads across ---

import { arrowOf, byId, element, on, say, stopAt, worded } from './base.js';
import { DOTS, drawCard, makeCard, nameCard, watchCards } from './card.js';
import { drawLegend } from './colours.js';
import { hasModel } from './engine.js';
import { rowOf, storedOf } from './shown.js';
import { cut, distinct, enumerated, heads, matches, moved, points, view } from './state.js';

// Milliseconds of drawing before the page may answer again; a frame of the screen takes 16 at 60 a second.
const FRAME_MS = 12;
// Up to so many tokens and heads, rows and columns of small pictures have labels.
const LABELLED = 12, MOST_LABELLED = 48;
// A head stands out if the followed token loses more than 20 percentage points without it: a round choice.
const STRONG = -0.2;
const stale = new Set(); // numbers of heads with a picture to be drawn anew
let boxes = []; // the cards of all heads, by number
let inSight = new Set(), drawing = 0; // numbers of the cards in the window; how often the grid was drawn
let proofs = new Map(); // name of a head -> what changes without it, once a question is answered

export function makeGrid() {
  // A model may have several stacks: encoder, decoder, and cross attention between them. Each has a grid.
  const parts = distinct(heads.map((head) => head.part));
  for (const part of parts) {
    if (parts.length > 1) byId('grid').append(worded('h3', '', `report.part_${part}`));
    byId('grid').append(makePart(part));
  }
  boxes = [...byId('grid').querySelectorAll('.head')].sort((a, b) => a.dataset.number - b.dataset.number);
  stopAtHead(0);
  inSight = watchCards(boxes, (number) => { if (stale.has(number)) draw(number); countDrawn(); });
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
  byId('bench').classList.toggle('two', across.length <= 6 && hasModel());
  for (const [head, number] of members) {
    const box = makeCard(number);
    box.style.setProperty('--row', down.indexOf(head.layer) + 1);
    box.style.setProperty('--column', across.indexOf(head.head) + 1);
    box.querySelector('.picture').addEventListener('focus', () => stopAtHead(number));
    grid.append(box);
  }
  return grid;
}

// Makes a head the one at which Tab stops in the grid, the arrow keys do the rest: first its picture, then its name.
function stopAtHead(number) {
  for (const kind of ['.picture', '.name']) {
    stopAt(byId('grid').querySelectorAll(kind), boxes[number].querySelector(kind));
  }
}

// Labels of rows and columns, where they can be read: the tokens of the text that is shown.
function makeLabels() {
  const { tokens, exact } = view.shown;
  const labelled = exact && tokens.length <= LABELLED && heads.length <= MOST_LABELLED;
  byId('grid').classList.toggle('labelled', labelled);
  for (const box of boxes) {
    for (const kind of ['.row-labels', '.column-labels']) {
      const labels = labelled ? tokens.map((token) => element('span', '', cut(token, 9))) : [];
      box.querySelector(kind).replaceChildren(...labels);
    }
  }
}

// Lights the row of the token that is looked at: one change of the style of a grid does so in all its pictures.
function lightRows() {
  for (const grid of byId('grid').querySelectorAll('.grid')) {
    const number = heads.findIndex((head) => head.part === grid.dataset.part); // its maps are all of one size
    const picture = storedOf(number), row = picture ? rowOf(view.at, number, picture) : -1;
    grid.classList.toggle('pointing', row >= 0);
    grid.style.setProperty('--lit', row);
    grid.style.setProperty('--rows', picture ? picture.rows : 1);
    grid.dataset.lit = row;
  }
  if (!byId('grid').classList.contains('labelled')) return;
  for (const box of boxes) {
    box.querySelectorAll('.row-labels > span').forEach((label, at) => label.classList.toggle('here', at === view.at));
  }
}

function draw(number) {
  drawCard(boxes[number]);
  stale.delete(number);
}

// How many pictures are up to date, written where a test can wait for it.
function countDrawn() { byId('main').dataset.drawn = String(heads.length - stale.size); }

// Draws those in sight at once, the others a few at a time, so that the page can answer; a later call takes over.
function drawGrid() {
  const turn = ++drawing;
  heads.forEach((_, number) => stale.add(number));
  inSight.forEach(draw);
  sayScale();
  const some = () => {
    if (turn !== drawing) return; // a later call has begun
    const until = performance.now() + FRAME_MS;
    for (const number of stale) {
      if (performance.now() > until) break;
      draw(number);
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
  if (view.shown.exact && view.shown.tokens.length > DOTS) lines.push(say('report.scale_thin'));
  // Each dot is a block where the text is longer than the picture is wide, or of unknown length.
  const blocks = !view.shown.exact && heads.some((head) => !head.length || head.length > head.columns);
  if (blocks) lines.push(say('report.scale_blocks'));
  byId('scale-note').textContent = lines.join(' ');
  drawLegend(document.querySelector('.tools .legend'), scaled ? say('report.its_largest') : '1');
}

// Below each picture stands what its head's silence does: what becomes of the followed token, or, once a question is
// answered, what of the word changes. `tell` gives the words of a head, and whether they stand out.
function showBelow(tell) {
  for (const box of boxes) {
    const effect = box.querySelector('.effect'), [words, isStrong] = tell(heads[box.dataset.number].name);
    effect.textContent = words;
    effect.classList.toggle('strong', isStrong);
  }
}

function showEffects({ detail: ranking }) {
  if (proofs.size) return; // what a question has shown stays
  const parts = new Map(ranking?.rows);
  showBelow((name) => {
    const change = parts.has(name) ? parts.get(name) - ranking.before : 0;
    return [moved(change) ? say('report.points', { value: points(change) }) : '', change < STRONG];
  });
}

function showProofs({ detail }) {
  proofs = detail;
  showBelow((name) => {
    const parts = proofs.get(name) ?? [];
    return [parts.length ? say('report.breaks', { what: enumerated(parts) }) : '', parts.length > 0];
  });
}

// The arrow keys walk over the grid; above and below the last row of a part lies the next part.
function walkGrid(event) {
  const here = event.target.closest('.head'), step = arrowOf(event);
  if (!here || !step) return;
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

if (byId('grid')) {
  byId('grid').addEventListener('keydown', walkGrid);
  on('words', makeLabels);
  on('maps switches language', drawGrid);
  on('maps point', lightRows);
  on('changes proofs language', () => boxes.forEach(nameCard));
  on('ranking', showEffects);
  on('proofs', showProofs);
  on('filter', () => boxes.forEach((box, number) => box.classList.toggle('faded', !matches(number))));
}
