// --- The table of all heads: sorted by any column, walked over with the arrow keys ---
//
// A row is a head, a column a statistic of `data.columns`. Before them stand the name, the roles, and a column that
// follows the sentence above the table.

import { byId, element, isShortcut, makeButton, on, say, scoped, shadeEdge, stopAt, walkable } from './base.js';
import { openHead } from './head.js';
import { looksOf } from './shown.js';
import { ROUNDS_TO_0, badge, columnName, cut, data, figure, heads, intervalIn, inWords, matches, quoted,
  view } from './state.js';

const NOW = 2; // place of the column that follows the sentence, behind name and roles
const table = byId('table'), frame = table.parentElement;
let rowsInOrder = []; // the rows in the order of `heads`, however they are sorted now
let sorted = []; // the headings by which rows can be sorted, in the order of the cells of a row

function makeTable() {
  const first = [['name', 'report.head'], ['roles', 'report.roles'], ['now', 'report.looks_now']]; // [sort, phrase]
  const top = element('tr', '', ...first.map(([sort, key]) => heading(sort, say(key), sort)),
    // 'extra' is the class of columns that the style sheet shows on demand.
    ...data.columns.map((column, at) => heading(at, columnName(column), column.main ? '' : 'extra')));
  rowsInOrder = heads.map(tableRow);
  table.replaceChildren(element('thead', '', top), element('tbody', '', ...rowsInOrder));
  table.setAttribute('role', 'grid');
  sorted = [...table.querySelectorAll('th[data-sort]')];
  byId('all-columns').parentElement.hidden = data.columns.every((column) => column.main);
}

// A heading whose button sorts the rows by 'name', 'roles', 'now', or the place of a statistic in `data.columns`.
function heading(sort, text, className) {
  const cell = scoped('col', makeButton('sort', () => sortBy(cell), text));
  cell.className = className;
  cell.dataset.sort = sort;
  cell.setAttribute('aria-sort', 'none');
  return cell;
}

// The row of a head.
function tableRow(head, number) {
  const name = Object.assign(scoped('row', head.name), { className: 'name' });
  const roles = element('td', 'roles', ...head.roles.flatMap((role) => [badge(role), ' ']));
  const row = element('tr', '', name, roles, element('td', 'now'), ...data.columns.map((column, at) =>
    element('td', column.main ? '' : 'extra', figure(head.values[at]?.[0], column))));
  row.dataset.number = number;
  for (const cell of row.cells) cell.tabIndex = -1; // one cell of the table is a stop for Tab: `stopAtFirstRow`
  return row;
}

// The column that follows the sentence: what each head looks at most from the token that is looked at.
function showNow() {
  if (!sorted.length) return;
  const button = sorted[NOW].firstChild;
  button.textContent = view.at < 0 ? say('report.looks_now')
    : say('report.looks_from', { token: quoted(cut(view.shown.tokens[view.at])) });
  rowsInOrder.forEach((row, number) => { row.cells[NOW].textContent = view.at < 0 ? '–' : strongestWords(number); });
}

// The key on which the head has most weight: its name, and whether it lies beyond the text that is shown.
function strongestLook(number) {
  const { inside, outside } = looksOf(number, view.at);
  let key = 0;
  inside.forEach((weight, at) => { if (weight > inside[key]) key = at; });
  const far = outside[0]; // they come strongest first
  if (!(far && far.weight > inside[key])) return { weight: inside[key] ?? 0, name: view.shown.tokens[key] };
  const name = heads[number].cross ? say('report.key', { key: far.key }) : data.tokens[far.key] ?? String(far.key);
  return { weight: far.weight, name, far: true };
}

// "write 0.970", and an arrow where it lies beyond the text; a dash where all weights would round to 0.000.
function strongestWords(number) {
  const { weight, name, far } = strongestLook(number);
  return weight < ROUNDS_TO_0 ? '–' : `${cut(name)} ${inWords(weight)}${far ? ' ↗' : ''}`;
}

// What a row is ordered by, the largest first; null for what is not there.
function sortKey(number, sort) {
  const head = heads[number];
  if (sort === 'name') return -number; // largest of the first head: the order of the model
  // More roles first; heads with as many by the place of their first role, of which there are less than a hundred.
  if (sort === 'roles') return head.roles.length ? 100 * head.roles.length - head.roles[0] : null;
  if (sort === 'now') return view.at < 0 ? null : strongestLook(number).weight;
  return head.values[sort]?.[0] ?? null;
}

