// --- The roles: a card each, those that heads have earned first; a card filters ---

import { byId, element, emit, makeButton, on, say, svg, told } from './base.js';
import { badge, columnName, count, data, figure, heads, quoted, view } from './state.js';

// The drawing of a card: the axis is at height 15, strokes of heads end on it, triangles below it are controls.
const STRIP = { width: 320, height: 26, margin: 6 };

// The section: a card for each role, and a line on how many heads have none.
function makeRoles() {
  byId('roles').hidden = !data.roles.length;
  // Of each role, how many heads have it; true - false is 1: those without come last.
  const earners = data.roles.map((_, role) => heads.filter((head) => head.roles.includes(role)).length);
  const order = data.roles.map((_, role) => role).sort((a, b) => (earners[a] === 0) - (earners[b] === 0));
  byId('cards').replaceChildren(...order.map((role) => roleCard(role, earners[role])));
  const without = heads.filter((head) => !head.roles.length).length;
  const key = without === heads.length ? 'report.roles_none' : without ? 'report.roles_rest' : 'report.roles_all';
  byId('roles-how').textContent = [say('report.roles_how'), data.has_untrained ? say('report.roles_untrained') : '',
    say(key, { without, all: count(heads.length) })].filter(Boolean).join(' ');
}

// A card: the button that filters by the role, what the role means, the scores of all heads, and the rule.
function roleCard(role, earners) {
  const { meaning, source } = data.roles[role];
  const button = makeButton('choose', () => {
    if (!view.roles.delete(role)) view.roles.add(role); // `delete` says whether it was there
    emit('filter');
  }, badge(role), element('span', 'count', say(earners ? 'report.n_heads' : 'report.no_head', { count: earners })));
  button.dataset.role = role;
  button.setAttribute('aria-pressed', String(view.roles.has(role)));
  const words = told(meaning).replace(/`([^`]+)`/g, (_, token) => quoted(token)); // `token` -> ‘token’
  return element('li', earners ? 'role' : 'role unearned', button,
    element('p', 'meaning', `${words[0].toUpperCase()}${words.slice(1)}.`), strip(role),
    element('p', 'rule', `${rule(role)} ${say('report.rule_source', { source: told(source) })}`));
}

// Where the table has the statistic by which a role is earned.
function columnOf(score) { return data.columns.findIndex((column) => column.key === score); }

// The rule of a role in words: the score, the threshold, and the controls that a head has to be above, too.
function rule(role) {
  const { score, threshold } = data.roles[role], at = columnOf(score), even = evenOf(at), column = data.columns[at];
  const parts = [say('report.rule', { score: columnName(column), threshold })];
  if (even.length) { // heads differ in it where they have different masks, or other texts to look at
    const [low, high] = [Math.min(...even), Math.max(...even)].map((value) => figure(value, column));
    parts.push(`${say('report.even_attention')}: ${low === high ? low : say('report.from_to', { low, high })}`);
  }
  const untrained = data.untrained[at];
  if (untrained !== null) parts.push(`${say('report.best_untrained')}: ${figure(untrained, column)}`);
  return `${parts.join('; ')}.`;
}

// What even attention would have of a statistic, for each head of which it is known.
function evenOf(at) {
  return heads.map((head) => head.uniform[at]).filter(Number.isFinite);
}

// Every head's score as a stroke on one axis, the threshold as a line, the controls as triangles.
function strip(role) {
  const { score, threshold, kind } = data.roles[role], at = columnOf(score), { width, height, margin } = STRIP;
  const measured = heads.filter((head) => head.values[at]);
  const known = measured.map((head) => [head.values[at][0], head.roles.includes(role)]); // [score, has it the role?]
  const low = Math.min(0, ...known.map(([mean]) => mean));
  const high = Math.max(1, threshold, ...known.map(([mean]) => mean));
  const x = (value) => {
    const part = (Math.min(high, Math.max(low, value)) - low) / (high - low); // a control beyond stands at the end
    return (margin + (width - 2 * margin) * part).toFixed(1);
  };
  // One path for all heads with the role, which are taller, and one for all without.
  const strokes = (has, top, tall) =>
    known.filter((pair) => pair[1] === has).map(([mean]) => `M${x(mean)} ${top}v${tall}`).join('');
  const controls = [['even', Math.max(...evenOf(at))], ['untrained', data.untrained[at]]]; // -Infinity of none
  const marks = controls.filter(([, value]) => Number.isFinite(value))
    .map(([mark, value]) => svg('path', { class: mark, d: `M${x(value)} 17l4 7h-8z` })); // points up at the axis
  return svg('svg', { class: 'strip', viewBox: `0 0 ${width} ${height}`, 'aria-hidden': 'true' },
    svg('line', { class: 'axis', x1: margin, x2: width - margin, y1: 15, y2: 15 }),
    svg('path', { class: 'others', d: strokes(false, 8, 7) }),
    svg('path', { class: `earners r${kind}`, d: strokes(true, 4, 11) }),
    svg('line', { class: 'limit', x1: x(threshold), x2: x(threshold), y1: 1, y2: 18 }), ...marks);
}

function pressCards() {
  for (const button of document.querySelectorAll('.choose')) {
    button.setAttribute('aria-pressed', String(view.roles.has(Number(button.dataset.role))));
  }
}

on('language', makeRoles);
on('filter', pressCards);
