// --- The model, where it is in the page ---
//
// A small model of ours lies in the file and is run by page/model.js. Here is what the report asks of it.

import { readData, say } from './page/base.js';
import { forward, offer, readModel } from './page/model.js';
import { count } from './report_state.js';

const modelBlock = readData('model'); // null where nobody asked for one; `reason` says why there is none
export const model = modelBlock && !modelBlock.reason ? readModel(modelBlock) : null;
if (model) offer(model);

export function hasModel() { return model !== null; }

// Why there is no model to run, in words; empty where there is one.
export function modelMissing() {
  if (model) return '';
  const { reason, part, parameters = 0, most = 0 } = modelBlock ?? { reason: 'none' };
  return say(`report.no_model_${reason}`, { part, parameters: count(parameters), most: count(most) });
}

// The model's answer to token numbers, where some heads give a factor of what they would.
export function think(ids, changes = new Map()) { return forward(model, ids, { scale: Object.fromEntries(changes) }); }

// The tokens as a reader sees them, by id.
export function vocabulary() { return model.tokens.shown; }

// A text as it is typed, one token longer.
export function longer(text, id) {
  if (id === model.tokens.boundary) return text; // the sign that begins a text is not written
  // Are tokens words between spaces? Then one is put between, while tokens of other models bring their spaces along.
  const areWords = JSON.stringify(model.tokens.layout.pre_tokenizer).includes('WhitespaceSplit');
  const gap = areWords && text && !/\s$/.test(text) ? ' ' : '';
  return text + gap + vocabulary()[id];
}

// Signs for what cannot be seen, as in view/terminal.py.
const SIGNS = { ' ': '␣', '\n': '⏎', '\t': '⇥', '\r': '␍', '': '∅' };

// A token with signs in place of what cannot be seen. Characters of these classes (control, format, lone surrogates,
// line, paragraph and space separators) that have no sign become <U+00AD>.
export function visible(token) {
  if (token in SIGNS) return SIGNS[token]; // also '', which the replacement would not meet
  return token.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}\p{Zs}]/gu, (sign) => SIGNS[sign] ??
    // The joiner U+200D stays, since it holds the parts of an emoji together.
    (sign === '\u200d' ? sign : `<U+${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, '0')}>`));
}
