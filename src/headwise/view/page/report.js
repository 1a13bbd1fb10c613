// --- The whole page of a report: its words, its switches, and how it begins ---

import { byId, element, emit, on, say, told } from './base.js';
import { hasModel } from './engine.js';
import { readAddress } from './address.js';
import { makeGrid } from './grid.js';
import './next.js';
import { showOwn, startOwn } from './own.js';
import './quest.js';
import { passage, sentence, showText } from './shown.js';
import { columnMeaning, columnName, count, data, heads, matches, sayOr, view } from './state.js';
import './roles.js';
import './table.js';
import './training.js';
import './whole.js';

// What was looked at, at the top of the page, and how it was measured, at its end.
function showTop() {
  const { family, n_heads, n_layers, n_documents, n_tokens, longest } = data.extent;
  const parts = [family, say('report.extent', { heads: n_heads, layers: n_layers })].filter(Boolean);
  byId('lede').textContent = `${parts.join(' · ')}${data.verbs ? `. ${say('report.purpose')}` : ''}`;
  const facts = [say('report.measured_on', { tokens: count(n_tokens), documents: n_documents })];
  if (n_documents > 1) facts.push(say('report.longest', { tokens: count(longest) }));
  if (data.texts.length) facts.push(say('report.text_from', { texts: data.texts.map(told).join(', ') }));
  if (Number.isFinite(data.loss)) facts.push(say('report.mean_loss', { loss: data.loss.toFixed(3) }));
  if (data.ablated !== null) facts.push(sayOr(`report.ablated_${data.ablated}`, data.ablated));
  byId('measured').textContent = facts.join(' ');
  byId('notes').hidden = !data.notes.length;
  byId('notes').replaceChildren(...data.notes.map((note) => element('li', '', told(note))));
  // The passage is offered beside the sentence where it shows more text.
  byId('text-choice').hidden = !sentence || !passage.tokens.length || data.tokens.length <= sentence.tokens.length;
  byId('meanings').replaceChildren(...data.columns.flatMap((column) => [
    element('dt', '', columnName(column)), element('dd', '', columnMeaning(column))]));
}

// --- The filter ---

function sayFilter() {
  const kept = heads.filter((_, number) => matches(number)).length;
  const all = kept === heads.length && !view.roles.size && !view.words.length;
  for (const place of document.querySelectorAll('.matches')) {
    place.textContent = all ? '' : say('report.matches', { count: count(kept), all: count(heads.length) });
  }
  byId('all-heads').hidden = all;
}

// Filters by the words that are typed.
function search() {
  view.words = byId('find').value.toLowerCase().split(/\s+/).filter(Boolean);
  emit('filter');
}

function showAll() {
  view.roles.clear();
  byId('find').value = '';
  search();
  byId('find').focus(); // the button that had the focus is hidden now
}

const radios = document.querySelectorAll('[name="text"]'); // the sentence, or the passage
byId('find').addEventListener('input', search);
byId('all-heads').addEventListener('click', showAll);
for (const radio of radios) {
  radio.addEventListener('change', () => (radio.value === 'passage' ? showText(passage) : showOwn()));
}
on('words language', () => {
  for (const radio of radios) radio.checked = (radio.value === 'passage') === (view.shown === passage);
  if (view.shown === passage && hasModel()) byId('own-trouble').textContent = say('report.passage_shown');
});
on('language', showTop);
on('filter language', sayFilter);

byId('heads').hidden = byId('look').hidden = false;
makeGrid();
// The token before the last: from there the last one is predicted.
if (sentence) view.at = Math.max(0, sentence.tokens.length - 2);
const asked = location.hash; // the opening sentence makes an address of its own
startOwn();
emit('language');
if (asked) history.replaceState(null, '', asked);
readAddress();
