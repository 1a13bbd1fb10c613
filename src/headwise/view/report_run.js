// --- The training run of the model: facts, held-out loss against a baseline, the curve, samples ---
//
// The baseline is an n-gram model of the same text. Losses are in nats for each token; null where one was not finite.

import { byId, element, putWords, say, svg, told } from './page/base.js';
import { count, data, sayOr, scoped } from './report_state.js';

// Size and margins of the curve's drawing, in units of its view box;
// the margins hold the numbers and words of the axes.
const CURVE = { width: 640, height: 320, left: 78, right: 34, top: 14, bottom: 62 };

export function finite(value) { return value !== null && value !== undefined && Number.isFinite(value); }

export function loss(value) { return finite(value) ? value.toFixed(3) : '–'; }

// Fills in the section; it is hidden where the report knows of no training.
export function makeRun() {
  byId('run').hidden = !data.run;
  if (!data.run) return;
  const facts = data.run.facts.flatMap(([name, value]) => [
    element('dt', '', sayOr(`fact.${name.replaceAll(/\W+/g, '_')}`, name)), element('dd', '', told(value))]);
  byId('facts').replaceChildren(...facts);
  byId('losses').replaceChildren(...comparison(data.run));
  byId('curve').replaceChildren(...curveFigure(data.run));
  byId('samples').replaceChildren(...data.run.samples.map((sample) => {
    const item = element('li'), text = element('pre', '', sample);
    text.dir = 'auto';
    item.append(text);
    return item;
  }));
  byId('samples-title').hidden = !data.run.samples.length;
}

// The held-out loss and the baseline as two bars from zero on one scale, and the difference in words.
function comparison({ held_out_loss: heldOut, baseline_loss: baseline }) {
  const longest = Math.max(...[heldOut, baseline].filter(finite), 0) || 1; // the loss whose bar is whole; never 0
  const parts = [measure(say('report.this_model'), heldOut, longest, 'ours')];
  if (data.run.has_baseline) parts.push(measure(baselineName(), baseline, longest, 'theirs'));
  const verdict = element('p', 'verdict'), gain = baseline - heldOut;
  const key = !data.run.has_baseline ? 'report.no_baseline'
    : !finite(baseline) || !finite(heldOut) ? 'report.not_compared'
      : Math.abs(gain) < 0.0005 ? 'report.same_loss' // three decimals would show 0.000
        : gain > 0 ? 'report.better' : 'report.worse';
  putWords(verdict, key, { gain: Math.abs(gain).toFixed(3) });
  return [...parts, verdict, element('p', 'unit', say(data.run.has_baseline ? 'report.unit_both' : 'report.unit'))];
}

function baselineName() {
  return data.run.baseline_name
    ? say('report.baseline_named', { name: told(data.run.baseline_name) })
    : say('report.baseline');
}

// One of the two bars, with its name and its loss.
function measure(label, value, longest, kind) {
  const box = element('div', 'measure'), drawing = svg('svg', { 'aria-hidden': 'true' });
  const wide = finite(value) ? (100 * Math.max(0, value)) / longest : 0;
  drawing.append(svg('rect', { class: 'track', width: '100%', height: '100%' }));
  drawing.append(svg('rect', { class: kind, width: `${wide.toFixed(2)}%`, height: '100%' }));
  box.append(element('span', '', label), element('span', 'value', loss(value)), drawing);
  return box;
}

// The losses over the training: what each line stands for, the drawing, and the same as a table. `curve` has for each
// evaluation {step, train_loss, held_out_loss}.
function curveFigure({ curve, baseline_loss: baseline }) {
  if (!curve.length) return [];
  const points = [...curve].sort((a, b) => a.step - b.step), key = element('div', 'key');
  const lines = [['train', say('report.training')], ['held-out', say('report.held_out')]];
  if (finite(baseline)) lines.push(['baseline', baselineName()]);
  for (const [kind, name] of lines) {
    const item = element('span'), sign = svg('svg', { 'aria-hidden': 'true' });
    sign.append(svg('line', { class: kind, x1: 0, x2: '100%', y1: 2, y2: 2 }));
    item.append(sign, name);
    key.append(item);
  }
  return [key, curveDrawing(points, baseline), curveNumbers(points)];
}

