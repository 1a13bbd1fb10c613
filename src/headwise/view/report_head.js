// --- One head, enlarged ---

const SMALLEST_CELL = 4, LARGEST_CELL = 52, LEGIBLE = 13; // in CSS pixels
const enlarged = element('canvas'); // the open head at one pixel a cell, scaled up when drawn

function openHead(number, opener) {
  hideTip();
  view.opener = opener;
  view.open = number;
  byId('large').showModal();
  byId('large-title').focus();
  beginHead();
  revealCell();
}

// Where the reader begins: a map at the strongest cell of its last row; a passage at what each token receives.
function beginHead() {
  const exact = usesExact(view.open), picture = exact ? prepared(exactOf(view.open)) : pictureOf(view.open);
  if (typeof picture !== 'string') {
    view.row = picture.rows - 1;
    view.column = strongest(picture, view.row);
  }
  view.token = exact ? view.row : -1;
  showHead();
}

function strongest(picture, row) {
  const own = picture.drawn.slice(row * picture.columns, (row + 1) * picture.columns).map(Math.abs);
  return own.indexOf(Math.max(...own));
}

function showHead() {
  const head = heads[view.open];
  byId('large-title').textContent = head.name;
  showRoles(head);
  byId('exact-switch').hidden = !hasExact(view.open) || view.which !== 'this' || !twoTexts;
  showNumbers(head);
  makeText();
  const picture = usesExact(view.open) ? prepared(exactOf(view.open)) : pictureOf(view.open);
  const missing = typeof picture === 'string';
  for (const part of [byId('frame'), byId('large').querySelector('.legend')]) part.hidden = missing;
  if (missing) {
    byId('readout').textContent = picture === 'not there'
      ? `${head.name} is not there in the other model.` : 'The two pictures have different sizes: no difference is drawn.';
  } else {
    showMap(picture);
  }
  showText();
}

function showRoles(head) {
  const own = head.roles.map((role) => {
    const sign = element('span', 'named-role');
    sign.append(badge(role), ' ' + data.roles[role]);
    return sign;
  });
  if (head.other) {
    const name = head.other.name === head.name ? '' : ` (${head.other.name})`;
    own.push(element('span', 'others-roles', `in the other model${name}: ${head.other.roles.join(', ') || 'no role'}`));
  }
  byId('large-roles').replaceChildren(...own);
}

// Is the short text of the exact maps another than the one the survey begins with?
const twoTexts = Boolean(data.maps) && data.maps.tokens.join('\n') !== data.tokens.join('\n');

function showMap(picture) {
  view.picture = picture;
  view.row = Math.min(view.row, picture.rows - 1);
  view.column = Math.min(view.column, picture.columns - 1);
  const end = picture.top === 1 && !picture.diverging ? '1' : inWords(picture.top);
  drawLegend(byId('large'), picture.diverging, end);
  paint(enlarged, picture);
  layOut();
  showCell();
}

function showCell() {
  drawMap();
  drawLabels();
  byId('readout').textContent = wordsForCell();
}

function stepHead(by) {
  const shown = heads.map((_, number) => number).filter((number) => number === view.open || matches(number));
  view.open = shown[(shown.indexOf(view.open) + by + shown.length) % shown.length];
  if (view.token >= 0 && !usesExact(view.open)) view.token = Math.min(view.token, data.passage - 1);
  showHead();
}

// Every number of the head beside its controls, and beside the other model's.
function showNumbers(head) {
  const compared = data.against !== null, other = head.other;
  const [own, theirs] = [head, other].map((one) => (at) => one?.values[at]?.[0] ?? null);
  const columns = [['value', (_, at) => [own(at)]]];
  if (compared) {
    columns.push(['other', (_, at) => [theirs(at)]]);
    columns.push(['difference', (_, at) => [own(at) === null || theirs(at) === null ? null : own(at) - theirs(at), true]]);
  }
  columns.push(['95 % interval', (column, at) => intervalIn(head.values[at], column)]);
  columns.push(['even', (_, at) => [head.uniform[at]]]);
  if (data.untrained.some((value) => value !== null)) columns.push(['untrained', (_, at) => [data.untrained[at]]]);
  const top = element('tr');
  top.append(element('td'), ...columns.map(([name]) => scoped('col', name)));
  const rows = data.columns.map((column, at) => {
    const row = element('tr');
    row.append(scoped('row', column.label), ...columns.map(([, cell]) => {
      const value = cell(column, at);
      return element('td', '', typeof value === 'string' ? value : figure(value[0], column, value[1] ?? column.signed));
    }));
    return row;
  });
  byId('numbers').replaceChildren(top, ...rows);
}

