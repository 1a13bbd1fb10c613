// --- Vectors as strips of colour; every cell can say which numbers it came from ---
//
// A cell is called `ROW:COLUMN`, such as `q:0`; the cell behind the numbers of a row, such as their sum, `ROW:tail`.

import { byId, element, emit, makeButton, putWords, readData, scoped, visible, walkable } from './base.js';
import { dot, readModel } from './model.js';

// What is shown now.
export const walk = {
  model: readModel(readData('model')),
  layer: 0, head: 0, at: 0, // the head that is walked through, and the token that asks
  step: 0, // place in STEPS
  numbers: false, // does each cell of a table show its number?
  timer: 0, // of the walk that plays by itself; 0 while it stands
  ids: [], pieces: [], run: null, // the text's tokens, and what the model makes of them, as model.js has them
};

// A piece of `inputOf` as it is written, with signs for spaces and the like.
export function written({ known, id, text }) { return visible(known ? walk.model.tokens.shown[id] : text); }

// Goes on with another head, at the same step and token.
export function chooseHead(layer, head) { Object.assign(walk, { layer, head }); emit('head'); }

// Round choices: what fits on a screen without scrolling.
export const MOST_KEYS = 12; // keys that are shown, those with the largest weights
export const MOST_FEATURES = 16; // features of a head's output that are followed through W_O, the largest
const FEW = 16; // numbers of a vector up to which its cells are large

// Of the step that is shown: a cell's name -> where its number came from, () => ({key, values, cells}), that is the
// key of a phrase, the values in it, and the names of the cells that it speaks of.
export const origins = new Map();

// A table of vectors, one a row: {id, label, values}, and maybe a `token` behind the label, `origin(i)`, where number i
// came from, a `tail` {value, origin}, one number more, a `bar`, one or two parts of 1; a `strong` row stands out.
// `columns` and `tail` are headings; with `figures` cells have numbers and no colour, whatever the reader chose.
export function stripTable(title, rows, { columns = null, tail = '', figures = false } = {}) {
  const names = columns ?? (walk.numbers ? Array.from(rows[0].values, (_, i) => String(i)) : []);
  const top = largest(rows.map((row) => row.values)); // one scale of colours for the whole table
  const decimals = decimalsFor(rows.flatMap((row) => [...row.values, ...(row.tail ? [row.tail.value] : [])]));
  const lines = rows.map((row, place) => stripRow(row, place, { top, decimals, figures, tail }));
  // The empty cell stands above the labels of the rows.
  const headings = [...names, tail].filter(Boolean).map((name) => scoped('col', name));
  const head = names.length ? element('thead', '', element('tr', '', element('td'), ...headings)) : '';
  const table = element('table', 'strips', head, element('tbody', '', ...lines));
  table.classList.toggle('numbers', figures || walk.numbers);
  table.classList.toggle('few', rows[0].values.length <= FEW); // all rows are of one length
  Object.assign(table, { role: 'grid', ariaLabel: title });
  listenToCells(table, lines.map((line) => [...line.querySelectorAll('.cell')]));
  return element('div', 'frame', table);
}

// The largest size of a number, which has the last colour. It is never 0, since sizes are divided by it.
function largest(vectors) { return Math.max(...vectors.flatMap((values) => Array.from(values, Math.abs)), 1e-30); }

// A vector as a row: its label, a cell for each number, the tail, and the bar.
function stripRow(row, place, { top, decimals, figures, tail }) {
  const token = row.token === undefined ? [] : [' ', element('bdi', '', row.token)];
  const line = element('tr', row.strong ? 'strong arriving' : 'arriving', scoped('row', row.label, ...token));
  // The rows arrive one after the other, those from the 20th on together.
  line.style.animationDelay = `${Math.min(place, 20) * 90}ms`;
  line.append(...Array.from(row.values, (value, i) => {
    const cell = cellOf(`${row.id}:${i}`, value, decimals, row.origin && (() => row.origin(i)));
    if (!figures) shade(cell, value, top);
    return cell;
  }));
  if (tail) { // every row has a cell there, empty where the row has no tail
    const cell = row.tail ? cellOf(`${row.id}:tail`, row.tail.value, decimals, row.tail.origin) : element('td');
    cell.classList.add('tail');
    line.append(cell);
  }
  if (row.bar !== undefined) line.append(barOf(row.bar));
  return line;
}

