// The fourth backend, that is implementation of attention: our GPT in plain JavaScript. It is the same function as
// gpt/gpt.py with the layer of backends/torch_.py, and a test holds it against them.
//
// For scripts: await window.headwise.run(text, {silence, scale}) -> {tokens, ids, logits, maps, heads, unknown}.
//
// A vector is a Float32Array, a sequence a list of vectors, one for each token. n is a layer, t the position of a
// query, s that of a key, h a head, g a key/value head, c a feature of the model, e one of a head's values. Sums are
// kept in double precision, as JavaScript's numbers are, and rounded to single where a vector is made.

import { bytesOf } from './base.js';
import { apart, encode, readTokens } from './tokens.js';

// Changes: `silence`, names of heads that add nothing; `scale`, name of a head -> the factor on what it adds.
// A Run: `logits` at each position; `maps`, name of a head -> its weights [t][s]; `heads`, name -> what it adds to the
// residual stream; `layers`, of each x, what comes in, `read`, x normalised, `heads` (`attend`), `out`, what they add,
// `middle`, x with that, and `fed`, what the feed-forward adds; `final`, what the last matrix reads.

// --- Reading ---

// Unpacks a block of `pack_model`: one run of little-endian numbers, in the order of `tensors`, each [name, shape].
export function readModel(block) {
  const numbers = new Float32Array(bytesOf(block.weights).buffer);
  const tensors = {};
  let start = 0;
  for (const [name, shape] of block.tensors) {
    const size = shape.reduce((product, n) => product * n, 1);
    // A vector, such as a bias, has one axis, and `columns` is undefined.
    tensors[name] = { numbers: numbers.subarray(start, start + size), rows: shape[0], columns: shape[1] };
    start += size;
  }
  const { config } = block, tokens = readTokens(block.tokenizer, block.shown);
  if (tokens.areWords) BLANK = /_{3,}|(?<!\S)(?:…|\.{3})\s*$/; // as the examples write it
  // Names are those of the Python module. A tensor that a model has not, such as a bias, is undefined here.
  const linearOf = (name) => tensors[name + '.weight'] &&
    { weight: tensors[name + '.weight'], bias: tensors[name + '.bias']?.numbers };
  const normOf = (name, kind = config.norm, eps = config.norm_eps) =>
    ({ kind, eps, gain: tensors[name + '.weight']?.numbers, bias: tensors[name + '.bias']?.numbers });
  const layerOf = (n) => ({
    attentionNorm: normOf(`blocks.${n}.attention_norm`),
    ...Object.fromEntries([...'qkvo'].map((name) => [name, linearOf(`blocks.${n}.attention.${name}_proj`)])),
    qNorm: config.qk_norm && normOf(`blocks.${n}.attention.q_norm`, 'rms', config.qk_norm_eps),
    kNorm: config.qk_norm && normOf(`blocks.${n}.attention.k_norm`, 'rms', config.qk_norm_eps),
    feedForwardNorm: normOf(`blocks.${n}.feed_forward_norm`),
    gate: linearOf(`blocks.${n}.feed_forward.gate`), // only where the feed-forward is gated
    up: linearOf(`blocks.${n}.feed_forward.up`),
    down: linearOf(`blocks.${n}.feed_forward.down`),
  });
  return {
    config, tokens,
    tokenEmbedding: tensors['token_embedding.weight'],
    positionEmbedding: tensors['position_embedding.weight'],
    embeddingNorm: config.embedding_norm && normOf('embedding_norm'),
    layers: Array.from({ length: config.n_layers }, (_, n) => layerOf(n)),
    finalNorm: config.final_norm && normOf('final_norm'),
    // Tied: the embedding gives the logits, too (Press and Wolf 2017), and is packed once.
    lmHead: { weight: tensors[config.tied ? 'token_embedding.weight' : 'lm_head.weight'] },
    parameters: block.parameters,
    rotations: [], // {cos, sin} of each position that `rotationAt` has met
  };
}

// --- The parts ---

const ACTIVATIONS = { // by their names in GPTConfig
  relu: (x) => Math.max(0, x),
  relu2: (x) => Math.max(0, x) ** 2,
  gelu: (x) => (x / 2) * (1 + erf(x / Math.SQRT2)),
  // An approximation of gelu (Hendrycks and Gimpel 2016), which GPT-2 has.
  gelu_tanh: (x) => (x / 2) * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
  silu: (x) => x / (1 + Math.exp(-x)),
};

