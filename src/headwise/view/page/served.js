// --- The engine in the process that served the page, and nobody else ---
//
// A question is a JSON object that names under `do` what it asks, as heads/look.py has it; it is answered in JSON.

import { emit } from './base.js';
import { engine } from './engine.js';
import { data, numberOf, view, weights } from './state.js';

const address = new URL('ask', location.href); // beside the page, below the same secret path
const trouble = { words: '', lost: false }; // of the latest question, as `told` takes it; is it that nobody answers?
const kept = new Map(), wanted = new Set(); // 'a7', head 7 on text a: its map, and that it is to be asked for
// The turn of the latest question, larger than those of a page that was open before; how often a text was read; is an
// answer on maps awaited? and the latest reading.
let latest = Date.now(), version = 0, asking = false, answer = {};

// The answer to a question, {} where nobody gives one. The event `trouble` has what stands below the text then.
async function ask(question) {
  let said = {};
  try {
    const body = JSON.stringify({ turn: latest, ...question }); // by its turn the server knows which is the latest
    const response = await fetch(address, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body });
    if (!response.ok) throw new Error(response.statusText);
    said = await response.json();
    // Maps that come later say nothing of a text that was refused: only a text that was read does. That somebody
    // answers again ends the trouble that nobody did, whatever was asked.
    if (said.refused) trouble.words = said.refused;
    else if (trouble.lost || (question.do === 'read' && !said.stale)) trouble.words = '';
    trouble.lost = false;
  } catch {
    trouble.lost = true;
    trouble.words = ['look.lost', {}];
  }
  emit('trouble', trouble.words);
  return said;
}

// Asks one question for each text, with the numbers of all heads whose maps are wanted.
async function fetchMaps() {
  const before = version, names = [...wanted]; // in another version in the end these maps are of an old text
  wanted.clear();
  for (const slot of ['a', 'b']) {
    const numbers = names.filter((name) => name[0] === slot).map((name) => Number(name.slice(1)));
    const { maps = {} } = numbers.length ? await ask({ do: 'maps', slot, heads: numbers }) : {};
    if (before !== version) break;
    for (const number of numbers) { // what no answer has is not asked for again, before another text is read
      const [rows, columns, base64] = maps[number] ?? [0, 0, ''];
      kept.set(slot + number, { rows, columns, weights: weights(base64) });
    }
  }
  asking = false;
  emit('maps'); // whoever still misses one asks again
}

// The map of a head on one text; it is asked for where it is not there, with others that are wanted at the same time.
function mapIn(slot, number) {
  if (!version) return undefined; // nothing was read yet
  const map = kept.get(slot + number);
  if (!map) {
    wanted.add(slot + number);
    if (!asking) setTimeout(fetchMaps, 0);
    asking = true;
  }
  return map?.rows ? map : undefined; // of a head that did not run it has no rows
}

Object.assign(engine, {
  tokens: (text) => ({ text }),

  maps: { has: () => true, get: (name) => mapIn('a', numberOf.get(name)) },

  // What the reading has is kept, and given, unless a later question overtook it or it was refused: then null.
  async run({ text }, { slot = 'a', at = -1, first = true } = {}) {
    if (first) latest += 1;
    const turn = latest, changes = Object.fromEntries(view.changes);
    const said = await ask({ do: 'read', slot, turn, text, changes, at, follow: view.follow });
    if (said.stale || turn !== latest || said.refused || !('next' in said || 'state' in said)) return null;
    version += 1;
    for (const name of [...kept.keys()]) if (name[0] === slot) kept.delete(name); // those of the text before
    view.differ = said.differ ?? null;
    const { next, state, goes_on } = said; // these are of both texts
    answer = slot === 'a' ? { ...said, text } : { ...answer, next, state, goes_on };
    if (said.next) view.follow = said.follow;
    return said;
  },

  next: () => answer.next
    ? { text: answer.text, place: answer.at, after: '', rows: answer.next, follow: view.follow, truth: -1 }
    : answer.state ? { text: answer.text, state: answer.state, rows: [], follow: -1 } : null,

  // Undefined where there is no second text, or its map is not there yet.
  difference(number) {
    const map = view.differ && mapIn('a', number), other = map && mapIn('b', number);
    return other && map.weights.map((weight, at) => weight - other.weights[at]);
  },

  // What the likeliest token adds to the text: its own, with the space before it.
  goesOn: () => answer.goes_on ?? '',

  // A layer a question; an answer says how many are left.
  async* each({ follow }) {
    for (let layer = 0, left = 1; left > 0; layer++) {
      const said = await ask({ do: 'each', slot: 'a', layer, follow });
      if (!said.each) return;
      left = said.left;
      yield said.each;
    }
  },

  adds: async ({ follow }) => (data.predicts === 'next' && (await ask({ do: 'adds', follow })).adds) || {},
  why: () => ask({ do: 'why', slot: 'a' }),
});
