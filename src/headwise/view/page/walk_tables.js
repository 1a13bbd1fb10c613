// --- Vectors as strips of colour; every cell can say which numbers it came from ---

import { byId, element, putWords } from './base.js';
import { dot } from './model.js';
import { chooseHead, walk } from './walk.js';

export const MOST_KEYS = 12; // keys that are shown; the others stand as one line
export const MOST_FEATURES = 16; // rows of W_O's block that are shown
const FEW = 16; // numbers of a vector up to which its cells are large

export const origins = new Map(); // cell -> () => ({key, values, cells}): the sentence, and the cells it speaks of

/**
 * A table of vectors.
 * @param {string} title
 * @param {Object[]} rows  {id, label, token, values, origin(i), tail: {value, origin}, bar, strong}
 * @param {Object} [options]  `columns` names the cells, `tail` the last one; with `figures` the numbers stand in the
 *   cells whatever the reader chose
 * @returns {HTMLElement}
 */
export function stripTable(title, rows, { columns = null, tail = '', figures = false } = {}) {
  const frame = element('div', 'frame'), table = element('table', figures || walk.numbers ? 'strips numbers' : 'strips');
  table.classList.toggle('few', rows[0].values.length <= FEW);
  table.setAttribute('role', 'grid');
  table.setAttribute('aria-label', title);
  const names = columns ?? (walk.numbers ? Array.from(rows[0].values, (_, i) => String(i)) : null);
  if (names) table.append(headLine([...names, ...(tail ? [tail] : [])]));
  const top = largest(rows.map((row) => row.values));
  const decimals = decimalsFor(rows.flatMap((row) => [...row.values, ...(row.tail ? [row.tail.value] : [])]));
  const body = table.createTBody();
  rows.forEach((row, place) => body.append(stripRow(row, place, { top, decimals, figures, tail })));
  listenToCells(table);
  frame.append(table);
  return frame;
}

// The largest size of a number, which has the last colour; something where all are 0, for shares are made of it.
function largest(vectors) { return Math.max(...vectors.flatMap((values) => Array.from(values, Math.abs)), 1e-30); }

function headLine(names) {
  const line = element('tr'), head = element('thead');
  line.append(element('td'), ...names.map((name) => Object.assign(element('th', '', name), { scope: 'col' })));
  head.append(line);
  return head;
}

function stripRow(row, place, { top, decimals, figures, tail }) {
  const line = element('tr', row.strong ? 'strong arriving' : 'arriving'), label = element('th', '', row.label);
  line.style.animationDelay = `${Math.min(place, 20) * 90}ms`; // the rows arrive one after the other, the last ones together
  label.scope = 'row';
  if (row.token !== undefined) label.append(' ', element('bdi', '', row.token));
  line.append(label);
  row.values.forEach((value, i) => {
    const cell = cellOf(`${row.id}:${i}`, value, decimals, row.origin && (() => row.origin(i)));
    if (!figures) shade(cell, value, top);
    line.append(cell);
  });
  if (tail) {
    const cell = row.tail ? cellOf(`${row.id}:tail`, row.tail.value, decimals, row.tail.origin) : element('td');
    if (row.tail) cell.textContent = shown(row.tail.value, decimals);
    cell.classList.add('tail');
    line.append(cell);
  }
  if (row.bar !== undefined) line.append(barOf(row.bar));
  return line;
}

function cellOf(id, value, decimals, origin) {
  const cell = element('td', 'cell');
  cell.dataset.cell = id;
  cell.dataset.number = shown(value, Math.max(4, decimals));
  cell.tabIndex = -1;
  cell.textContent = shown(value, decimals);
  if (origin) origins.set(id, origin);
  return cell;
}

function shade(cell, value, top) {
  cell.classList.add('shaded');
  cell.style.setProperty('--side', value < 0 ? 'var(--below-2)' : 'var(--above-2)');
  cell.style.setProperty('--share', String(Math.abs(value) / top));
  if (!walk.numbers) cell.replaceChildren(element('span', 'unseen', cell.textContent));
}

// One bar, or two to compare; each a share of 1.
function barOf(shares) {
  const cell = element('td', 'bar-cell');
  cell.setAttribute('aria-hidden', 'true');
  cell.append(...[shares].flat().map((share, place) => {
    const bar = element('div', place ? 'weight-bar second' : 'weight-bar');
    bar.style.width = `${100 * share}%`;
    return bar;
  }));
  return cell;
}

