// --- Filter: which heads are looked at, in the grid and in the table ---
//
// The reader chooses roles by their cards, of which a head must have one, and types words, all of which must stand in
// its name or in the names of its roles.

import { byId, say } from './page/base.js';
import { boxes, roleWords } from './report_grid.js';
import { count, heads, view } from './report_state.js';
import { stopAtFirstRow, table } from './report_table.js';

// Does the filter leave this head?
export function matches(number) {
  const head = heads[number], text = `${head.name} ${roleWords(head)}`.toLowerCase();
  return (!view.roles.size || head.roles.some((role) => view.roles.has(role))) &&
    view.words.every((word) => text.includes(word));
}

// Fades and hides what the filter does not leave, and says how many heads are left.
export function filterChanged() {
  const left = heads.map((_, number) => matches(number)), kept = left.filter(Boolean).length;
  const all = kept === heads.length && !view.roles.size && !view.words.length;
  for (const row of table.tBodies[0].rows) row.hidden = !left[row.dataset.number];
  boxes.forEach((box, number) => box.classList.toggle('faded', !left[number])); // the grid keeps its places
  for (const place of document.querySelectorAll('.matches')) {
    place.textContent = all ? '' : say('report.matches', { count: count(kept), all: count(heads.length) });
  }
  byId('all-heads').hidden = all;
  stopAtFirstRow();
}

// Chooses the role of a card, or lets it go.
export function toggleRole(button) {
  const role = Number(button.dataset.role);
  if (!view.roles.delete(role)) view.roles.add(role); // `delete` says whether it was there
  button.setAttribute('aria-pressed', String(view.roles.has(role)));
  filterChanged();
}

// Filters by the words that are typed.
export function searchFor(text) {
  view.words = text.toLowerCase().split(/\s+/).filter(Boolean);
  filterChanged();
}

// Takes the filter away.
export function showAll() {
  view.roles.clear();
  byId('find').value = '';
  for (const button of document.querySelectorAll('.choose')) button.setAttribute('aria-pressed', 'false');
  searchFor('');
  byId('find').focus(); // the button that had the focus is hidden now
}