// The error function: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26; at most 1.5e-7 off.
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
  return Math.sign(x) * (1 - series * Math.exp(-x * x));
}

// y = W x + b
function linear({ weight: { numbers, rows, columns }, bias }, x) {
  const y = new Float32Array(rows);
  for (let row = 0, at = 0; row < rows; row++) { // `at` goes on through all numbers, since W lies row by row
    let sum = bias ? bias[row] : 0;
    for (let column = 0; column < columns; column++, at++) sum += numbers[at] * x[column];
    y[row] = sum;
  }
  return y;
}

function plus(a, b) { return a.map((value, i) => value + b[i]); }

export function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

// LayerNorm (`kind` "layer"); or RMSNorm ("rms"), which takes no mean off, so that its `variance` is the mean square.
function normalised({ kind, eps, gain, bias }, x) {
  const mean = kind === 'layer' ? x.reduce((sum, value) => sum + value, 0) / x.length : 0;
  const variance = x.reduce((sum, value) => sum + (value - mean) ** 2, 0) / x.length;
  const size = 1 / Math.sqrt(variance + eps);
  return x.map((value, i) => (value - mean) * size * (gain ? gain[i] : 1) + (bias ? bias[i] : 0));
}

// RoPE (Su et al. 2021): features m and m + half of a head rotate together, by an angle that grows with the position.
function rotated(model, x, position) {
  const half = x.length / 2, { cos, sin } = rotationAt(model, position, half), y = new Float32Array(x.length);
  for (let m = 0; m < half; m++) {
    y[m] = x[m] * cos[m] - x[m + half] * sin[m];
    y[m + half] = x[m + half] * cos[m] + x[m] * sin[m];
  }
  return y;
}

// The cosine and sine of each pair's angle at a position, made once: all heads are of one width.
function rotationAt(model, position, half) {
  if (!model.rotations[position]) {
    const angles = Array.from({ length: half }, (_, m) => position * model.config.rope_theta ** (-m / half));
    model.rotations[position] = { cos: Float32Array.from(angles, Math.cos), sin: Float32Array.from(angles, Math.sin) };
  }
  return model.rotations[position];
}

// Softmax of a list. The largest score is taken off, so that no power overflows; the weights stay the same.
function softmax(scores) {
  const top = Math.max(...scores), powers = scores.map((score) => Math.exp(score - top));
  const total = powers.reduce((sum, power) => sum + power, 0);
  return Float32Array.from(powers, (power) => power / total);
}

// --- The model ---

// Runs the model on 1 to config.context ids; an error for other lengths and heads.
export function forward(model, ids, { silence = [], scale = {} } = {}) {
  checkRun(model, ids, silence, scale);
  const { config } = model, maps = {}, heads = {}, layers = [];
  let x = ids.map((id, t) => embedding(model, id, t)); // the residual stream, a vector for each token
  for (let n = 0; n < config.n_layers; n++) {
    const layer = model.layers[n];
    const factors = Array.from({ length: config.n_heads }, (_, h) => {
      const name = headName(n, h);
      return silence.includes(name) ? 0 : scale[name] ?? 1;
    });
    // Norms stand before attention and before the feed-forward (pre-norm), and both add to the stream.
    const attended = attention(model, layer, x.map((row) => normalised(layer.attentionNorm, row)), factors);
    const middle = x.map((row, t) => plus(row, attended.out[t]));
    const fed = middle.map((row) => feedForward(config, layer, normalised(layer.feedForwardNorm, row)));
    layers.push({ x, ...attended, middle, fed });
    x = middle.map((row, t) => plus(row, fed[t]));
    attended.heads.forEach((head, h) => {
      maps[headName(n, h)] = head.weights;
      heads[headName(n, h)] = head.added;
    });
  }
  const final = model.finalNorm ? x.map((row) => normalised(model.finalNorm, row)) : x;
  return { logits: final.map((row) => linear(model.lmHead, row)), maps, heads, layers, final };
}

// What the first layer's x is of a token: its embedding, with that of its position where positions are learned.
function embedding(model, id, position) {
  const row = ({ numbers, columns }, at) => numbers.slice(at * columns, (at + 1) * columns);
  let x = row(model.tokenEmbedding, id);
  if (model.positionEmbedding) x = plus(x, row(model.positionEmbedding, position));
  return model.embeddingNorm ? normalised(model.embeddingNorm, x) : x;
}