/**
 * The vectors of all heads side by side, as one: slice h is `name[4:8]`, and fills when its turn comes.
 * @param {string} title
 * @param {string} name
 * @param {Float32Array[]} parts  one for each head
 * @param {number} chosen  a head
 * @returns {HTMLElement}
 */
export function joinedSlices(title, name, parts, chosen) {
  const group = element('div', 'slices'), top = largest(parts);
  const decimals = decimalsFor(parts.flatMap((values) => Array.from(values)));
  group.setAttribute('role', 'group');
  group.setAttribute('aria-label', title);
  parts.forEach((values, h) => {
    const slice = element('button', h === chosen ? 'slice chosen' : 'slice'), strip = element('span', 'mini');
    slice.type = 'button';
    slice.style.animationDelay = `${h * 350}ms`;
    slice.setAttribute('aria-pressed', String(h === chosen));
    for (const value of values) {
      const cell = element('span', 'cell');
      shade(cell, value, top);
      cell.textContent = walk.numbers ? shown(value, decimals) : '';
      strip.append(cell);
    }
    const width = values.length;
    slice.append(element('code', '', `${name}[${h * width}:${(h + 1) * width}]`), strip, element('span', 'name', `H${h}`));
    slice.addEventListener('click', () => chooseHead(walk.layer, h));
    group.append(slice);
  });
  return group;
}

// --- Pointing ---

function listenToCells(table) {
  const cells = [...table.querySelectorAll('.cell')];
  if (!cells.length) return;
  cells[0].tabIndex = 0;
  table.addEventListener('pointerover', (event) => tellOf(event.target.closest('.cell')));
  table.addEventListener('click', (event) => event.target.closest('.cell')?.focus());
  table.addEventListener('pointerleave', () => tellOf(document.activeElement?.closest?.('td.cell')));
  table.addEventListener('focusin', (event) => {
    const cell = event.target.closest('.cell');
    for (const other of cells) other.tabIndex = other === cell ? 0 : -1;
    tellOf(cell);
  });
  table.addEventListener('keydown', walkCells);
}

function walkCells(event) {
  const cell = event.target.closest('.cell'), line = cell?.parentElement;
  const column = cell && [...line.querySelectorAll('.cell')].indexOf(cell);
  const beside = { ArrowLeft: [line, column - 1], ArrowRight: [line, column + 1],
    ArrowUp: [line?.previousElementSibling, column], ArrowDown: [line?.nextElementSibling, column] }[event.key];
  if (!beside) return;
  event.preventDefault();
  event.stopPropagation();
  const cells = beside[0] ? [...beside[0].querySelectorAll('.cell')] : [];
  cells[Math.min(beside[1], beside[0] === line ? Infinity : cells.length - 1)]?.focus();
}

/**
 * Says where a number came from, and marks the numbers it came from.
 * @param {HTMLElement|null} cell
 */
export function tellOf(cell) {
  for (const marked of document.querySelectorAll('.from, .pointed')) marked.classList.remove('from', 'pointed');
  const readout = byId('readout');
  readout.classList.toggle('speaking', Boolean(cell));
  if (!cell) return putWords(readout, walk.step ? 'walk.point' : 'walk.point_text');
  cell.classList.add('pointed');
  const origin = origins.get(cell.dataset.cell)?.();
  if (!origin) readout.textContent = cell.dataset.number;
  else {
    putWords(readout, origin.key, { result: cell.dataset.number, ...origin.values });
    for (const id of origin.cells) {
      for (const from of document.querySelectorAll(`[data-cell="${id}"]`)) from.classList.add('from');
    }
  }
}

// --- Numbers ---

// As many decimals as show three digits of the largest, at least 2 and at most 8.
function decimalsFor(values) {
  const top = Math.max(...Array.from(values, Math.abs), 0);
  return top > 0 ? Math.min(8, Math.max(2, Math.ceil(2 - Math.log10(top)))) : 2;
}

/**
 * A number without the sign of a zero, and with a minus in place of a hyphen.
 * @param {number} value
 * @param {number} [decimals]
 * @returns {string}
 */
export function shown(value, decimals = 4) {
  const text = value.toFixed(decimals);
  return (/[1-9]/.test(text) ? text : text.replace('-', '')).replace('-', '−');
}

/**
 * @param {Float32Array} vector
 * @returns {number}
 */
export function lengthOf(vector) { return Math.sqrt(dot(vector, vector)); }
