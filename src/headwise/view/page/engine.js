// --- The model behind the page: in the page itself (local.js), or in the process that serves it (served.js) ---
// Both answer:
//   tokens(text)            what `run` takes: the text, with its tokens where the page can make them
//   run(input, where)       reads it, with the heads of `view.changes` changed
//   maps                    of the latest reading, by the names of heads: has(name), get(name), a map as a picture,
//                           {rows, columns, weights}, weights row by row
//   difference(number)      between two texts of one length, by how much the weights of a head differ
//   next(at)                what comes next: {text, place, after, rows, follow, truth} or {text, state}; null before a
//                           reading. A row is [id, token, chance as the model is, with the changes, in a second text]
//   adds(next)              name of a head -> what it adds to the logit of the followed token by itself; {} if unknown
//   ready()                 of a served model: resolves once no text waits to be read
//   each(next)              what becomes of it without each head alone, in parts: rows [name, chance, likeliest token]
// An id is a token's number; a "chance" is a probability.

export const engine = { maps: new Map(), next: () => null, difference: () => undefined };

export function hasModel() { return Boolean(engine.run); }
