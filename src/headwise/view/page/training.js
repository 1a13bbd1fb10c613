// --- The training run of the model: facts, held-out loss against a baseline, the curve, samples; and its frames ---
//
// The baseline is an n-gram model of the same text. Losses are in nats for each token.

import { byId, bytesOf, element, grouped, on, readData, say, scoped, svg, told, visible, worded } from './base.js';
import { paint } from './colours.js';
import { count, data, quoted, sayOr } from './state.js';

// Size of the curve's drawing, and margins for the numbers and words of its axes.
const CURVE = { width: 640, height: 320, left: 78, right: 34, top: 14, bottom: 62 };

// Fills in the section; it is hidden where the report knows of no training.
function makeRun() {
  byId('run').hidden = !data.run;
  if (!data.run) return;
  byId('facts').replaceChildren(...data.run.facts.flatMap(([name, value]) => [
    element('dt', '', sayOr(`fact.${name.replaceAll(/\W+/g, '_')}`, name)), element('dd', '', grouped(told(value)))]));
  byId('losses').replaceChildren(...comparison(data.run));
  byId('curve').replaceChildren(...curveFigure(data.run));
  byId('samples').replaceChildren(...data.run.samples.map((sample) =>
    element('li', '', Object.assign(element('pre', '', sample), { dir: 'auto' }))));
  byId('samples-title').hidden = !data.run.samples.length;
}

// The held-out loss and the baseline as two bars from zero on one scale, and the difference in words.
function comparison({ held_out_loss: heldOut, baseline_loss: baseline }) {
  const longest = Math.max(heldOut, baseline), gain = baseline - heldOut; // the longest bar is whole
  return [measure(say('report.this_model'), heldOut, longest, 'ours'),
    measure(baselineName(), baseline, longest, 'theirs'),
    worded('p', 'verdict', gain > 0 ? 'report.better' : 'report.worse', { gain: Math.abs(gain).toFixed(3) }),
    worded('p', 'unit', 'report.unit'), data.verbs ? worded('p', 'unit', 'report.unit_verbs') : ''];
}

function baselineName() { return say('report.baseline', { name: data.run.baseline_name }); }

// One of the two bars, with its name and its loss.
function measure(label, value, longest, kind) {
  const drawing = svg('svg', { 'aria-hidden': 'true' }, svg('rect', { class: 'track', width: '100%', height: '100%' }),
    svg('rect', { class: kind, width: `${((100 * value) / longest).toFixed(2)}%`, height: '100%' }));
  return element('div', 'measure', element('span', '', label), element('span', 'value', value.toFixed(3)), drawing);
}

// The losses over the training: what each line stands for, the drawing, and the same as a table. `curve` has for each
// evaluation {step, train_loss, held_out_loss}.
function curveFigure({ curve: points, baseline_loss: baseline }) {
  const lines = [['train', say('report.training')], ['held-out', say('report.held_out')], ['baseline', baselineName()]];
  const key = lines.map(([kind, name]) => element('span', '',
    svg('svg', { 'aria-hidden': 'true' }, svg('line', { class: kind, x1: 0, x2: '100%', y1: 2, y2: 2 })), name));
  return [element('div', 'key', ...key), curveDrawing(points, baseline), curveNumbers(points)];
}

// Both losses over the steps, the baseline as a line across, and axes with round numbers.
function curveDrawing(points, baseline) {
  const { width, height, left, right, top, bottom } = CURVE;
  const losses = [baseline, ...points.flatMap((point) => [point.train_loss, point.held_out_loss])];
  const [first, last] = [points[0].step, points.at(-1).step];
  const ticks = roundSteps(Math.min(...losses), Math.max(...losses));
  const steps = roundSteps(first, last, true).filter((step) => step >= first && step <= last);
  const x = scaleOf(first, last, left, width - right);
  const y = scaleOf(ticks[0], ticks.at(-1), height - bottom, top); // a larger loss is higher up
  const label = (at, up, text, anchor = 'middle', more = {}) =>
    svg('text', { x: at.toFixed(1), y: up.toFixed(1), 'text-anchor': anchor, ...more }, text);
  const across = (name, value) => svg('line', { class: name, x1: left, x2: width - right, y1: y(value), y2: y(value) });
  const upright = { transform: `translate(18 ${((top + height - bottom) / 2).toFixed(0)}) rotate(-90)` };
  const path = (kind, name) => { // its class, and the field of a point
    const corners = points.map((point) => `${x(point.step).toFixed(1)} ${y(point[name]).toFixed(1)}`);
    // A path of one point shows as a dot only where it has a length.
    const d = `M${corners.join(' L')}${corners.length === 1 ? 'h0.1' : ''}`;
    return svg('path', { class: kind, d, 'stroke-linecap': 'round' });
  };
  return svg('svg', { class: 'curve', viewBox: `0 0 ${width} ${height}`, role: 'img',
    'aria-label': curveWords(points, baseline) },
    ...ticks.flatMap((tick) => [across('grid-line', tick), label(left - 8, y(tick) + 5, String(tick), 'end')]),
    ...steps.map((step) => label(x(step), height - bottom + 24, count(step))),
    label((left + width - right) / 2, height - 10, say('report.step')),
    label(0, 0, say('report.loss_unit'), 'middle', upright), across('baseline', baseline),
    path('train', 'train_loss'), path('held-out', 'held_out_loss'));
}

