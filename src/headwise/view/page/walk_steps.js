// --- The eight steps of the walk: what is shown of one head at one token, from what `forward` kept of its run ---
//
// Each step is a function without arguments that gives a list of elements. A cell of a table is called `ROW:COLUMN`,
// such as `k3:0`, the first number of key 3. An `origin` is asked for a column, and says where its number came from.

import { element, say, visible, worded } from './base.js';
import { dot, forward, headName, probabilities } from './model.js';
import { MOST_FEATURES, MOST_KEYS, joinedSlices, lengthOf, shown, stripTable, walk, written } from './walk_tables.js';

const LIKELIEST = 4; // tokens that are shown of those that are expected with the head, and as many without it

export const STEPS = ['text', 'vectors', 'products', 'scale', 'softmax', 'values', 'output', 'likelier'];

export const DRAW = {
  text: drawText, vectors: drawVectors, products: drawProducts, scale: drawScale,
  softmax: drawSoftmax, values: drawValues, output: drawOutput, likelier: drawLikelier,
};

// A paragraph between the tables; words.toml has its phrase.
function telling(key, values) { return worded('p', 'telling', `walk.${key}`, values); }

// What is chosen, and its numbers. q is the query at the token, k the keys of all tokens, both as they meet: after
// the last of their stages, which are listed from the projection on (`prepared` in model.js).
function facts() {
  const layer = walk.run.layers[walk.layer], head = layer.heads[walk.head], { at } = walk;
  return { layer, head, at, width: head.out[at].length, q: head.queries.at(-1).rows[at], k: head.keys.at(-1).rows };
}

function tokenAt(position) { return written(walk.pieces[position]); }

// The positions whose keys are shown, those with the largest weights, in the order of the text; and the others.
// `note` is a list, so that a step can spread it: of one paragraph, or of none where all keys are shown.
function keysShown() {
  const { head, at } = facts(), weights = head.weights[at];
  // The model is causal: a query sees the keys up to its own.
  const order = Array.from({ length: at + 1 }, (_, s) => s).sort((a, b) => weights[b] - weights[a]);
  const kept = order.slice(0, MOST_KEYS).sort((a, b) => a - b), others = order.slice(MOST_KEYS);
  const note = others.length ? [telling('some_keys', { count: at + 1, shown: kept.length })] : [];
  return { kept, others, note };
}

// The row of a table that belongs to the key at position s: ("k", 3) makes `k3`; and that of the query.
function keyRow(name, s, values, more = {}) {
  return { id: `${name}${s}`, label: `${name}${s}`, token: tokenAt(s), values, ...more };
}

function queryRow(values, more) { return { id: 'q', label: 'q', token: tokenAt(walk.at), values, ...more }; }

// Step 1: what the layer reads at the token, x, and x normalised.
function drawText() {
  const { layer, at } = facts(), { model } = walk, rows = [];
  if (walk.layer === 0) { // here x is made of embeddings; later the layers before have made it
    const row = ({ numbers, columns }, n) => numbers.slice(n * columns, (n + 1) * columns);
    const values = row(model.tokenEmbedding, walk.ids[at]), places = model.positionEmbedding;
    rows.push({ id: 'token', label: say('walk.embedding'), token: tokenAt(at), values });
    if (places) rows.push({ id: 'place', label: say('walk.position', { at }), values: row(places, at) });
  }
  // Is x the sum of the two rows above it, number by number? A norm over the embeddings would change all numbers.
  const sum = rows.length === 2 && !model.embeddingNorm;
  const [a, b] = rows.map((row) => row.values);
  const summed = (i) => from('sum_of_two', { a: a[i], b: b[i] }, [`token:${i}`, `place:${i}`]);
  const norm = model.config.norm === 'rms' ? 'normed' : 'centred';
  const read = (i) => from(norm, { a: layer.x[at][i] }, [`x:${i}`]);
  rows.push({ id: 'x', label: 'x', values: layer.x[at], origin: sum ? summed : null },
    { id: 'read', label: say('walk.read'), values: layer.read[at], origin: read });
  // Positions are in x already where they are learned; else they come in at the next step, where q and k are rotated.
  const key = walk.layer ? 'text_later' : model.positionEmbedding ? 'text_learned' : 'text_first';
  return [
    telling('asked', { token: tokenAt(at), at, seen: at + 1, count: walk.ids.length }),
    telling(key, { layer: walk.layer }),
    telling('text_read'),
    stripTable(say('walk.text'), rows),
  ];
}

