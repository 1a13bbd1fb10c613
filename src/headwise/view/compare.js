// --- Comparisons and claims: the tables as they were printed, and plots of every seed and every difference ---
//
// The record is one comparison of arms, or the ledger: all claims, with the tables and comparisons that decide them
// (`page_html` of view/lab.py). What was measured is in English; headings and badges follow the reader's language.

import { PHRASES, byId, element, language, readData, setWord, shadeEdge, svg, worded } from './page/base.js';

// The verdict on a claim -> the class of its badge, which is also the key of its phrase.
const BADGES = { holds: 'holds', 'does not hold': 'fails', depends: 'depends', 'not run here': 'elsewhere' };
const PLOT = { width: 440, left: 176, right: 18, top: 6, row: 30, bottom: 26 }; // in units of the view box
const LONGEST = 21; // characters of an arm's name that fit at its left

function list(lines) {
  const made = element('ul');
  made.append(...lines.map((line) => element('li', '', line)));
  return made;
}

// A table as a list of elements: heading, a frame that scrolls, and the note below where there is one.
function table({ title, columns, rows, note }) {
  const frame = element('div', 'scroll'), made = element('table');
  frame.tabIndex = 0; // so that it can be scrolled by keyboard
  const heading = (text, scope) => Object.assign(element('th', '', text), { scope });
  made.createTHead().insertRow().append(...columns.map((column) => heading(column, 'col')));
  const body = made.createTBody();
  for (const [first, ...cells] of rows) { // the first cell of a row is its heading
    body.insertRow().append(heading(first, 'row'), ...cells.map((cell) => element('td', '', cell)));
  }
  frame.append(made);
  shadeEdge(frame);
  return [element('h3', '', title), frame, ...(note ? [element('p', 'caption', note)] : [])];
}

function claim({ claim: text, measured, verdict, rule }) {
  const made = element('article', 'claim'), kind = BADGES[verdict];
  made.append(worded('p', `badge ${kind}`, `compare.${kind}`), element('h3', '', text));
  made.append(element('p', '', measured), element('p', 'caption', rule));
  return made;
}

// --- The plots: a line for each arm ---

// At most seven round numbers, evenly spaced, from `low` or below to `high` or above; at least two.
function roundTicks(low, high) {
  // `low` and `high` may be the same, and both be 0. power: the power of ten at `span` or below it.
  const span = high - low || Math.abs(low) || 1, power = 10 ** Math.floor(Math.log10(span));
  // The smallest of these of which five or fewer cover the span; one at each end may come on top.
  const step = [power / 5, power / 2, power, 2 * power].find((size) => span <= 5 * size);
  const first = Math.floor(low / step), last = Math.max(Math.ceil(high / step), first + 1);
  // Rounded to 12 digits, since 3 * 0.1 is 0.30000000000000004.
  return Array.from({ length: last - first + 1 }, (_, n) => Number(((first + n) * step).toPrecision(12)));
}

// The ticks that have a number: all, or every other one where they would run into one another; 0 keeps its own.
function numbered(ticks) {
  const longest = Math.max(...ticks.map((tick) => String(tick).length));
  // 28 characters fit across a plot with room between them. `indexOf` is -1 where there is no tick at 0; then the
  // first keeps its own.
  return ticks.length * longest <= 28 ? ticks : ticks.filter((_, n) => n % 2 === Math.max(0, ticks.indexOf(0)) % 2);
}

// A figure with a line for each arm, as a list of one element; an empty list where a number is missing. `values` are
// all numbers that are drawn, for the axis. `marks(arm, x, y)` gives the elements of an arm: x is the function from a
// value to its place, y the height of the arm's line. `words` are for those who do not see it; `zero` sets 0 apart.
function plot(arms, caption, words, values, marks, zero) {
  if (!values.length || values.includes(null)) return [];
  const { width, left, right, top, row } = PLOT, bottom = top + row * arms.length;
  const ticks = roundTicks(Math.min(...values), Math.max(...values));
  const low = ticks[0], high = ticks[ticks.length - 1];
  const x = (value) => left + (value - low) / (high - low) * (width - left - right);
  const box = { class: 'plot', viewBox: `0 0 ${width} ${bottom + PLOT.bottom}`, role: 'img', 'aria-label': words };
  const drawing = svg('svg', box), figure = element('figure');
  for (const tick of ticks) drawing.append(
    line(zero && tick === 0 ? 'zero' : 'grid-line', x(tick), top, x(tick), bottom),
  );
  for (const tick of numbered(ticks)) {
    drawing.append(svg('text', { class: 'tick', x: x(tick), y: bottom + 18, 'text-anchor': 'middle' }, String(tick)));
  }
  arms.forEach((arm, place) => {
    const y = top + row * (place + 0.5), name = [...arm.name]; // its characters; an emoji is one
    const text = name.length > LONGEST ? `${name.slice(0, LONGEST - 1).join('')}…` : arm.name;
    drawing.append(svg('text', { class: 'arm', x: left - 12, y: y + 4.5, 'text-anchor': 'end' }, text));
    drawing.append(...marks(arm, x, y));
  });
  figure.append(drawing, element('figcaption', '', caption));
  return [figure];
}

