// --- A large map with its labels, drawn into a pane of the large view ---

import { element, isShortcut, say } from './page/base.js';
import { colourOf, inkOn, paint, variable } from './report_colours.js';
import { chooseCell, pinRow } from './report_head.js';
import { pictureOf, placeLabel } from './report_pictures.js';
import { heads, view } from './report_state.js';

const SMALLEST_CELL = 4, LARGEST_CELL = 76, LEGIBLE = 13, NUMBERED = 34; // in CSS pixels

// What is said in full where a small picture says it in two words.
const WHY_MISSING = { 'report.no_map': 'report.no_map_long', 'report.not_there': 'report.not_there_long',
  'report.other_size': 'report.other_size_long' };

/**
 * A pane holds its elements, the head and the model it shows, and the size of its cells.
 * @param {Element} box
 * @returns {Object}
 */
export function makePane(box) {
  const find = (name) => box.querySelector(name);
  const pane = { box, caption: find('.pane-title'), frame: find('.frame'), map: find('.map'), rows: find('.rows'),
    columns: find('.columns'), missing: find('.missing-words'), small: element('canvas'), // the picture, one pixel a cell
    number: -1, which: 'this', picture: null, cell: 0, gutter: 0 };
  pane.map.addEventListener('pointermove', (event) => { if (event.pointerType === 'mouse' && !view.pinned) chooseCell(...cellAt(pane, event)); });
  pane.map.addEventListener('click', (event) => { chooseCell(...cellAt(pane, event)); pinRow(); });
  pane.map.addEventListener('keydown', (event) => walkMap(pane, event));
  return pane;
}

/**
 * @param {Object} pane
 * @param {number} number  of the head
 * @param {'this'|'other'|'difference'} which
 */
export function fillPane(pane, number, which) {
  Object.assign(pane, { number, which });
  const picture = pictureOf(number, which), missing = typeof picture === 'string';
  pane.picture = missing ? null : picture;
  pane.frame.hidden = missing;
  pane.missing.hidden = !missing;
  if (missing) {
    pane.missing.textContent = say(WHY_MISSING[picture], { name: heads[number].name });
    return;
  }
  pane.map.setAttribute('aria-label', say('report.map_of', { name: heads[number].name }));
  paint(pane.small, picture);
  layOut(pane);
}

// Sharp on dense screens: the canvas has more pixels than it takes up; drawing stays in CSS pixels.
function sized(canvas, width, height) {
  const dense = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * dense);
  canvas.height = Math.round(height * dense);
  canvas.style.width = width + 'px';
  canvas.style.height = height + 'px';
  const pen = canvas.getContext('2d');
  pen.setTransform(dense, 0, 0, dense, 0, 0);
  return pen;
}

function labelFont(cell, strong) { return `${strong ? '600 ' : ''}${Math.max(10, Math.min(14, cell - 2))}px ${variable('--mono')}`; }

function labels(pane, size) { return Array.from({ length: size }, (_, block) => placeLabel(pane.number, pane.picture, block, size)); }

// Choose the cell so that the map fits the pane; where it would become too small, the frame scrolls instead.
function layOut(pane) {
  const { rows, columns } = pane.picture, pen = pane.rows.getContext('2d');
  pen.font = `600 14px ${variable('--mono')}`;
  const widest = Math.max(...[...labels(pane, rows), ...labels(pane, columns)].map((label) => pen.measureText(label).width));
  pane.gutter = Math.ceil(Math.min(window.innerWidth < 600 ? 84 : 118, Math.max(24, widest + 10))); // room for labels, less on a phone
  const wide = (pane.box.clientWidth - pane.gutter - 8) / columns; // 8 pixels for borders and a scroll bar
  const tall = (window.innerHeight * 0.7 - pane.gutter - 8) / rows;
  const fitting = Math.floor(Math.min(wide, Math.max(tall, LEGIBLE)));
  pane.cell = Math.max(SMALLEST_CELL, Math.min(LARGEST_CELL, fitting));
  pane.frame.style.gridTemplateColumns = `${pane.gutter}px ${pane.cell * columns}px`;
}