// Step 2: the query of the token and the keys, from their projection on.
function drawVectors() {
  const { layer, head, at, width, q, k } = facts(), { config } = walk.model, { kept, note } = keysShown();
  const parts = layer.heads.map((each) => each.queries[0].rows[at]); // each head's query as W_Q gives it
  const shared = config.n_kv_heads < config.n_heads; // do several heads read one key/value head (GQA)?
  const nodes = [
    telling('query_is', { token: tokenAt(at), width: config.d_model, heads: config.n_heads, part: width }),
    joinedSlices(say('walk.queries'), 'q', parts, walk.head),
    telling(shared ? 'keys_shared' : 'keys_are', { shared: head.g }), // g: the number of that key/value head
  ];
  // A table for each stage but the last, whose table ends the step; where there is one stage, it needs no name.
  const last = head.queries.length - 1;
  for (let stage = 0; stage < last; stage++) nodes.push(stageTable(stage, kept));
  if (last) nodes.push(telling(`stage_${head.queries[last].kind}`, { width }));
  return [...nodes, ...note, stripTable(say('walk.vectors'), [
    queryRow(q, { origin: (i) => vectorOrigin('q', i), strong: true }),
    ...kept.map((s) => keyRow('k', s, k[s], { origin: (i) => vectorOrigin(`k${s}`, i) })),
  ])];
}

// Queries and keys as they were before the last of their stages: projected, and normed where rotation follows.
function stageTable(stage, kept) {
  const { head, at, width } = facts(), { kind } = head.queries[stage];
  return element('div', '', telling(`stage_${kind}`, { width }), stripTable(say('walk.vectors'), [
    queryRow(head.queries[stage].rows[at], { id: `${kind} q` }),
    ...kept.map((s) => keyRow('k', s, head.keys[stage].rows[s], { id: `${kind} k${s}` })),
  ]));
}

// Where number i of a query or key (`name`: "q", or "k3") came from, by the kind of its last stage; the stage before
// has a table of its own, whose cells are called like `projected k3:0`.
function vectorOrigin(name, i) {
  const { head, width } = facts(), stages = head.queries, before = stages.at(-2)?.kind, { kind } = stages.at(-1);
  const half = width / 2;
  if (kind === 'rotated') { // RoPE rotates features i and i + half together (`rotated` in model.js)
    const partner = i < half ? i + half : i - half;
    return from('rotated', { i, partner }, [`${before} ${name}:${i}`, `${before} ${name}:${partner}`]);
  }
  if (kind === 'normed') return from('normed_head', { i }, [`${before} ${name}:${i}`]);
  return from(name === 'q' ? 'projected_q' : 'projected_k', { i }, []);
}

// Step 3: the query times each key, feature by feature.
function drawProducts() {
  const { q, k, width } = facts(), { kept, note } = keysShown();
  // The products, feature by feature, and behind them, as the tail of the row, their sum q·k.
  const products = kept.map((s) => keyRow('qk', s, Array.from(q, (value, i) => value * k[s][i]), {
    label: `q k${s}`,
    origin: (i) =>
      from('product', { a: q[i], b: k[s][i], first: `q[${i}]`, second: `k${s}[${i}]` }, [`q:${i}`, `k${s}:${i}`]),
    tail: {
      value: dot(q, k[s]),
      origin: () => from('sum_of_row', { count: width }, Array.from(q, (_, i) => `qk${s}:${i}`)),
    },
  }));
  return [telling('products_are', {}), ...note,
    stripTable(say('walk.vectors'), [queryRow(q, { strong: true }), ...kept.map((s) => keyRow('k', s, k[s]))]),
    stripTable(say('walk.products'), products, { tail: 'q·k' })];
}

// Step 4: the scores, q·k over the root of the head's width.
function drawScale() {
  const { head, at, width, q, k } = facts(), { kept, note } = keysShown(), root = Math.sqrt(width);
  // Two columns: q·k, which the step before has explained, and the score.
  const rows = kept.map((s) => keyRow('k', s, [dot(q, k[s]), head.scores[at][s]], {
    origin: (i) => (i ? from('quotient', { a: dot(q, k[s]), b: root }, [`k${s}:0`]) : from('dot_of', { s }, [])),
  }));
  return [telling('scale_is', { width, root: Number(root.toFixed(3)) }), ...note,
    stripTable(say('walk.scale'), rows, { columns: ['q·k', say('walk.score')], figures: true })];
}

