'use strict';

const LEVELS = 65535; // a stored weight is a whole number of this many parts
const FRAME_MS = 12; // time given to drawing small pictures before the page may answer again
const SMALLEST_CELL = 4, LARGEST_CELL = 34, LEGIBLE = 13; // sizes in the enlarged map, in CSS pixels

const data = JSON.parse(byId('data').textContent);
const count = data.tokens.length;
const stored = new Map(); // head number -> its unpacked weights, made when first needed
const view = { hideFirst: false, open: -1, row: 0, column: 0, ramp: [], pixels: null, cell: 0, gutter: 0, block: 1,
  opener: null, drawing: 0 };

function byId(id) { return document.getElementById(id); }

// The weights of one head as whole numbers, row by row; the file keeps base64, little-endian, two bytes a weight.
function weightsOf(number) {
  if (stored.has(number)) return stored.get(number);
  const bytes = atob(data.heads[number].weights);
  const full = new Uint16Array(count * count);
  for (let row = 0, at = 0; row < count; row++) {
    // A causal map is stored without the zeros above its diagonal.
    const width = data.causal ? row + 1 : count;
    for (let column = 0; column < width; column++, at += 2) {
      full[row * count + column] = bytes.charCodeAt(at) | (bytes.charCodeAt(at + 1) << 8);
    }
  }
  stored.set(number, full);
  return full;
}

function firstColumn() { return view.hideFirst ? 1 : 0; }

// What the last colour stands for: 1, or with the first column hidden the largest weight that is left.
function scaleOf(number) {
  if (!view.hideFirst) return LEVELS;
  const weights = weightsOf(number);
  let largest = 0;
  for (let at = 0; at < weights.length; at++) if (at % count && weights[at] > largest) largest = weights[at];
  return largest || LEVELS;
}

// --- Colours ---

