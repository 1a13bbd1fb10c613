// --- The model, where it is in the page: the one place that speaks with it ---

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

export function vocabulary() { return model.tokens.shown; }

// A text as it is typed, one token longer.
export function longer(text, id) {
  if (id === model.tokens.boundary) return text;
  const areWords = JSON.stringify(model.tokens.layout.pre_tokenizer).includes('WhitespaceSplit');
  const gap = areWords && text && !/\s$/.test(text) ? ' ' : '';
  return text + gap + vocabulary()[id];
}

// Signs for what cannot be seen, as in view/terminal.py.
const SIGNS = { ' ': '␣', '\n': '⏎', '\t': '⇥', '\r': '␍', '': '∅' };

export function visible(token) {
  if (token in SIGNS) return SIGNS[token];
  return token.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}\p{Zs}]/gu, (sign) => SIGNS[sign] ??
    (sign === '\u200d' ? sign : `<U+${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, '0')}>`));
}