// The curve for those who do not see it: where both losses begin and end.
function curveWords(points, baseline) {
  const [first, last] = [points[0], points.at(-1)];
  return say('report.curve_words', { from: count(first.step), to: count(last.step),
    train: first.train_loss.toFixed(3), train_end: last.train_loss.toFixed(3),
    held: first.held_out_loss.toFixed(3), held_end: last.held_out_loss.toFixed(3), baseline: baseline.toFixed(3) });
}

// The losses as a table, which opens on demand.
function curveNumbers(points) {
  const title = say('report.curve_numbers');
  const names = ['report.step', 'report.training', 'report.held_out'].map((key) => scoped('col', say(key)));
  const scroll = element('div', 'scroll', element('table', '', element('tr', '', ...names),
    ...points.map(({ step, train_loss: train, held_out_loss: held }) => element('tr', '',
      ...[count(step), train.toFixed(3), held.toFixed(3)].map((text) => element('td', '', text))))));
  Object.assign(scroll, { tabIndex: 0, role: 'region', ariaLabel: title }); // 0: it can be scrolled by keyboard
  return element('details', '', element('summary', '', title), scroll);
}

// The straight map that takes low to start and high to stop; a range of no width goes to the middle.
function scaleOf(low, high, start, stop) {
  return high === low ? () => (start + stop) / 2 : (value) => start + ((value - low) / (high - low)) * (stop - start);
}

// About five round numbers from `low` or below to `high` or above; steps of a training (`whole`) are 1 apart at least.
function roundSteps(low, high, whole = false) {
  // `low` and `high` may be the same, and both be 0; size: the power of ten at a quarter of the span or below.
  const span = high - low || Math.max(Math.abs(low), 1), size = 10 ** Math.floor(Math.log10(span / 4));
  const fits = (wide) => wide >= span / 4 && (!whole || Number.isInteger(wide));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * size).find(fits) ?? 1; // a span of few whole steps has none
  const first = Math.floor(low / step), last = Math.max(Math.ceil(high / step), first + 1);
  // Rounded to 10 digits, since 3 * 0.1 is 0.30000000000000004.
  return Array.from({ length: last - first + 1 }, (_, place) => Number(((first + place) * step).toPrecision(10)));
}

// --- The frames: where the heads looked on one line, at some of the steps while the model trained ---
//
// film.json of a run folder (gpt/film.py) has frames {step, maps}; maps are bytes, 255 times each weight, head by head
// and row by row.

const film = readData('film-data');
let canvases = []; // of all heads

// One pixel a cell; above the diagonal, where a causal head sees nothing, it is transparent.
function drawFrame() {
  const slider = byId('film-at'), frame = film.frames[slider.value], size = film.tokens.length;
  byId('film-now').textContent = say('film.now', { step: count(frame.step), steps: count(film.steps) });
  slider.setAttribute('aria-valuetext', byId('film-now').textContent);
  frame.bytes ??= bytesOf(frame.maps); // unpacked once
  canvases.forEach((canvas, head) => {
    const levels = frame.bytes.subarray(head * size * size, (head + 1) * size * size);
    paint(canvas, { rows: size, columns: size, drawn: levels, top: 255 });
    const pen = canvas.getContext('2d');
    for (let row = 0; row < size; row++) pen.clearRect(row + 1, row, size, 1);
  });
}

// The weight under the pointer, in words below the pictures.
function sayCell(event, head) {
  const size = film.tokens.length, box = event.target.getBoundingClientRect();
  const inside = (part) => Math.min(size - 1, Math.max(0, Math.floor(part * size)));
  const row = inside((event.clientY - box.top) / box.height), column = inside((event.clientX - box.left) / box.width);
  const [from, to] = [row, column].map((place) => quoted(visible(film.tokens[place])));
  const value = (film.frames[byId('film-at').value].bytes[(head * size + row) * size + column] / 255).toFixed(2);
  byId('film-said').textContent = `${film.heads[head]}: ${say('report.looks_at', { from, n: 1, to, value })}`;
}

function makeFilm() {
  if (!film?.frames.length) return;
  const tokens = film.tokens.map(visible), slider = byId('film-at');
  byId('film-line').textContent = tokens.join(film.tokens.every((token) => token.length < 2) ? '' : ' ');
  const layers = new Set(film.heads.map((name) => name.split('.H')[0])).size; // "L0.H3" -> "L0"
  byId('film-heads').style.setProperty('--across', Math.min(8, Math.max(2, film.heads.length / layers)));
  canvases = film.heads.map((name) => Object.assign(element('canvas'), { role: 'img', ariaLabel: name }));
  canvases.forEach((canvas, head) => canvas.addEventListener('pointermove', (event) => sayCell(event, head)));
  byId('film-heads').replaceChildren(...film.heads.map((name, head) => Object.assign(
    element('figure', '', canvases[head], element('figcaption', '', name)), { role: 'listitem' })));
  byId('film').hidden = false;
  slider.max = String(film.frames.length - 1);
  slider.value = slider.max;
  slider.addEventListener('input', drawFrame);
  on('language switches', drawFrame);
  drawFrame();
}

makeFilm();
on('language', makeRun);