// Step 5: the weights, from the scores by softmax.
function drawSoftmax() {
  const { head, at } = facts(), { kept, others, note } = keysShown();
  const scores = head.scores[at], top = Math.max(...scores);
  // The largest score is taken off, so that no power overflows; the weights stay the same.
  const power = (s) => Math.exp(scores[s] - top), total = scores.reduce((sum, _, s) => sum + power(s), 0);
  const rows = kept.map((s) => keyRow('s', s, [scores[s], scores[s] - top, power(s), head.weights[at][s]], {
    label: `k${s}`, bar: head.weights[at][s],
    origin: (i) => [ // one for each of the four columns
      from('score_of', { s }, []),
      from('difference', { a: scores[s], b: top }, [`s${s}:0`]),
      from('power', { a: scores[s] - top }, [`s${s}:1`]),
      from('quotient', { a: power(s), b: total }, [`s${s}:2`]),
    ][i],
  }));
  const left = others.reduce((sum, s) => sum + head.weights[at][s], 0);
  const best = kept.reduce((a, b) => (head.weights[at][b] > head.weights[at][a] ? b : a));
  return [
    telling('softmax_is', { top: shown(top), total: shown(total) }),
    ...note,
    stripTable(say('walk.softmax'), rows, {
      columns: [say('walk.score'), say('walk.shifted'), 'exp', say('walk.weight')], figures: true,
    }),
    ...(others.length ? [telling('others_weight', { count: others.length, weight: shown(left, 3) })] : []),
    telling('looks_at', { token: tokenAt(at), most: tokenAt(best), weight: shown(head.weights[at][best], 2) }),
  ];
}

// Step 6: the output of the head, the values times their weights.
function drawValues() {
  const { head, at, width } = facts(), { kept, others, note } = keysShown(), weights = head.weights[at];
  const values = kept.map((s) => keyRow('v', s, head.values[s]));
  const rows = kept.map((s) => keyRow('w', s, head.values[s].map((value) => value * weights[s]), {
    label: `${shown(weights[s], 2)} v${s}`,
    origin: (i) =>
      from('product', { a: weights[s], b: head.values[s][i], first: say('walk.weight'), second: `v${s}[${i}]` },
        [`v${s}:${i}`]),
  }));
  if (others.length) { // one row for all keys that are not shown: the output less what the shown ones give
    rows.push({
      id: 'rest', label: say('walk.others'),
      values: head.out[at].map((sum, i) => sum - kept.reduce((part, s) => part + weights[s] * head.values[s][i], 0)),
    });
  }
  const parts = rows.map((row) => row.id); // taken before the row of their sum is added
  rows.push({
    id: 'out', label: say('walk.sum'), values: head.out[at], strong: true,
    origin: (i) => from('sum_of_column', { count: parts.length }, parts.map((id) => `${id}:${i}`)),
  });
  return [
    telling('values_are', { width }),
    ...note,
    stripTable(say('walk.the_values'), values),
    telling('weighted_are', { head: headName(walk.layer, walk.head) }),
    stripTable(say('walk.values'), rows),
  ];
}

