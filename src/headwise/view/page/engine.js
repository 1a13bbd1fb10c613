// --- The model behind the page: in the page itself (local.js), or in the process that serves it (served.js) ---
// Both answer:
//   tokens(text)            what `run` takes: the text, with its tokens where the page can make them
//   run(input, where)       reads it, with the heads of `view.changes` changed
//   maps                    of the latest reading, by the names of heads, as a Map
//   difference(number)      between two texts of one length, by how much the weights of a head differ
//   next(at)                what comes next: {text, place, after, rows, follow, truth} or {text, state}; null before a
//                           reading. A row is [id, token, chance as the model is, with the changes, in a second text]
//   adds(next)              name of a head -> what it adds to the logit of the followed token by itself; {} if unknown
//   ready()                 of a served model: resolves once no text waits to be read
//   each(next)              what becomes of it without each head alone, in parts: rows [name, chance, likeliest token]
// An id is a token's number; a "chance" is a probability.

import { weights } from './state.js';

export const engine = { maps: new Map(), next: () => null, difference: () => undefined };

export function hasModel() { return Boolean(engine.run); }

// A map as a picture; `first` is its first column, where a column is one token.
export function mapOf(full, rows, columns) {
  return { rows, columns, weights: full, first: full.filter((_, at) => at % columns === 0) };
}

// Something like a Map, each value made when first needed.
export function lazily(has, make) {
  const made = new Map();
  const get = (name) => {
    if (has(name) && !made.has(name)) made.set(name, make(name));
    return made.get(name);
  };
  return { has, get };
}

// The maps of the file by the names of heads: base64, without the zeros above the diagonal of a causal model.
export function unpackedMaps(stored) {
  const size = stored.tokens.length;
  return lazily((name) => name in stored.weights, (name) => {
    const packed = weights(stored.weights[name]), full = new Float32Array(size * size);
    for (let row = 0, at = 0; row < size; row++) {
      const width = stored.causal ? row + 1 : size; // weights of the row that are stored
      full.set(packed.subarray(at, at + width), row * size);
      at += width;
    }
    return mapOf(full, size, size);
  });
}