// One layer of attention over `read`, the normalised x; `factors` has for each head how much of its output counts.
function attention(model, layer, read, factors) {
  const { n_heads: nHeads, n_kv_heads: nKvHeads } = model.config;
  // Of each of `count` heads its queries, or its keys, stage by stage (`prepared`).
  const stages = (weights, count, norm) => {
    const projected = read.map((x) => linear(weights, x));
    return Array.from({ length: count }, (_, h) => prepared(model, projected.map((x) => headPart(x, h, count)), norm));
  };
  const queries = stages(layer.q, nHeads, layer.qNorm), keys = stages(layer.k, nKvHeads, layer.kNorm);
  const values = read.map((x) => linear(layer.v, x));
  const heads = factors.map((factor, h) => {
    const g = Math.floor((h * nKvHeads) / nHeads); // the key/value head that head h reads
    return attend(layer, h, g, queries[h], keys[g], values.map((x) => headPart(x, g, nKvHeads)), factor);
  });
  const out = read.map((_, t) => {
    const sum = new Float64Array(model.config.d_model);
    for (const { added } of heads) for (let c = 0; c < sum.length; c++) sum[c] += added[t][c];
    if (layer.o.bias) for (let c = 0; c < sum.length; c++) sum[c] += layer.o.bias[c];
    return Float32Array.from(sum);
  });
  return { read, heads, out };
}

// Head h's part of a vector that holds those of `count` heads side by side.
function headPart(x, h, count) {
  const width = x.length / count;
  return x.subarray(h * width, (h + 1) * width);
}

// Queries or keys of one head as [{kind, rows}]: "projected", then "normed" and "rotated"; the last meets in q·k.
function prepared(model, rows, norm) {
  const stages = [{ kind: 'projected', rows }];
  if (norm) stages.push({ kind: 'normed', rows: rows.map((x) => normalised(norm, x)) });
  if (model.config.position === 'rope') {
    stages.push({ kind: 'rotated', rows: stages.at(-1).rows.map((x, position) => rotated(model, x, position)) });
  }
  return stages;
}

// Head h, which reads key/value head g: softmax(q·k / sqrt(width)) v for every query, over the keys up to it, then
// through the head's columns of W_O. `queries` and `keys` are stages of `prepared`.
function attend(layer, h, g, queries, keys, values, factor) {
  const q = queries.at(-1).rows, k = keys.at(-1).rows, width = q[0].length;
  const weights = [], scores = [], out = [], added = [], map = new Float32Array(q.length ** 2); // all weights, by rows
  q.forEach((query, t) => {
    scores[t] = Array.from({ length: t + 1 }, (_, s) => dot(query, k[s]) / Math.sqrt(width));
    weights[t] = map.subarray(t * q.length, (t + 1) * q.length); // 0 for what comes later
    weights[t].set(softmax(scores[t]));
    out[t] = weighted(weights[t], values, t + 1, factor);
    added[t] = throughOutput(layer.o.weight, out[t], h * out[t].length);
  });
  return { g, queries, keys, values, scores, weights, out, added };
}

// The values of the first `count` keys times their weights, added up, times the factor of the head.
function weighted(weights, values, count, factor) {
  const sum = new Float64Array(values[0].length);
  for (let s = 0; s < count; s++) for (let e = 0; e < sum.length; e++) sum[e] += weights[s] * values[s][e];
  return Float32Array.from(sum, (value) => value * factor);
}

// What a head adds: its output times its columns of W_O, from `first` on. The bias belongs to no head.
function throughOutput({ numbers, rows, columns }, out, first) {
  const added = new Float32Array(rows);
  for (let row = 0; row < rows; row++) {
    let sum = 0;
    for (let e = 0, at = row * columns + first; e < out.length; e++, at++) sum += numbers[at] * out[e];
    added[row] = sum;
  }
  return added;
}

// down(activation(up x)); with a gate, down(activation(gate x) * up x) (Shazeer 2020).
function feedForward(config, layer, x) {
  const activation = ACTIVATIONS[config.activation], up = linear(layer.up, x);
  if (!layer.gate) return linear(layer.down, up.map(activation));
  const gate = linear(layer.gate, x);
  return linear(layer.down, up.map((value, i) => value * activation(gate[i])));
}

// Without these checks a wrong name would show as nothing at all.
function checkRun(model, ids, silence, scale) {
  const { context } = model.config, names = headNames(model);
  const unknown = [...silence, ...Object.keys(scale)].find((name) => !names.includes(name));
  if (!ids.length) throw new Error('the text has no tokens');
  if (ids.length > context) throw new Error(`${ids.length} tokens exceed the model's context of ${context}`);
  if (unknown) throw new Error(`there is no head ${unknown}; the model has ${names.join(', ')}`);
}