function fromHex(text) {
  const value = parseInt(text.trim().slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

// 256 colours between the four of the style sheet, mixed as they are coded, which is close to even for the eye.
function buildRamp() {
  const style = getComputedStyle(document.documentElement);
  const stops = [0, 1, 2, 3].map((stop) => fromHex(style.getPropertyValue('--ramp-' + stop)));
  view.ramp = Array.from({ length: 256 }, (_, step) => {
    const place = (step / 255) * 3, low = Math.min(2, Math.floor(place));
    return stops[low].map((c, i) => Math.round(c + (stops[low + 1][i] - c) * (place - low)));
  });
  // The same as whole pixels, laid out as a picture has them in memory.
  view.pixels = new Uint32Array(new Uint8ClampedArray(view.ramp.flatMap((colour) => [...colour, 255])).buffer);
}

function levelOf(weight, scale) { return Math.min(255, Math.round((255 * weight) / scale)); }

function colourOf(weight, scale) { return view.ramp[levelOf(weight, scale)]; }

// Black or white, whichever stands out more from the colour (relative luminance as contrast rules define it).
function inkOn(colour) {
  const [r, g, b] = colour.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? '#000' : '#fff';
}

function variable(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function drawLegends() {
  for (const canvas of document.querySelectorAll('canvas.ramp')) {
    const image = new ImageData(256, 1);
    view.ramp.forEach((colour, step) => image.data.set([...colour, 255], 4 * step));
    canvas.getContext('2d').putImageData(image, 0, 0);
  }
}

// --- Numbers and words ---

function inWords(weight) {
  const value = weight / LEVELS;
  return value > 0 && value < 0.0005 ? 'under 0.001' : value.toFixed(3);
}

// First strong isolates keep a right-to-left token from turning the words and numbers around it.
function quoted(token) { return '‘\u2068' + data.tokens[token] + '\u2069’'; }

function wordsForCell() {
  const weight = weightsOf(view.open)[view.row * count + view.column];
  const [from, to] = [view.row, view.column].map((token) => `token ${token} ${quoted(token)}`);
  return `${from} looks at ${to}: ${inWords(weight)}`;
}

// --- The grid of small pictures ---

// A map at one pixel a block of cells. A block shows its largest weight, so that a thin line does not get lost.
function paintMap(canvas, number, block) {
  const weights = weightsOf(number), scale = scaleOf(number), first = firstColumn();
  const wide = Math.ceil((count - first) / block), tall = Math.ceil(count / block);
  const largest = new Uint16Array(wide * tall);
  for (let row = 0; row < count; row++) {
    for (let column = first; column < count; column++) {
      const at = Math.floor(row / block) * wide + Math.floor((column - first) / block);
      largest[at] = Math.max(largest[at], weights[row * count + column]);
    }
  }
  canvas.width = wide;
  canvas.height = tall;
  const image = new ImageData(wide, tall), pixels = new Uint32Array(image.data.buffer);
  largest.forEach((weight, at) => { pixels[at] = view.pixels[levelOf(weight, scale)]; });
  canvas.getContext('2d').putImageData(image, 0, 0);
}

// How many cells share a dot, so that a small picture has no more dots than the screen gives it.
function blockThatFits() {
  const room = byId('grid').querySelector('canvas').clientWidth * Math.max(1, window.devicePixelRatio || 1);
  return Math.max(1, Math.ceil(count / Math.max(32, room)));
}

// What the colours and the dots of the small pictures stand for, wherever that is not plain 0 to 1.
function sayScale() {
  const hidden = 'Without the first token’s column. Each picture is coloured from 0 to its own largest weight ' +
    'that is left, the “max” below it. ';
  const size = `${view.block} × ${view.block}`;
  const blocks = `In the small pictures a dot is a block of ${size} tokens, shown by its largest weight.`;
  byId('legend-end').textContent = view.hideFirst ? 'its largest' : '1';
  byId('scale-note').textContent = (view.hideFirst ? hidden : '') + (view.block > 1 ? blocks : '');
}

function resized() {
  if (blockThatFits() !== view.block) drawGrid();
  if (view.open >= 0) showHead();
}

function distinct(values) { return [...new Set(values)].sort((a, b) => a - b); }

function makeGrid() {
  const heads = distinct(data.heads.map((head) => head.head)), layers = distinct(data.heads.map((head) => head.layer));
  byId('grid').style.gridTemplateColumns = `repeat(${heads.length}, minmax(4.3rem, 9.5rem))`;
  data.heads.forEach((head, number) => {
    const button = document.createElement('button');
    button.type = 'button';
    button.className = 'head';
    button.dataset.number = number;
    button.setAttribute('aria-haspopup', 'dialog');
    button.setAttribute('aria-label', `${head.name}, enlarge`);
    button.style.gridArea = `${layers.indexOf(head.layer) + 1} / ${heads.indexOf(head.head) + 1}`;
    const canvas = document.createElement('canvas');
    const name = document.createElement('span'), largest = document.createElement('span');
    name.textContent = head.name;
    largest.className = 'largest';
    button.append(canvas, name, largest);
    button.addEventListener('click', () => openHead(number, button));
    byId('grid').append(button);
  });
}

// Draw the small pictures a few at a time; a later call replaces one that is still under way.
function drawGrid() {
  const turn = ++view.drawing, buttons = [...byId('grid').children];
  byId('main').dataset.drawn = '0';
  view.block = blockThatFits();
  sayScale();
  const some = (number) => {
    if (turn !== view.drawing) return;
    const until = performance.now() + FRAME_MS;
    while (number < buttons.length && performance.now() < until) {
      paintMap(buttons[number].querySelector('canvas'), number, view.block);
      buttons[number].querySelector('.largest').textContent = view.hideFirst ? 'max ' + inWords(scaleOf(number)) : '';
      number++;
    }
    byId('main').dataset.drawn = String(number);
    if (number < buttons.length) setTimeout(some, 0, number);
  };
  some(0);
}

// The arrow keys walk over the grid, so that 144 heads need not be tabbed through.
function walkGrid(event) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  const here = event.target.closest('.head');
  if (!step || !here || event.altKey || event.ctrlKey || event.metaKey) return;
  const row = Number(here.style.gridRowStart) + step[0], column = Number(here.style.gridColumnStart) + step[1];
  const there = [...byId('grid').children].find(
    (button) => Number(button.style.gridRowStart) === row && Number(button.style.gridColumnStart) === column);
  event.preventDefault();
  if (there) there.focus();
}

// --- One head, enlarged ---

function openHead(number, opener) {
  view.opener = opener;
  view.open = number;
  view.row = count - 1;
  view.column = strongest(view.row)[0] ?? 0;
  byId('large').showModal();
  byId('large-title').focus();
  showHead();
  revealCell();
}

function showHead() {
  const end = view.hideFirst ? inWords(scaleOf(view.open)) + ', the largest weight left' : '1';
  byId('large-title').textContent = data.heads[view.open].name;
  byId('large-end').textContent = end;
  layOut();
  paintMap(enlarged, view.open, 1);
  showCell();
}

const enlarged = document.createElement('canvas'); // the open head at one pixel a cell, scaled up when drawn

function showCell() {
  drawMap();
  drawLabels();
  byId('readout').textContent = wordsForCell();
  showRow();
}

function stepHead(by) {
  view.open = (view.open + by + data.heads.length) % data.heads.length;
  showHead();
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

function labelFont(strong) {
  const size = Math.max(10, Math.min(13, view.cell - 2));
  return `${strong ? '600 ' : ''}${size}px ${variable('--mono')}`;
}

// At most twelve characters of a token; whole code points, so that an emoji is not cut in half.
function label(token) {
  const characters = [...data.tokens[token]];
  return characters.length > 12 ? characters.slice(0, 11).join('') + '…' : characters.join('');
}

function gutterWidth() {
  const pen = byId('rows').getContext('2d');
  pen.font = `600 13px ${variable('--mono')}`;
  const widest = Math.max(...data.tokens.map((_, token) => pen.measureText(label(token)).width));
  return Math.ceil(Math.min(window.innerWidth < 600 ? 84 : 110, Math.max(24, widest + 10)));
}

// Choose the cell so that the map fits the frame; where it would become too small, the frame scrolls instead.
function layOut() {
  const columns = count - firstColumn(), gutter = gutterWidth();
  const wide = (byId('frame').parentElement.clientWidth - gutter - 8) / columns;
  const tall = (window.innerHeight * 0.8 - gutter - 8) / count;
  const fitting = Math.floor(Math.min(wide, Math.max(tall, LEGIBLE)));
  view.cell = Math.max(SMALLEST_CELL, Math.min(LARGEST_CELL, fitting));
  view.gutter = gutter;
  byId('frame').style.gridTemplateColumns = `${gutter}px ${view.cell * columns}px`;
}

function drawMap() {
  const first = firstColumn(), cell = view.cell, width = cell * (count - first), height = cell * count;
  const pen = sized(byId('map'), width, height);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(enlarged, 0, 0, width, height);
  const x = (view.column - first) * cell, y = view.row * cell;
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
function drawAxis(pen, first, chosen, put) {
  const every = Math.max(1, Math.ceil(LEGIBLE / view.cell));
  for (let token = first; token < count; token++) {
    const own = token === chosen;
    if (!own && ((token - first) % every || Math.abs(token - chosen) < every)) continue;
    pen.font = labelFont(own);
    pen.fillStyle = variable(own ? '--ink' : '--muted');
    const end = (count - first) * view.cell - 6; // half a line, so that the outermost labels are not cut
    put(label(token), Math.max(6, Math.min(end, (token - first + 0.5) * view.cell)));
  }
}

function drawLabels() {
  const first = firstColumn(), columns = count - first, gutter = view.gutter;
  const side = sized(byId('rows'), gutter, view.cell * count);
  side.textAlign = 'right';
  side.textBaseline = 'middle';
  drawAxis(side, 0, view.row, (text, y) => side.fillText(text, gutter - 6, y, gutter - 8));
  const top = sized(byId('columns'), view.cell * columns, gutter);
  top.textBaseline = 'middle';
  drawAxis(top, first, view.column, (text, x) => {
    top.save();
    top.translate(x, gutter - 6);
    top.rotate(-Math.PI / 2);
    top.fillText(text, 0, 0, gutter - 8);
    top.restore();
  });
}

// The tokens a row looks at, strongest first, without those that get nothing.
function strongest(row) {
  const weights = weightsOf(view.open), columns = [];
  for (let column = firstColumn(); column < count; column++) if (weights[row * count + column]) columns.push(column);
  return columns.sort((a, b) => weights[row * count + b] - weights[row * count + a]);
}

// The chosen row as the sentence itself, each token shaded by the weight it gets.
function showRow() {
  const weights = weightsOf(view.open), scale = scaleOf(view.open), first = firstColumn();
  byId('row-title').textContent = `Where token ${view.row} ${quoted(view.row)} looks`;
  byId('row-text').replaceChildren(...data.tokens.map((token, column) => {
    const word = document.createElement('bdi'), weight = weights[view.row * count + column];
    word.textContent = token;
    word.title = `token ${column}: ${inWords(weight)}`;
    word.classList.toggle('looking', column === view.row);
    word.classList.toggle('left-out', column < first);
    if (column >= first) {
      const colour = colourOf(weight, scale);
      word.style.backgroundColor = `rgb(${colour})`;
      word.style.color = inkOn(colour);
    }
    return word;
  }));
  const panel = byId('row-text'), chosen = panel.children[view.column]; // a long text scrolls inside its panel
  panel.scrollTop = chosen.offsetTop - panel.offsetTop - panel.clientHeight / 2;
  const best = strongest(view.row).slice(0, 3).map((at) => `${quoted(at)} ${inWords(weights[view.row * count + at])}`);
  byId('row-most').textContent = best.length ? 'Most to ' + best.join(', ') : 'This row looks at nothing shown.';
}

function choose(row, column) {
  const inside = (value, low) => Math.min(count - 1, Math.max(low, value));
  const next = [inside(row, 0), inside(column, firstColumn())];
  if (next[0] === view.row && next[1] === view.column) return;
  [view.row, view.column] = next;
  showCell();
}

function pointAt(event) {
  const box = byId('map').getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top].map((pixels) => Math.floor(pixels / view.cell));
  choose(y, x + firstColumn());
}

// When the arrow keys move to a cell outside the frame, scroll just enough to see it beside the sticky labels.
function revealCell() {
  const frame = byId('frame'), x = (view.column - firstColumn()) * view.cell, y = view.row * view.cell;
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

// --- The whole page ---

function setHideFirst(hide) {
  view.hideFirst = hide;
  for (const box of document.querySelectorAll('.hide-first')) box.checked = hide;
  drawGrid();
  if (view.open < 0) return;
  view.column = Math.max(view.column, firstColumn());
  showHead();
}

function recolour() {
  buildRamp();
  drawLegends();
  drawGrid();
  if (view.open >= 0) showHead();
}

function listen() {
  const dialog = byId('large');
  byId('grid').addEventListener('keydown', walkGrid);
  byId('previous').addEventListener('click', () => stepHead(-1));
  byId('next').addEventListener('click', () => stepHead(1));
  byId('close').addEventListener('click', () => dialog.close());
  dialog.addEventListener('close', closed);
  dialog.addEventListener('keydown', keysInDialog);
  dialog.addEventListener('click', (event) => { if (event.target === dialog) dialog.close(); });
  byId('map').addEventListener('pointermove', (event) => { if (event.pointerType === 'mouse') pointAt(event); });
  byId('map').addEventListener('click', pointAt);
  for (const box of document.querySelectorAll('.hide-first')) {
    box.disabled = count < 2; // the first column is then the only one
    box.addEventListener('change', () => setHideFirst(box.checked));
  }
  window.addEventListener('resize', resized);
  window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', recolour);
}

byId('heads').hidden = false;
makeGrid();
listen();
recolour();
