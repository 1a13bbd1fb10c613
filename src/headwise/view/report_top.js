// --- What was looked at, in words: the lines at the top of the page, and how it was measured, at its end ---

import { byId, element, say, told } from './page/base.js';
import { columnMeaning, columnName } from './report_head.js';
import { hasModel, modelMissing } from './report_model.js';
import { finite, loss } from './report_run.js';
import { passage, sentence } from './report_shown.js';
import { count, data, sayOr, setText } from './report_state.js';

export function showTop() {
  const { family, n_heads, n_layers, n_documents, n_tokens, longest } = data.extent;
  const parts = [family, say('report.extent', { heads: n_heads, layers: n_layers })].filter(Boolean);
  byId('lede').textContent = parts.join(' · ');
  const facts = [say('report.measured_on', { tokens: count(n_tokens), documents: n_documents })];
  if (n_documents > 1) facts.push(say('report.longest', { tokens: count(longest) }));
  if (data.texts.length) facts.push(say('report.text_from', { texts: data.texts.map(told).join(', ') }));
  if (finite(data.loss)) facts.push(say('report.mean_loss', { loss: loss(data.loss) }));
  if (data.ablated !== null) facts.push(sayOr(`report.ablated_${data.ablated}`, data.ablated));
  byId('measured').textContent = facts.join(' ');
  byId('notes').hidden = !data.notes.length;
  byId('notes').replaceChildren(...data.notes.map((note) => element('li', '', told(note))));
  // The passage is offered beside the sentence where it shows more text.
  byId('text-choice').hidden = !sentence || !passage.tokens.length || data.tokens.length <= sentence.tokens.length;
  byId('no-model').textContent = modelMissing();
  byId('no-model').hidden = hasModel();
  byId('question').hidden = !hasModel();
  byId('meanings').replaceChildren(...data.columns.flatMap((column) => [
    element('dt', '', columnName(column)), element('dd', '', columnMeaning(column))]));
}

// The button that leads to a question about the heads and, once it is asked, to the answer.
export function sayQuestion(asked) {
  setText('question', asked ? 'report.question_answer' : `report.question_${data.question}`, {});
}
