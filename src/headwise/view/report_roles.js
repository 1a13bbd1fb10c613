// --- The roles: a card each, those that heads have earned first; a card filters ---

import { byId, element, say, svg, told } from './page/base.js';
import { toggleRole } from './report_filter.js';
import { badge } from './report_grid.js';
import { columnName } from './report_head.js';
import { count, data, figure, heads, quoted, view } from './report_state.js';

const STRIP = { width: 320, height: 26, margin: 6 };

export function makeRoles() {
  byId('roles').hidden = !data.roles.length;
  const earners = data.roles.map((_, role) => heads.filter((head) => head.roles.includes(role)).length);
  const order = data.roles.map((_, role) => role).sort((a, b) => (earners[a] === 0) - (earners[b] === 0));
  byId('cards').replaceChildren(...order.map((role) => makeCard(role, earners[role])));
  const without = heads.filter((head) => !head.roles.length).length;
  const key = without === heads.length ? 'report.roles_none' : without ? 'report.roles_rest' : 'report.roles_all';
  byId('roles-how').textContent = [say('report.roles_how'), data.has_untrained ? say('report.roles_untrained') : '',
    say(key, { without, all: count(heads.length) })].filter(Boolean).join(' ');
}

function makeCard(role, earners) {
  const { meaning, source } = data.roles[role], card = element('li', earners ? 'role' : 'role unearned');
  const button = element('button', 'choose');
  button.type = 'button';
  button.dataset.role = role;
  button.setAttribute('aria-pressed', String(view.roles.has(role)));
  button.append(badge(role), element('span', 'count', earners ? say('report.n_heads', { count: earners }) : say('report.no_head')));
  button.addEventListener('click', () => toggleRole(button));
  const words = told(meaning).replace(/`([^`]+)`/g, (_, token) => quoted(token));
  card.append(button, element('p', 'meaning', `${words[0].toUpperCase()}${words.slice(1)}.`), strip(role),
    element('p', 'rule', `${rule(role)} ${say('report.rule_source', { source: told(source) })}`));
  return card;
}

function columnOf(score) { return data.columns.findIndex((column) => column.key === score); }

// The score, the threshold and the controls in words.
function rule(role) {
  const { score, threshold } = data.roles[role], at = columnOf(score), even = evenOf(at);
  const column = data.columns[at] ?? { label: score, key: score, decimals: 3 }; // the table may lack the score
  const parts = [say('report.rule', { score: columnName(column), threshold })];
  if (even.length) {
    const [low, high] = [Math.min(...even), Math.max(...even)].map((value) => figure(value, column));
    parts.push(low === high ? say('report.rule_even', { value: low }) : say('report.rule_evens', { low, high }));
  }
  if (at >= 0 && data.untrained[at] !== null) parts.push(say('report.rule_untrained', { value: figure(data.untrained[at], column) }));
  return `${parts.join('; ')}.`;
}

function evenOf(at) { return at < 0 ? [] : heads.map((head) => head.uniform[at]).filter((value) => value !== null && value !== undefined); }

// Every head's score as a stroke on one axis, from 0 (or below, where scores are) to 1 (or above).
function strip(role) {
  const { score, threshold, kind } = data.roles[role], at = columnOf(score), { width, height, margin } = STRIP;
  const measured = at < 0 ? [] : heads.filter((head) => head.values[at]);
  const known = measured.map((head) => [head.values[at][0], head.roles.includes(role)]); // [score, has it the role?]
  if (!known.length) return '';
  const low = Math.min(0, ...known.map(([mean]) => mean)), high = Math.max(1, threshold, ...known.map(([mean]) => mean));
  const x = (value) => {
    const part = (Math.min(high, Math.max(low, value)) - low) / (high - low); // what lies beyond stands at the end
    return (margin + (width - 2 * margin) * part).toFixed(1);
  };
  const strokes = (has, top, tall) => known.filter((pair) => pair[1] === has).map(([mean]) => `M${x(mean)} ${top}v${tall}`).join('');
  const drawing = svg('svg', { class: 'strip', viewBox: `0 0 ${width} ${height}`, 'aria-hidden': 'true' });
  drawing.append(svg('line', { class: 'axis', x1: margin, x2: width - margin, y1: 15, y2: 15 }),
    svg('path', { class: 'others', d: strokes(false, 8, 7) }), svg('path', { class: `earners r${kind}`, d: strokes(true, 4, 11) }),
    svg('line', { class: 'limit', x1: x(threshold), x2: x(threshold), y1: 1, y2: 18 }));
  const even = evenOf(at), marks = { even: even.length ? Math.max(...even) : null, untrained: data.untrained[at] };
  for (const [mark, value] of Object.entries(marks)) {
    if (value !== null && value !== undefined) drawing.append(svg('path', { class: mark, d: `M${x(value)} 17l4 7h-8z` }));
  }
  return drawing;
}