function line(kind, x1, y1, x2, y2) { return svg('line', { class: kind, x1, y1, x2, y2 }); }

// Two plots of one metric: the value of every seed with the mean of each arm, and each arm's difference from the
// first with its 95 % interval.
function plots(comparison, { name, words, table: { title } }) {
  // An arm whose training diverged has no score; the first arm has no difference.
  const scored = comparison.arms.filter((arm) => arm.scores[name]), score = (arm) => arm.scores[name];
  const compared = scored.filter((arm) => score(arm).difference), made = element('div', 'plots');
  const seeds = (arm, x, y) => !score(arm) ? [] : [
    ...score(arm).values.map((value) => svg('circle', { class: 'seed', cx: x(value), cy: y, r: 3.5 })),
    line('mean', x(score(arm).mean.mean), y - 9, x(score(arm).mean.mean), y + 9),
  ];
  const interval = (arm, x, y) => !score(arm)?.difference ? [] : [
    line('reach', x(score(arm).difference.low), y, x(score(arm).difference.high), y),
    svg('circle', { class: 'middle', cx: x(score(arm).difference.mean), cy: y, r: 5 }),
  ];
  // `score(arm).mean` is an interval; its mean is null where it is not finite.
  const means = scored.map((arm) => `${arm.name} ${score(arm).mean.mean?.toFixed(3)}`).join('; ');
  const verdicts = compared.map((arm) => score(arm).verdict).join('. ');
  const ends = compared.flatMap((arm) => [score(arm).difference.low, score(arm).difference.high, 0]); // 0 is in sight
  const values = scored.flatMap((arm) => score(arm).values);
  made.append(...plot(comparison.arms, title, `${words}: ${means}`, values, seeds, false));
  made.append(...plot(comparison.arms, 'difference from the first arm', verdicts, ends, interval, true));
  return made;
}

// --- The sections, and the links to them ---

// A section, and its entry in the list of contents. `title` is the key of a phrase, or a question of the record.
function addSection(title, parts) {
  const section = element('section'), heading = element('h2'), body = element('div');
  const item = element('li'), link = element('a');
  section.id = `part-${byId('links').children.length + 1}`;
  heading.id = `${section.id}-title`;
  section.setAttribute('aria-labelledby', heading.id);
  link.href = `#${section.id}`;
  for (const target of [heading, link]) {
    if (title in PHRASES[language()]) setWord(target, title);
    else target.textContent = title;
  }
  body.lang = 'en'; // whatever the page's language is
  body.append(...parts);
  section.append(heading, body);
  item.append(link);
  byId('links').append(item);
  byId('sections').append(section);
}

// The sections of a comparison: heading -> elements.
function partsOf(comparison) {
  return {
    'compare.verdict': [list(comparison.verdicts), ...comparison.notes.map((note) => element('p', '', note))],
    'compare.arms': comparison.metrics.flatMap((metric) => [...table(metric.table), plots(comparison, metric)]),
  };
}

const { claims, tables, comparisons, facts } = readData('record'); // one comparison comes without the others
if (claims) { // the ledger: a comparison is one section, and its parts lose their headings
  addSection('compare.claims', claims.map(claim));
  addSection('compare.counted', tables.flatMap(table));
  for (const comparison of comparisons) {
    const about = element('p');
    about.append(element('b', '', comparison.name), `: ${comparison.setting}`);
    addSection(comparison.question, [about, ...Object.values(partsOf(comparison)).flat()]);
  }
  addSection('compare.machine', [list(Object.entries(facts).map(([name, value]) => `${name}: ${value}`))]);
} else {
  for (const [title, parts] of Object.entries(partsOf(comparisons[0]))) if (parts.length) addSection(title, parts);
}