// Step 7: what the head adds to the residual stream, its output through W_O, beside what the other heads add.
function drawOutput() {
  const { layer, head, at, width } = facts(), out = head.out[at], { weight } = walk.model.layers[walk.layer].o;
  // W_O has the columns of all heads side by side: feature e of head h meets column h * width + e.
  const column = (e) =>
    Float32Array.from({ length: weight.rows }, (_, c) => weight.numbers[c * weight.columns + walk.head * width + e]);
  const order = Array.from(out, (_, e) => e).sort((a, b) => Math.abs(out[b]) - Math.abs(out[a]));
  const kept = order.slice(0, MOST_FEATURES).sort((a, b) => a - b); // the largest outputs, in their own order
  const rows = kept.map((e) => ({
    id: `o${e}`, label: `out[${e}] ${shown(out[e], 2)}`,
    values: column(e).map((value) => value * out[e]),
    origin: (c) => from('product', {
      a: out[e], b: column(e)[c], first: `out[${e}]`, second: `W_O[${c},${walk.head * width + e}]`,
    }, []),
  }));
  rows.push({
    id: 'added', label: say('walk.adds', { head: headName(walk.layer, walk.head) }),
    values: head.added[at], strong: true,
    origin: (c) => from('sum_of_column', { count: width }, kept.map((e) => `o${e}:${c}`)),
  });
  // The second table: what every head adds, the bias of W_O and the old x; their sum is the new x.
  const all = layer.heads.map((each, h) => ({
    id: `h${h}`, label: headName(walk.layer, h), values: each.added[at], strong: h === walk.head,
    tail: { value: lengthOf(each.added[at]), origin: () => from('length', {}, []) },
  }));
  const { bias } = walk.model.layers[walk.layer].o;
  if (bias) all.push({ id: 'bias', label: 'b', values: bias });
  const { x, middle } = layer, parts = [...all.map((row) => row.id), 'x']; // middle: x after attention (`forward`)
  all.push({ id: 'x', label: 'x', values: x[at] });
  all.push({
    id: 'new', label: say('walk.new_x'), values: middle[at], strong: true,
    origin: (c) => from('sum_of_column', { count: parts.length }, parts.map((id) => `${id}:${c}`)),
  });
  const outputs = layer.heads.map((each) => each.out[at]);
  return [
    telling('joined_is', { heads: layer.heads.length }),
    joinedSlices(say('walk.outputs'), 'out', outputs, walk.head),
    telling('through_is', { width }),
    ...(kept.length < width ? [telling('some_features', { count: width, shown: kept.length })] : []),
    stripTable(say('walk.output'), rows),
    telling('residual_is', {}),
    stripTable(say('walk.new_x'), all, { tail: say('walk.length') }),
  ];
}

// Step 8: the model once more without this head. What the head makes likelier is the difference.
function drawLikelier() {
  const { at } = facts(), name = headName(walk.layer, walk.head);
  const whole = probabilities(walk.run.logits[at]);
  const without = probabilities(forward(walk.model, walk.ids, { silence: [name] }).logits[at]);
  const ids = Array.from(whole, (_, id) => id), change = (id) => whole[id] - without[id];
  // The tokens that the head helps most and hinders most; they are listed even where they are not likely.
  const rise = ids.reduce((best, id) => (change(id) > change(best) ? id : best));
  const fall = ids.reduce((best, id) => (change(id) < change(best) ? id : best));
  const most = (chances) => [...ids].sort((a, b) => chances[b] - chances[a]).slice(0, LIKELIEST);
  const kept = [...new Set([...most(whole), ...most(without), rise, fall])].sort((a, b) => whole[b] - whole[a]);
  const word = (id) => visible(walk.model.tokens.shown[id]);
  const rows = kept.map((id) => ({
    id: `p${id}`, label: '', token: word(id), values: [whole[id], without[id], change(id)],
    bar: [whole[id], without[id]],
    // Columns 0 and 1 are probabilities, with the head and without it; column 2 is their difference.
    origin: (i) => i < 2
      ? from(i ? 'chance_without' : 'chance_with', { head: name }, [])
      : from('difference', { a: whole[id], b: without[id] }, [`p${id}:0`, `p${id}:1`]),
  }));
  const columns = [say('walk.with'), say('walk.without'), say('walk.change')];
  const before = shown(without[rise], 3), after = shown(whole[rise], 3);
  return [
    telling('likelier_is', { head: name, token: tokenAt(at) }), // at: what follows this token is predicted
    stripTable(say('walk.likelier'), rows, { columns, figures: true }),
    change(rise) < 0.0005 // it would show as 0.000
      ? telling('no_change', { head: name })
      : telling('rises', { token: word(rise), before, after, head: name }),
  ];
}

// Where a number came from: the key of a sentence, the values in it, and the cells to mark. Numbers are rounded;
// whole ones are counts and positions, which stay as they are.
function from(key, values, cells) {
  const rounded = { ...values };
  for (const [name, value] of Object.entries(values)) {
    if (typeof value === 'number' && !Number.isInteger(value)) rounded[name] = shown(value);
  }
  return { key: `walk.from_${key}`, values: rounded, cells };
}
