// --- The engine in the page: a small model of ours lies in the file and is run by model.js ---

import { readData, visible } from './base.js';
import { engine } from './engine.js';
import { BLANK, directly, forward, inputOf, likeliest, offer, probabilities, readModel, sample } from './model.js';
import { distinct, heads, view } from './state.js';

const modelBlock = readData('model'); // null where nobody asked for one; with a `reason` why there is none
export const model = modelBlock && !modelBlock.reason ? readModel(modelBlock) : null;

const LISTED = 5, LEAST_LISTED = 0.001; // likeliest tokens of each run that are listed, and the least chance of one
// The text that was read, with its pieces (`encode` in tokens.js). whole, less: the `Run` of the model as it is, and
// with the changed heads; the same where none is changed, and null before the first.
export const typed = { text: '', ids: [], pieces: [], whole: null, less: null };

function think(ids, changes) { return forward(model, ids, { scale: Object.fromEntries(changes) }); }
// All ids, the likeliest first.
export function ordered(chances) { return Array.from(chances.keys()).sort((a, b) => chances[b] - chances[a]); }
export function nameOf(id) { return visible(model.tokens.shown[id]); }

const local = {
  tokens: (text) => ({ text, ...inputOf(model, text) }),

  run({ text, ids, pieces }) {
    // Another text, or only other heads that are changed?
    if (ids !== typed.ids) Object.assign(typed, { text, ids, pieces, whole: think(ids, []) });
    typed.less = view.changes.size ? think(ids, view.changes) : typed.whole;
    const { maps } = typed.less, rows = ids.length;
    // The rows of a map lie in one buffer.
    const get = (name) => ({ rows, columns: rows, weights: new Float32Array(maps[name][0].buffer) });
    engine.maps = { has: (name) => name in maps, get: (name) => (name in maps ? get(name) : undefined) };
  },

  // Behind the token that is looked at, else the last one. What is followed is the token that the reader chose, else
  // the one that the text goes on with (`truth`, -1 at its end), else the likeliest.
  next(at) {
    // Another text than the reader's may be shown; and of words that it lacks the model says nothing.
    if (!typed.whole || !view.shown.typed || strange().includes(true)) return null;
    const place = at < 0 ? lastPlace() : at, changed = view.changes.size > 0, { temperature } = view;
    const [before, after] = [typed.whole, typed.less].map((run) => probabilities(run.logits[place], temperature));
    const truth = place + 1 < typed.ids.length ? typed.ids[place + 1] : -1;
    const [best, bestNow] = [ordered(before), ordered(after)];
    const follow = view.follow >= 0 ? view.follow : truth >= 0 ? truth : best[0];
    const ids = distinct([...best.slice(0, LISTED), ...(changed ? bestNow.slice(0, LISTED) : []), follow]);
    const most = (id) => Math.max(before[id], after[id]), kept = [follow, best[0], bestNow[0]];
    const rows = ids.sort((a, b) => most(b) - most(a))
      .filter((id) => kept.includes(id) || most(id) >= LEAST_LISTED)
      .map((id) => [id, nameOf(id), before[id], after[id]]);
    return { text: typed.text, place, after: view.shown.tokens[place], rows, follow, truth };
  },

  adds({ place, follow }) { return directly(model, typed.whole, place, follow); },
  async* each({ place, follow }) {
    for (const [number, { name }] of heads.entries()) {
      const chances = without([name], place, view.temperature);
      yield [[name, chances[follow], nameOf(likeliest(chances))]];
      // After every fourth head the page may answer; more heads in between would let the reader wait longer.
      if (number % 4 === 3) await new Promise((resolve) => { setTimeout(resolve, 0); });
    }
  },
};

// The chances of what comes next at a place of the text without some heads.
export function without(names, place, temperature = 1) {
  return probabilities(think(typed.ids, names.map((name) => [name, 0])).logits[place], temperature);
}

// The end of the text that may grow into a word that the model knows; '' behind a space and behind a whole word.
export function growing() {
  const last = typed.pieces.at(-1);
  if (!last || last.known || /\s$/.test(typed.text) || BLANK.test(typed.text)) return '';
  return model.tokens.shown.some((name) => name.startsWith(last.text)) ? last.text : '';
}

// Of each piece: does the model lack it? A word that is still being typed does not count.
export function strange() {
  const ends = typed.pieces.length - (growing() ? 1 : 0);
  return typed.pieces.map((piece, at) => !piece.known && at < ends);
}

// The place of the last token that is whole. What follows a word that is still being typed is of no interest.
export function lastPlace() { return Math.max(0, typed.ids.length - (growing() ? 2 : 1)); }

// A text as it is typed, one token longer; where it has a place to fill the token stands there.
export function longer(text, id) {
  if (id === model.tokens.boundary) return text; // the sign that begins a text is not written
  if (BLANK.test(text)) return text.replace(BLANK, () => model.tokens.shown[id]);
  // Are tokens words between spaces? Then one is put between, while tokens of other models bring their spaces along.
  const gap = model.tokens.areWords && text && !/\s$/.test(text) ? ' ' : '';
  return text + gap + model.tokens.shown[id];
}

// What `tokens` gives, of the text one token longer: the likeliest at temperature 0, else drawn by its probability.
export function goOn(temperature) {
  // At temperature 0 the chances are those of temperature 1, since dividing by 0 would leave none.
  const chances = probabilities(typed.less.logits.at(-1), temperature || 1), { context } = model.config;
  const id = temperature ? sample(chances) : likeliest(chances), ids = [...typed.ids, id];
  // Behind the end of the context the older half makes room, as in gpt/gpt.py.
  if (ids.length > context) return local.tokens(ids.slice(-Math.max(1, context >> 1)).reduce(longer, ''));
  if (BLANK.test(typed.text)) return local.tokens(longer(typed.text, id)); // what stands behind is read, too
  const pieces = [...typed.pieces, { id, text: model.tokens.shown[id], known: true }];
  return { text: longer(typed.text, id), ids, pieces };
}

if (model) { Object.assign(engine, local); offer(model); }
