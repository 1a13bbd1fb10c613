// --- The grid of small pictures of a report: a card for each head, layers down and heads across ---

import { byId, element, on, say, stopAt, walkable, worded } from './base.js';
import { DOTS, makeCard } from './card.js';
import { drawLegend } from './colours.js';
import { hasModel } from './engine.js';
import { cut, distinct, enumerated, heads, matches, moved, points, view } from './state.js';

// Up to so many tokens and heads, rows and columns of small pictures have labels.
const LABELLED = 12, MOST_LABELLED = 48;
// A head stands out if the followed token loses more than 20 percentage points without it: a round choice.
const STRONG = -0.2;
const boxes = []; // the cards of all heads, by number
const rows = []; // the same as they stand, row by row
let proofs = new Map(); // name of a head -> what changes without it, once a question is answered

export function makeGrid() {
  // A model may have several stacks: encoder, decoder, and cross attention between them. Each has a grid.
  const parts = distinct(heads.map((head) => head.part));
  for (const part of parts) {
    if (parts.length > 1) byId('grid').append(worded('h3', '', `report.part_${part}`));
    byId('grid').append(makePart(part));
  }
  stopAtHead(boxes[0]);
  walkable(byId('grid'), () => rows, (box) => box.querySelector('.picture').focus());
}

// The grid of one stack.
function makePart(part) {
  const members = heads.map((head, number) => [head, number]).filter(([head]) => head.part === part);
  // The numbers of heads and of layers that there are, in order; some may be missing.
  const [across, down] = ['head', 'layer'].map(
    (key) => distinct(members.map(([head]) => head[key])).sort((a, b) => a - b));
  const grid = element('div', 'grid'), above = rows.length;
  grid.style.setProperty('--across', across.length);
  // Up to six heads across, the grid has room beside the panel of the reader's own sentence, which needs the model.
  byId('bench').classList.toggle('two', across.length <= 6 && hasModel());
  for (const [head, number] of members) {
    const box = makeCard(number), row = down.indexOf(head.layer), column = across.indexOf(head.head);
    box.style.setProperty('--row', row + 1);
    box.style.setProperty('--column', column + 1);
    box.querySelector('.picture').addEventListener('focus', () => stopAtHead(box));
    (rows[above + row] ??= [])[column] = boxes[number] = box;
    grid.append(box);
  }
  return grid;
}

// Makes a head the one at which Tab stops in the grid, the arrow keys do the rest: first its picture, then its name.
function stopAtHead(box) {
  for (const kind of ['.picture', '.name']) stopAt(byId('grid').querySelectorAll(kind), box.querySelector(kind));
}

// Labels of rows and columns, where they can be read: the tokens of the text that is shown.
function makeLabels() {
  const { tokens, exact } = view.shown;
  const labelled = exact && tokens.length <= LABELLED && heads.length <= MOST_LABELLED;
  byId('grid').classList.toggle('labelled', labelled);
  for (const place of byId('grid').querySelectorAll('.row-labels, .column-labels')) {
    place.replaceChildren(...(labelled ? tokens : []).map((token) => element('span', '', cut(token, 9))));
  }
}

// What the colours and the dots stand for, in words below the grid; and the strip of colours above it.
function sayScale() {
  const scaled = view.scale === 'own', { exact, tokens } = view.shown;
  // Each dot is a block where the text is longer than the picture is wide, or of unknown length.
  const blocks = !exact && heads.some((head) => !head.length || head.length > head.columns);
  const keys = [view.hideFirst && 'hidden', scaled ? 'own' : 'fixed', view.log && 'log',
    exact && tokens.length > DOTS && 'thin', blocks && 'blocks'];
  byId('scale-note').textContent = keys.filter(Boolean).map((key) => say(`report.scale_${key}`)).join(' ');
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

on('words', makeLabels);
on('maps switches language', sayScale);
on('ranking', showEffects);
on('proofs', showProofs);
on('filter', () => boxes.forEach((box, number) => box.classList.toggle('faded', !matches(number))));