// A cell with a number; `origin`, where there is one, says where it came from.
function cellOf(id, value, decimals, origin) {
  const cell = element('td', 'cell', shown(value, decimals));
  cell.dataset.cell = id;
  cell.dataset.number = shown(value, Math.max(4, decimals)); // for the line below the tables, which has room for more
  cell.tabIndex = -1; // `listenToCells` gives one cell of each table its stop for Tab
  if (origin) origins.set(id, origin);
  return cell;
}

// The style sheet mixes the colour of the sign (--side) with the neutral one, by the size of the number (--share).
function shade(cell, value, top) {
  cell.classList.add('shaded');
  cell.style.setProperty('--side', value < 0 ? 'var(--below-2)' : 'var(--above-2)');
  cell.style.setProperty('--share', String(Math.abs(value) / top));
  // A reader who sees colours alone: the number stays for those who hear the page.
  if (!walk.numbers) cell.replaceChildren(element('span', 'unseen', cell.textContent));
}

// A bar for each part of 1; the number beside it says the same, so a screen reader skips it.
function barOf(parts) {
  const cell = element('td', 'bar-cell', ...[parts].flat().map((part, place) => { // a list of one number, too
    const bar = element('div', place ? 'weight-bar second' : 'weight-bar');
    bar.style.width = `${100 * part}%`;
    return bar;
  }));
  cell.setAttribute('aria-hidden', 'true');
  return cell;
}

// The vectors of all heads side by side, as one, `name`. The slice of a head is labelled `q[4:8]`, as Python writes it;
// slices come in one after the other, and a click chooses a slice's head.
export function joinedSlices(title, name, parts, chosen) {
  const top = largest(parts), decimals = decimalsFor(parts.flatMap((values) => Array.from(values)));
  const slices = parts.map((values, h) => {
    const cells = Array.from(values, (value) => {
      const cell = element('span', 'cell');
      shade(cell, value, top);
      cell.textContent = walk.numbers ? shown(value, decimals) : '';
      return cell;
    });
    const slice = makeButton(h === chosen ? 'slice chosen' : 'slice', () => chooseHead(walk.layer, h),
      element('code', '', `${name}[${h * values.length}:${(h + 1) * values.length}]`),
      element('span', 'mini', ...cells), element('span', 'name', `H${h}`));
    slice.style.animationDelay = `${h * 350}ms`; // slow enough to be followed slice by slice
    slice.setAttribute('aria-pressed', String(h === chosen));
    return slice;
  });
  return Object.assign(element('div', 'slices', ...slices), { role: 'group', ariaLabel: title });
}

// --- Pointing ---

// Pointer, focus and arrow keys all tell of a cell.
function listenToCells(table, rows) {
  rows[0][0].tabIndex = 0;
  walkable(table, () => rows);
  table.addEventListener('pointerover', (event) => tellOf(event.target.closest('.cell')));
  table.addEventListener('click', (event) => event.target.closest('.cell')?.focus());
  // When the pointer leaves, the readout goes back to the cell that has the focus; to the hint where none has it.
  table.addEventListener('pointerleave', () => tellOf(document.activeElement?.closest?.('td.cell')));
  table.addEventListener('focusin', (event) => tellOf(event.target));
}

// Says where the number of a cell came from, and marks those numbers; without a cell there is a hint.
export function tellOf(cell) {
  for (const marked of document.querySelectorAll('.from, .pointed')) marked.classList.remove('from', 'pointed');
  const readout = byId('readout');
  readout.classList.toggle('speaking', Boolean(cell));
  if (!cell) return putWords(readout, walk.step === 7 ? 'walk.point_chances' : 'walk.point'); // 7: with, without
  cell.classList.add('pointed');
  const { key, values, cells = [] } = origins.get(cell.dataset.cell)?.() ?? {};
  if (key) putWords(readout, key, { result: cell.dataset.number, ...values });
  else readout.textContent = cell.dataset.number;
  for (const id of cells) { // two tables of a step may show the same cell
    for (const from of document.querySelectorAll(`[data-cell="${id}"]`)) from.classList.add('from');
  }
}

// --- Numbers ---

// As many decimals as show three digits of the largest number, at least 2 and at most 8: 12.345 -> 2, 0.0123 -> 4.
function decimalsFor(values) {
  const top = Math.max(...Array.from(values, Math.abs), 0); // 0 where there is no number
  return top > 0 ? Math.min(8, Math.max(2, Math.ceil(2 - Math.log10(top)))) : 2;
}

// A number as text; no zero has a sign, and a minus is U+2212.
export function shown(value, decimals = 4) {
  const text = value.toFixed(decimals);
  return (/[1-9]/.test(text) ? text : text.replace('-', '')).replace('-', '−');
}

export function lengthOf(vector) { return Math.sqrt(dot(vector, vector)); }
