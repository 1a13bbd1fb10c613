// --- A large map with its labels, drawn into a pane of the large view ---
//
// The chosen cell is view.row, view.column.

import { arrowOf, element, say } from './base.js';
import { colourOf, inkOn, paint, variable } from './colours.js';
import { pictureOf, placeLabel } from './shown.js';
import { heads, view } from './state.js';

// Sides of a cell in pixels: the least, the most, from which on labels can be read, and numbers have room.
const SMALLEST_CELL = 4, LARGEST_CELL = 76, LEGIBLE = 13, NUMBERED = 34;

// A pane: the elements of pane.html, the head that it shows, and the size of its cells. `choose(row, column)` and
// `pinRow()` are what pointer and keys do.
export function makePane(box, choose, pinRow) {
  const find = (name) => box.querySelector(name);
  const pane = {
    box, caption: find('.pane-title'), frame: find('.frame'),
    map: find('.map'), rows: find('.rows'), columns: find('.columns'), // canvases: the cells, and labels on two sides
    missing: find('.missing-words'),
    small: element('canvas'), // the picture, one pixel a cell; never in the page, but enlarged from
    number: -1, picture: null, // the head, and what `pictureOf` gives for it
    cell: 0, gutter: 0, // pixels of a cell's side, and of the room for labels
  };
  pane.map.addEventListener('pointermove', (event) => {
    if (event.pointerType === 'mouse' && !view.pinned) choose(...cellAt(pane, event));
  });
  pane.map.addEventListener('click', (event) => { choose(...cellAt(pane, event)); pinRow(); });
  pane.map.addEventListener('keydown', (event) => walkMap(pane, event, choose));
  return pane;
}

// Gives a pane another picture, or the words that say that there is none.
export function fillPane(pane, number) {
  const picture = pictureOf(number);
  Object.assign(pane, { number, picture });
  pane.frame.hidden = !picture;
  pane.missing.hidden = Boolean(picture);
  const { name } = heads[number];
  pane.missing.textContent = picture ? '' : say('report.no_map_long', { name });
  if (!picture) return;
  pane.map.setAttribute('aria-label', say('report.map_of', { name }));
  paint(pane.small, picture);
  layOut(pane);
}

// A canvas of this size has more pixels on dense screens; its pen draws in CSS pixels.
function sized(canvas, width, height) {
  const dense = window.devicePixelRatio || 1;
  Object.assign(canvas, { width: Math.round(width * dense), height: Math.round(height * dense) });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  const pen = canvas.getContext('2d');
  pen.setTransform(dense, 0, 0, dense, 0, 0);
  return pen;
}

// The labels along an axis of so many rows or columns, each a token or a block of tokens.
function labels(pane, size) {
  return Array.from({ length: size }, (_, block) => placeLabel(pane.number, pane.picture, block, size));
}

// Chooses the size of the cells so that the map fits; where it would become too small, the frame scrolls.
function layOut(pane) {
  const { rows, columns } = pane.picture, pen = pane.rows.getContext('2d'); // only to measure with
  pen.font = `600 14px ${variable('--mono')}`; // the largest that a label can have, as the chosen one
  const widest = Math.max(
    ...[...labels(pane, rows), ...labels(pane, columns)].map((label) => pen.measureText(label).width),
  );
  // Room for the widest label, at most 118 pixels, and less on a phone; longer ones are drawn narrower.
  pane.gutter = Math.ceil(Math.min(window.innerWidth < 600 ? 84 : 118, Math.max(24, widest + 10)));
  const wide = (pane.box.clientWidth - pane.gutter - 8) / columns; // 8 pixels for borders and a scroll bar
  const tall = (window.innerHeight * 0.7 - pane.gutter - 8) / rows; // the words around it need the rest of the window
  const fitting = Math.floor(Math.min(wide, Math.max(tall, LEGIBLE))); // too tall a map scrolls before labels are lost
  pane.cell = Math.max(SMALLEST_CELL, Math.min(LARGEST_CELL, fitting));
  pane.frame.style.gridTemplateColumns = `${pane.gutter}px ${pane.cell * columns}px`;
}