// The largest first, then the other way round; a name first comes in the order of the model. What is missing is last.
function sortBy(cell) {
  const { sort } = cell.dataset, before = cell.getAttribute('aria-sort');
  // In the words of aria-sort, how a column is sorted at the first click and at the next.
  const [fresh, reversed] = sort === 'name' ? ['ascending', 'descending'] : ['descending', 'ascending'];
  const order = before === fresh ? reversed : fresh, sign = order === fresh ? 1 : -1;
  for (const other of sorted) other.setAttribute('aria-sort', 'none');
  cell.setAttribute('aria-sort', order);
  const keyed = rowsInOrder.map((row, number) => [row, sortKey(number, sort)]);
  const compare = (a, b) => ( // true - false is 1: null comes behind a number, whatever the sign
    a[1] === null || b[1] === null ? (a[1] === null) - (b[1] === null) : sign * (b[1] - a[1])
  );
  table.tBodies[0].append(...keyed.sort(compare).map(([row]) => row));
  stopAtFirstRow();
}

// --- By keyboard and by pointer ---

// Tab stops at one cell of the table: after sorting and filtering at the first cell of the first row that is left.
function stopAtFirstRow() {
  const first = [...table.tBodies[0].rows].find((row) => !row.hidden);
  stopAt(table.tBodies[0].querySelectorAll('[tabindex="0"]'), first?.cells[0]);
}

// Hides what the filter does not leave.
function filterRows() {
  for (const row of table.tBodies[0].rows) row.hidden = !matches(Number(row.dataset.number));
  stopAtFirstRow();
}

function cellOf(event) { return event.target.closest('tbody td, tbody th'); }

// Enter and the space bar enlarge the head of a row.
function openRow(event) {
  const opens = [undefined, 'Enter', ' '].includes(event.key); // a click has no key
  if (!cellOf(event) || isShortcut(event) || !opens) return;
  event.preventDefault();
  openHead(Number(cellOf(event).parentElement.dataset.number));
}

// The cells in sight, row by row: one that the style sheet hides has no offsetParent.
function cellsShown() {
  const isShown = (cell) => cell.offsetParent;
  return [...table.tBodies[0].rows].filter((row) => !row.hidden).map((row) => [...row.cells].filter(isShown));
}

// --- The note beside a cell: interval and controls ---

// Shows the note where there is one to say: on a statistic, and not on the name, the roles and the like.
function showTip(cell) {
  const row = cell?.parentElement, over = row && sorted[cell.cellIndex]; // the heading above the cell
  if (!over || !Number.isInteger(Number(over.dataset.sort))) return hideTip();
  const head = heads[row.dataset.number], at = Number(over.dataset.sort);
  const tip = byId('tip'), lines = tipLines(head, at).map((line) => element('span', '', line));
  tip.replaceChildren(element('b', '', `${head.name}, ${columnName(data.columns[at])}`), ...lines);
  tip.hidden = false; // first, for what is hidden has no size
  // Above the cell with its right edge on the cell's, 8 pixels inside the window; where there is no room, below.
  const box = cell.getBoundingClientRect(), size = tip.getBoundingClientRect(), above = box.top - size.height - 6;
  tip.style.left = `${Math.max(8, Math.min(innerWidth - size.width - 8, box.right - size.width))}px`;
  tip.style.top = `${above > 8 ? above : box.bottom + 6}px`;
}

// The lines of the note: the interval over documents, and the controls.
function tipLines(head, at) {
  const value = head.values[at], column = data.columns[at]; // an `Interval`: mean, low, high, number of documents
  if (!value) return [say('report.undefined')];
  const lines = [];
  if (value[3]) { // 0 of importance, whose interval nobody knows
    const documents = value[3] > 1 ? say('report.over_documents', { count: value[3] }) : '';
    lines.push(`${say('report.interval')}: ${intervalIn(value, column)}${documents}`);
  }
  if (head.uniform[at] !== null) lines.push(`${say('report.even_attention')}: ${figure(head.uniform[at], column)}`);
  if (data.untrained[at] !== null) lines.push(`${say('report.best_untrained')}: ${figure(data.untrained[at], column)}`);
  return lines.length ? lines : [say('report.no_interval')];
}

function hideTip() { byId('tip').hidden = true; }

walkable(table, cellsShown);
for (const name of ['keydown', 'click']) table.addEventListener(name, openRow);
for (const name of ['mouseover', 'focusin']) table.addEventListener(name, (event) => showTip(cellOf(event)));
for (const name of ['mouseleave', 'focusout']) table.addEventListener(name, hideTip);
frame.addEventListener('scroll', hideTip);
byId('all-columns').addEventListener('change', (event) => table.classList.toggle('all', event.target.checked));
document.addEventListener('keydown', (event) => { if (event.key === 'Escape') hideTip(); });
window.addEventListener('resize', hideTip);
shadeEdge(frame);
on('language', () => { makeTable(); showNow(); });
on('point', showNow);
on('large', hideTip);
on('filter language', filterRows);