export function headName(layer, head) { return `L${layer}.H${head}`; }

export function headNames(model) {
  const { n_layers: nLayers, n_heads: nHeads } = model.config;
  return Array.from({ length: nLayers * nHeads }, (_, i) => headName(Math.floor(i / nHeads), i % nHeads));
}

// --- What comes next ---

// The probability of each token of the vocabulary.
export function probabilities(logits, temperature = 1) {
  return softmax(Array.from(logits, (logit) => logit / temperature));
}

// The id of the likeliest token, of equal ones the first.
export function likeliest(chances) {
  return chances.reduce((best, chance, id) => (chance > chances[best] ? id : best), 0);
}

// What each head adds to the logit of a token by itself, by name. The logit reads the normed sum of all that was added;
// the norm is held at what it was. LayerNorm takes a mean off every vector.
export function directly(model, { layers, heads }, place, id) {
  const { middle, fed } = layers.at(-1), x = plus(middle[place], fed[place]);
  const { kind, eps, gain } = model.finalNorm || {};
  const { numbers, columns } = model.lmHead.weight, row = numbers.subarray(id * columns, (id + 1) * columns);
  const mean = (vector) => (kind === 'layer' ? vector.reduce((sum, value) => sum + value, 0) / columns : 0);
  const centre = mean(x), variance = x.reduce((sum, value) => sum + (value - centre) ** 2, 0) / columns;
  const size = kind ? 1 / Math.sqrt(variance + eps) : 1;
  const reads = row.map((value, c) => value * size * (gain ? gain[c] : 1));
  return Object.fromEntries(Object.entries(heads).map(([name, added]) => {
    const off = mean(added[place]);
    return [name, dot(reads, added[place].map((value) => value - off))];
  }));
}

// Names of heads, those first without which what the model says next at a place loses most; above so many numbers to
// be multiplied none is tried, and they stand in their order.
export function byWeight(model, ids, place, most = 3e8) {
  const chances = (changes) => probabilities(forward(model, ids, changes).logits[place]), names = headNames(model);
  const numbers = model.layers.length * 12 * model.config.d_model ** 2 * ids.length * names.length;
  if (numbers > most) return names;
  const before = chances({}), best = likeliest(before);
  const left = new Map(names.map((name) => [name, chances({ silence: [name] })[best]]));
  return names.sort((a, b) => left.get(a) - left.get(b));
}

// An id drawn by its probability: that of the piece of the line from 0 to 1 in which the point `random` lies.
export function sample(chances, random = Math.random()) {
  let left = random;
  for (let id = 0; id < chances.length; id++) {
    left -= chances[id];
    if (left < 0) return id;
  }
  return likeliest(chances); // rounded chances may add up to a little less than 1, and the point lies behind them
}

export let BLANK = /_{3,}/; // the place to fill: what stands behind is not read, since the model looks back alone

// A text as the model sees it, behind the token that begins a text: ids, tokens of the vocabulary, and pieces.
export function inputOf(model, text) {
  const { tokens } = model, pieces = encode(tokens, apart(tokens, text.split(BLANK)[0]));
  const begin = tokens.boundary === undefined ? [] : [{ id: tokens.boundary, text: '', known: true }];
  const all = [...begin, ...pieces];
  return { ids: all.map((piece) => piece.id), tokens: all.map((piece) => tokens.strings[piece.id]), pieces: all };
}

// Makes `window.headwise.run`, by which scripts and tests run the model of a page: a text and changes -> what `forward`
// gives, as plain arrays; and in `unknown` the words that the vocabulary lacks, each {at, text} with its position.
export function offer(model) {
  window.headwise = {
    run: async (text, changes = {}) => {
      const { ids, tokens, pieces } = inputOf(model, text), { logits, maps, heads } = forward(model, ids, changes);
      const plain = (rows) => rows.map((row) => Array.from(row));
      const table = (lists) => Object.fromEntries(Object.entries(lists).map(([name, rows]) => [name, plain(rows)]));
      const unknown = pieces.flatMap((piece, at) => (piece.known ? [] : [{ at, text: piece.text }]));
      return { tokens, ids, logits: plain(logits), maps: table(maps), heads: table(heads), unknown };
    },
  };
}
