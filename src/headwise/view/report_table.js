// --- Filter: which heads are looked at, in the grid and in the table ---

function matches(number) {
  const head = heads[number], text = `${head.name} ${roleWords(head)}`.toLowerCase();
  return (!view.roles.size || head.roles.some((role) => view.roles.has(role))) &&
    view.words.every((word) => text.includes(word));
}

function filterChanged() {
  const found = heads.map((_, number) => matches(number)), count = found.filter(Boolean).length;
  const all = count === heads.length && !view.roles.size && !view.words.length;
  for (const row of table.tBodies[0].rows) row.hidden = !found[row.dataset.number];
  pictures.forEach((button, number) => button.classList.toggle('faded', !found[number]));
  for (const place of document.querySelectorAll('.matches')) {
    place.textContent = all ? '' : `${count.toLocaleString('en-US')} of ${heads.length.toLocaleString('en-US')} heads`;
  }
  byId('all-heads').hidden = all;
  stopAtFirstRow();
}

function toggleRole(button) {
  const role = Number(button.dataset.role), on = !view.roles.has(role);
  if (on) view.roles.add(role);
  else view.roles.delete(role);
  button.setAttribute('aria-pressed', String(on));
  filterChanged();
}

function searchFor(text) {
  view.words = text.toLowerCase().split(/\s+/).filter(Boolean);
  filterChanged();
}

function showAll() {
  view.roles.clear();
  byId('find').value = '';
  for (const button of document.querySelectorAll('.choose')) button.setAttribute('aria-pressed', 'false');
  searchFor('');
  byId('find').focus(); // the button that had the focus is gone
}

// --- The table: sorted by any column, walked over with the arrow keys ---

const table = byId('table'), rowsInOrder = [...table.tBodies[0].rows];

function makeTable() {
  table.setAttribute('role', 'grid');
  for (const heading of table.querySelectorAll('th[data-sort]')) {
    const button = element('button', 'sort');
    button.type = 'button';
    button.append(...heading.childNodes);
    heading.append(button);
    heading.setAttribute('aria-sort', 'none');
    button.addEventListener('click', () => sortBy(heading));
  }
  for (const row of rowsInOrder) for (const cell of row.cells) cell.tabIndex = -1;
  byId('table').parentElement.removeAttribute('tabindex'); // its cells take the focus now
  stopAtFirstRow();
  byId('all-columns')?.parentElement.removeAttribute('hidden');
}

// What a row is ordered by: a number, or null for what is not there.
function sortKey(number, sort, part) {
  const head = heads[number];
  if (sort === 'name') return -number;
  if (sort === 'roles') return head.roles.length ? 100 * head.roles.length - head.roles[0] : null;
  const [own, other] = [head, head.other].map((one) => one?.values[sort]?.[0] ?? null);
  if (part === 'other') return other;
  if (part !== 'difference') return own;
  return own === null || other === null ? null : own - other;
}

// The largest first, then the other way round; a name first comes in the order of the model. What is missing is last.
function sortBy(heading) {
  const { sort, part } = heading.dataset, name = sort === 'name';
  const before = heading.getAttribute('aria-sort');
  const fresh = name ? 'ascending' : 'descending', turned = name ? 'descending' : 'ascending';
  const order = before === fresh ? turned : fresh, sign = order === fresh ? 1 : -1;
  for (const other of table.querySelectorAll('th[data-sort]')) other.setAttribute('aria-sort', 'none');
  heading.setAttribute('aria-sort', order);
  const keyed = rowsInOrder.map((row, number) => [row, sortKey(number, sort, part)]);
  const compare = (a, b) => (a[1] === null || b[1] === null ? (a[1] === null) - (b[1] === null) : sign * (b[1] - a[1]));
  table.tBodies[0].append(...keyed.sort(compare).map(([row]) => row));
  stopAtFirstRow();
}

function stopAtFirstRow() {
  const stop = table.tBodies[0].querySelector('[tabindex="0"]');
  if (stop) stop.tabIndex = -1;
  const first = [...table.tBodies[0].rows].find((row) => !row.hidden);
  if (first) first.cells[0].tabIndex = 0;
}

function focusCell(cell) {
  const stop = table.tBodies[0].querySelector('[tabindex="0"]');
  if (stop) stop.tabIndex = -1;
  cell.tabIndex = 0;
  cell.focus();
}

function walkTable(event) {
  const cell = event.target.closest('tbody th, tbody td');
  if (!cell || event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key === 'Enter' || event.key === ' ') {
    event.preventDefault();
    openHead(Number(cell.parentElement.dataset.number), cell);
    return;
  }
  const next = nextCell(cell, event.key);
  if (!next) return;
  event.preventDefault();
  focusCell(next);
}

function nextCell(cell, key) {
  const row = cell.parentElement, cells = [...row.cells].filter((one) => one.offsetParent);
  if (key === 'Home') return cells[0];
  if (key === 'End') return cells[cells.length - 1];
  if (key === 'ArrowLeft' || key === 'ArrowRight') return cells[cells.indexOf(cell) + (key === 'ArrowLeft' ? -1 : 1)];
  if (key !== 'ArrowUp' && key !== 'ArrowDown') return null;
  let next = row;
  do next = key === 'ArrowUp' ? next.previousElementSibling : next.nextElementSibling; while (next?.hidden);
  return next?.cells[cell.cellIndex];
}

// --- The note beside a cell: interval and controls ---

function showTip(cell) {
  const row = cell.closest('tbody tr'), heading = row && headingOf(cell);
  if (!heading || heading.dataset.part === 'difference' || !Number.isInteger(Number(heading.dataset.sort))) return hideTip();
  const head = heads[row.dataset.number], column = Number(heading.dataset.sort);
  const one = heading.dataset.part === 'other' ? head.other : head;
  const lines = tipLines(one, column);
  const tip = byId('tip');
  tip.replaceChildren(element('b', '', `${head.name}, ${data.columns[column].label}`),
    ...lines.map((line) => element('span', '', line)));
  tip.hidden = false;
  const box = cell.getBoundingClientRect(), own = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(innerWidth - own.width - 8, box.right - own.width))}px`;
  const above = box.top - own.height - 6;
  tip.style.top = `${above > 8 ? above : box.bottom + 6}px`;
  return undefined;
}

function tipLines(head, number) {
  const value = head?.values[number], column = data.columns[number];
  if (!value) return ['not defined here'];
  const lines = [];
  const documents = value[3] > 1 ? ` over ${value[3]} documents` : '';
  if (value[3]) lines.push(`95 % interval: ${intervalIn(value, column)}${documents}`);
  if (head.uniform[number] !== null) lines.push(`even attention: ${figure(head.uniform[number], column)}`);
  if (data.untrained[number] !== null) lines.push(`best untrained head: ${figure(data.untrained[number], column)}`);
  return lines.length ? lines : ['no interval'];
}

// Columns with a heading of their own stand in the same order as the cells of a row.
const sorted = [...table.querySelectorAll('th[data-sort]')];

function headingOf(cell) { return sorted[cell.cellIndex]; }

function hideTip() { byId('tip').hidden = true; }