export function drawPane(pane) {
  if (!pane.picture) return;
  drawMap(pane);
  drawLabels(pane);
}

function drawMap(pane) {
  const { rows, columns } = pane.picture, cell = pane.cell, width = cell * columns, height = cell * rows;
  const pen = sized(pane.map, width, height);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(pane.small, 0, 0, width, height);
  if (cell >= NUMBERED) drawNumbers(pane, pen);
  const x = view.column * cell, y = view.row * cell;
  pen.strokeStyle = variable('--mark');
  pen.lineWidth = 1;
  pen.globalAlpha = 0.55;
  pen.strokeRect(0.5, y + 0.5, width - 1, cell - 1);
  pen.strokeRect(x + 0.5, 0.5, cell - 1, height - 1);
  pen.globalAlpha = 1;
  pen.lineWidth = 2;
  pen.strokeRect(x, y, cell, cell);
}

// The weights themselves, where the cells have room; what rounds to nothing stays empty.
function drawNumbers({ picture, cell }, pen) {
  pen.font = `${Math.min(15, Math.floor(cell / 3))}px ${variable('--sans')}`;
  pen.textAlign = 'center';
  pen.textBaseline = 'middle';
  picture.read.forEach((weight, at) => {
    if (Math.abs(weight) < 0.005) return;
    pen.fillStyle = inkOn(colourOf(picture.drawn[at], picture.top, picture.diverging));
    const text = `${weight < 0 ? '−' : ''}${Math.abs(weight).toFixed(2)}`;
    pen.fillText(text, ((at % picture.columns) + 0.5) * cell, (Math.floor(at / picture.columns) + 0.5) * cell);
  });
}

// One line of labels along an axis. Too many to read: every nth, and always the chosen one with room around it.
function drawAxis(pane, pen, size, chosen, put) {
  const every = Math.max(1, Math.ceil(LEGIBLE / pane.cell)), end = size * pane.cell - 6;
  labels(pane, size).forEach((label, place) => {
    const isChosen = place === chosen;
    if (!isChosen && (place % every || Math.abs(place - chosen) < every)) return;
    pen.font = labelFont(pane.cell, isChosen);
    pen.fillStyle = variable(isChosen ? '--ink' : '--muted');
    put(label, Math.max(6, Math.min(end, (place + 0.5) * pane.cell))); // so that the outermost are not cut
  });
}

function drawLabels(pane) {
  const { rows, columns } = pane.picture, gutter = pane.gutter;
  const side = sized(pane.rows, gutter, pane.cell * rows);
  side.textAlign = 'right';
  side.textBaseline = 'middle';
  drawAxis(pane, side, rows, view.row, (label, y) => side.fillText(label, gutter - 6, y, gutter - 8));
  const top = sized(pane.columns, pane.cell * columns, gutter);
  top.textBaseline = 'middle';
  drawAxis(pane, top, columns, view.column, (label, x) => {
    top.save();
    top.translate(x, gutter - 6);
    top.rotate(-Math.PI / 2);
    top.fillText(label, 0, 0, gutter - 8);
    top.restore();
  });
}

// --- Moving through the map ---

function cellAt(pane, event) {
  const box = pane.map.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top].map((pixels) => Math.floor(pixels / pane.cell));
  return [y, x];
}

// When the arrow keys move to a cell outside the frame, scroll just enough to see it beside the sticky labels.
export function revealCell(pane) {
  if (!pane.picture) return;
  const { frame, cell, gutter } = pane, x = view.column * cell, y = view.row * cell;
  const wide = frame.clientWidth - gutter - cell - 8, tall = frame.clientHeight - gutter - cell - 8;
  frame.scrollLeft = Math.min(x, Math.max(frame.scrollLeft, x - wide));
  frame.scrollTop = Math.min(y, Math.max(frame.scrollTop, y - tall));
}

function walkMap(pane, event) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!step || isShortcut(event)) return;
  event.preventDefault();
  event.stopPropagation();
  chooseCell(view.row + step[0], view.column + step[1]);
  revealCell(pane);
}