// Draws the map and its labels, with the chosen cell.
export function drawPane(pane) {
  if (!pane.picture) return;
  drawLabels(pane);
  const { rows, columns } = pane.picture, cell = pane.cell, width = cell * columns, height = cell * rows;
  const pen = sized(pane.map, width, height);
  pen.imageSmoothingEnabled = false; // cells keep hard edges
  pen.drawImage(pane.small, 0, 0, width, height);
  if (cell >= NUMBERED) drawNumbers(pane, pen);
  // Thin lines around the row and column of the chosen cell (half a pixel in they are sharp), a thicker one around it.
  const x = view.column * cell, y = view.row * cell;
  Object.assign(pen, { strokeStyle: variable('--mark'), lineWidth: 1, globalAlpha: 0.55 });
  pen.strokeRect(0.5, y + 0.5, width - 1, cell - 1);
  pen.strokeRect(x + 0.5, 0.5, cell - 1, height - 1);
  Object.assign(pen, { lineWidth: 2, globalAlpha: 1 });
  pen.strokeRect(x, y, cell, cell);
}

// The weights, where the cells have room, in the ink that stands out; what rounds to nothing stays empty.
function drawNumbers({ picture, cell }, pen) {
  const font = `${Math.min(15, Math.floor(cell / 3))}px ${variable('--sans')}`;
  Object.assign(pen, { font, textAlign: 'center', textBaseline: 'middle' });
  (picture.diverging ? picture.drawn : picture.weights).forEach((weight, at) => {
    if (Math.abs(weight) < 0.005) return; // it would be 0.00
    const x = ((at % picture.columns) + 0.5) * cell, y = (Math.floor(at / picture.columns) + 0.5) * cell;
    pen.fillStyle = inkOn(colourOf(picture.drawn[at], picture.top, picture.diverging));
    pen.fillText(weight.toFixed(2).replace('-', '−'), x, y);
  });
}

// The labels along an axis of `size` rows or columns; where they are too many to read, every nth, and always the
// chosen one with room around it. `put(label, place)` draws one, so many pixels along the axis.
function drawAxis(pane, pen, size, chosen, put) {
  const every = Math.max(1, Math.ceil(LEGIBLE / pane.cell)), end = size * pane.cell - 6;
  labels(pane, size).forEach((label, place) => {
    const isChosen = place === chosen;
    if (!isChosen && (place % every || Math.abs(place - chosen) < every)) return;
    pen.font = `${isChosen ? '600 ' : ''}${Math.max(10, Math.min(14, pane.cell - 2))}px ${variable('--mono')}`;
    pen.fillStyle = variable(isChosen ? '--ink' : '--muted');
    put(label, Math.max(6, Math.min(end, (place + 0.5) * pane.cell))); // so that the outermost are not cut
  });
}

function drawLabels(pane) {
  const { rows, columns } = pane.picture, gutter = pane.gutter;
  const side = sized(pane.rows, gutter, pane.cell * rows);
  Object.assign(side, { textAlign: 'right', textBaseline: 'middle' });
  // The last argument of fillText is the width into which a longer label is pressed.
  drawAxis(pane, side, rows, view.row, (label, y) => side.fillText(label, gutter - 6, y, gutter - 8));
  const top = sized(pane.columns, pane.cell * columns, gutter);
  top.textBaseline = 'middle';
  drawAxis(pane, top, columns, view.column, (label, x) => { // written upwards
    top.save();
    top.translate(x, gutter - 6);
    top.rotate(-Math.PI / 2);
    top.fillText(label, 0, 0, gutter - 8);
    top.restore();
  });
}

// --- Moving through the map ---

// [row, column] of the cell under the pointer.
function cellAt(pane, event) {
  const box = pane.map.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top].map((pixels) => Math.floor(pixels / pane.cell));
  return [y, x];
}

// When the arrow keys move to a cell outside the frame, scroll just enough to see it beside the sticky labels.
export function revealCell(pane) {
  if (!pane.picture) return;
  const { frame, cell, gutter } = pane, x = view.column * cell, y = view.row * cell;
  // How far from the edge of the frame a cell may lie at most, in pixels, and still be seen whole.
  const wide = frame.clientWidth - gutter - cell - 8, tall = frame.clientHeight - gutter - cell - 8;
  frame.scrollLeft = Math.min(x, Math.max(frame.scrollLeft, x - wide));
  frame.scrollTop = Math.min(y, Math.max(frame.scrollTop, y - tall));
}

function walkMap(pane, event, choose) {
  const step = arrowOf(event);
  if (!step) return;
  event.preventDefault();
  event.stopPropagation(); // in the dialog around it the same arrows go to the next head
  choose(view.row + step[0], view.column + step[1]);
  revealCell(pane);
}