function scoped(scope, name) {
  const heading = element('th', '', name);
  heading.scope = scope;
  return heading;
}

// --- The map and its labels ---

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

function labelFont(strong) {
  const size = Math.max(10, Math.min(13, view.cell - 2));
  return `${strong ? '600 ' : ''}${size}px ${variable('--mono')}`;
}

function labels(count) { return Array.from({ length: count }, (_, block) => placeLabel(block, count)); }

// Choose the cell so that the map fits the frame; where it would become too small, the frame scrolls instead.
function layOut() {
  const { rows, columns } = view.picture, pen = byId('rows').getContext('2d');
  pen.font = `600 13px ${variable('--mono')}`;
  const widest = Math.max(...[...labels(rows), ...labels(columns)].map((label) => pen.measureText(label).width));
  view.gutter = Math.ceil(Math.min(window.innerWidth < 600 ? 84 : 110, Math.max(24, widest + 10)));
  const wide = (byId('frame').parentElement.clientWidth - view.gutter - 8) / columns;
  const tall = (window.innerHeight * 0.72 - view.gutter - 8) / rows;
  const fitting = Math.floor(Math.min(wide, Math.max(tall, LEGIBLE)));
  view.cell = Math.max(SMALLEST_CELL, Math.min(LARGEST_CELL, fitting));
  byId('frame').style.gridTemplateColumns = `${view.gutter}px ${view.cell * columns}px`;
}

function drawMap() {
  const { rows, columns } = view.picture, cell = view.cell, width = cell * columns, height = cell * rows;
  const pen = sized(byId('map'), width, height);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(enlarged, 0, 0, width, height);
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

// One line of labels along an axis. Too many to read: every nth, and always the chosen one with room around it.
function drawAxis(pen, count, chosen, put) {
  const every = Math.max(1, Math.ceil(LEGIBLE / view.cell)), end = count * view.cell - 6;
  labels(count).forEach((label, place) => {
    const own = place === chosen;
    if (!own && (place % every || Math.abs(place - chosen) < every)) return;
    pen.font = labelFont(own);
    pen.fillStyle = variable(own ? '--ink' : '--muted');
    put(label, Math.max(6, Math.min(end, (place + 0.5) * view.cell))); // so that the outermost are not cut
  });
}

function drawLabels() {
  const { rows, columns } = view.picture, gutter = view.gutter;
  const side = sized(byId('rows'), gutter, view.cell * rows);
  side.textAlign = 'right';
  side.textBaseline = 'middle';
  drawAxis(side, rows, view.row, (label, y) => side.fillText(label, gutter - 6, y, gutter - 8));
  const top = sized(byId('columns'), view.cell * columns, gutter);
  top.textBaseline = 'middle';
  drawAxis(top, columns, view.column, (label, x) => {
    top.save();
    top.translate(x, gutter - 6);
    top.rotate(-Math.PI / 2);
    top.fillText(label, 0, 0, gutter - 8);
    top.restore();
  });
}

// --- Moving through the map ---

function choose(row, column) {
  const inside = (value, count) => Math.min(count - 1, Math.max(0, value));
  const next = [inside(row, view.picture.rows), inside(column, view.picture.columns)];
  if (next[0] === view.row && next[1] === view.column) return;
  [view.row, view.column] = next;
  showCell();
  if (!usesExact(view.open)) return;
  view.token = view.row;
  showText();
  revealToken(view.column);
}

function pointAt(event) {
  const box = byId('map').getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top].map((pixels) => Math.floor(pixels / view.cell));
  choose(y, x);
}

// When the arrow keys move to a cell outside the frame, scroll just enough to see it beside the sticky labels.
function revealCell() {
  const frame = byId('frame'), x = view.column * view.cell, y = view.row * view.cell;
  const wide = frame.clientWidth - view.gutter - view.cell - 8, tall = frame.clientHeight - view.gutter - view.cell - 8;
  frame.scrollLeft = Math.min(x, Math.max(frame.scrollLeft, x - wide));
  frame.scrollTop = Math.min(y, Math.max(frame.scrollTop, y - tall));
}

function keysInDialog(event) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.target === byId('map')) {
    choose(view.row + step[0], view.column + step[1]);
    revealCell();
  } else if (words.includes(event.target) && step[1]) {
    walkText(event, step[1]);
  } else if (step[1]) {
    stepHead(step[1]);
  } else {
    return; // up and down scroll the sheet
  }
  event.preventDefault();
}

function closed() {
  view.open = -1;
  if (view.opener) view.opener.focus();
}