// Both losses over the steps, the baseline as a line across, and axes with round numbers.
function curveDrawing(points, baseline) {
  const losses = points.flatMap((point) => [point.train_loss, point.held_out_loss]).filter(finite);
  if (!losses.length) return element('p', 'notice', say('report.no_curve'));
  const { width, height, left, right, top, bottom } = CURVE;
  const ends = [...losses, ...(finite(baseline) ? [baseline] : [])]; // all that the axis of losses has to reach
  const [first, last] = [points[0].step, points[points.length - 1].step];
  const ticks = roundSteps(Math.min(...ends), Math.max(...ends));
  const steps = roundSteps(first, last, true).filter((step) => step >= first && step <= last);
  const x = scaleOf(first, last, left, width - right);
  const y = scaleOf(ticks[0], ticks[ticks.length - 1], height - bottom, top); // a larger loss is higher up
  const drawing = svg('svg', {
    class: 'curve', viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': curveWords(points, baseline),
  });
  const label = (at, up, text, anchor, more = {}) => {
    const made = svg('text', { x: at.toFixed(1), y: up.toFixed(1), 'text-anchor': anchor, ...more });
    made.textContent = text;
    return made;
  };
  for (const tick of ticks) {
    drawing.append(svg('line', { class: 'grid-line', x1: left, x2: width - right, y1: y(tick), y2: y(tick) }));
    drawing.append(label(left - 8, y(tick) + 5, String(tick), 'end'));
  }
  drawing.append(...steps.map((step) => label(x(step), height - bottom + 24, count(step), 'middle')));
  drawing.append(label((left + width - right) / 2, height - 10, say('report.step'), 'middle'));
  const upright = { transform: `translate(18 ${((top + height - bottom) / 2).toFixed(0)}) rotate(-90)` };
  drawing.append(label(0, 0, say('report.loss_unit'), 'middle', upright));
  if (finite(baseline)) drawing.append(
    svg('line', { class: 'baseline', x1: left, x2: width - right, y1: y(baseline), y2: y(baseline) }),
  );
  for (const [kind, name] of [['train', 'train_loss'], ['held-out', 'held_out_loss']]) { // [class, field of a point]
    const corners = points
      .filter((point) => finite(point[name]))
      .map((point) => `${x(point.step).toFixed(1)} ${y(point[name]).toFixed(1)}`);
    // A path of one point shows as a dot only where it has a length.
    const d = `M${corners.join(' L')}${corners.length === 1 ? 'h0.1' : ''}`;
    if (corners.length) drawing.append(svg('path', { class: kind, d, 'stroke-linecap': 'round' }));
  }
  return drawing;
}

// The curve for those who do not see it: where both losses begin and end.
function curveWords(points, baseline) {
  const [first, last] = [points[0], points[points.length - 1]];
  const words = say('report.curve_words', {
    from: count(first.step), to: count(last.step),
    train: loss(first.train_loss), train_end: loss(last.train_loss),
    held: loss(first.held_out_loss), held_end: loss(last.held_out_loss),
  });
  return finite(baseline) ? `${words} ${say('report.curve_baseline', { value: loss(baseline) })}` : words;
}

// The losses as a table, which opens on demand.
function curveNumbers(points) {
  const details = element('details'), scroll = element('div', 'scroll'), list = element('table'), head = element('tr');
  scroll.tabIndex = 0; // so that it can be scrolled by keyboard
  scroll.setAttribute('role', 'region');
  scroll.setAttribute('aria-label', say('report.curve_numbers'));
  head.append(...['report.step', 'report.training', 'report.held_out'].map((key) => scoped('col', say(key))));
  list.append(head, ...points.map((point) => {
    const row = element('tr');
    row.append(...[count(point.step), loss(point.train_loss), loss(point.held_out_loss)]
      .map((text) => element('td', '', text)));
    return row;
  }));
  scroll.append(list);
  details.append(element('summary', '', say('report.curve_numbers')), scroll);
  return details;
}

// The straight map that takes low to start and high to stop; a range of no width goes to the middle.
function scaleOf(low, high, start, stop) {
  return high === low ? () => (start + stop) / 2 : (value) => start + ((value - low) / (high - low)) * (stop - start);
}

// About five round numbers, evenly spaced, the first at or below `low`, the last at or above `high`; with `whole`, as
// for steps of a training, they are at least 1 apart.
function roundSteps(low, high, whole = false) {
  // `low` and `high` may be the same, and both be 0. Five numbers are four steps apart; size: the power of ten at a
  // quarter of the span or below it.
  const span = high - low || Math.max(Math.abs(low), 1), size = 10 ** Math.floor(Math.log10(span / 4));
  const fits = (wide) => wide >= span / 4 && (!whole || Number.isInteger(wide));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * size).find(fits) ?? 1; // a span of few whole steps has none
  const first = Math.floor(low / step), last = Math.max(Math.ceil(high / step), first + 1);
  // Rounded to 10 digits, since 3 * 0.1 is 0.30000000000000004.
  return Array.from({ length: last - first + 1 }, (_, place) => Number(((first + place) * step).toPrecision(10)));
}
