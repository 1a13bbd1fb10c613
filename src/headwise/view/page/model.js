// The fourth rung: our GPT in plain JavaScript, the same function as gpt/gpt.py with the layer of rungs/tensor.py.
//
// For scripts and tests: await window.headwise.run(text, {silence, scale}) -> {tokens, ids, logits, maps, heads, unknown}.
//
// A vector is a Float32Array, a sequence a list of vectors, one for each token. t is a query, s a key, h a head, g a
// key/value head. Sums are kept in double precision and rounded to single where a vector is made.

import { bytesOf } from './base.js';
import { encode, readTokens } from './tokens.js';

/**
 * @typedef {Object} Model  what `readModel` makes of a block of `models/pack.py`
 * @property {Object} config  the fields of GPTConfig
 * @property {Object} tokens  the tokenizer
 * @property {Object[]} layers
 *
 * @typedef {Object} Changes
 * @property {string[]} [silence]  heads that add nothing
 * @property {Object<string, number>} [scale]  heads that add so much of what they would
 *
 * @typedef {Object} Run
 * @property {Float32Array[]} logits  of each token, for every token of the vocabulary
 * @property {Object<string, Float32Array[]>} maps  head to weights [t][s]
 * @property {Object<string, Float32Array[]>} heads  head to what it adds to the residual stream of each token
 * @property {Object[]} layers  every step between
 * @property {Object} final
 */

// --- Reading ---

/**
 * The weights in the order of `block.tensors`, [name, shape], as one run of little-endian numbers.
 * @param {Object} block
 * @returns {Model}
 */
export function readModel(block) {
  const numbers = unpackedWeights(bytesOf(block.weights), block.dtype);
  const tensors = {};
  let start = 0;
  for (const [name, shape] of block.tensors) {
    const size = shape.reduce((product, n) => product * n, 1);
    tensors[name] = { numbers: numbers.subarray(start, start + size), rows: shape[0], columns: shape[1] };
    start += size;
  }
  const config = block.config;
  const linear = (name) => tensors[name + '.weight'] &&
    { weight: tensors[name + '.weight'], bias: tensors[name + '.bias']?.numbers };
  const norm = (name, kind = config.norm, eps = config.norm_eps) =>
    ({ kind, eps, gain: tensors[name + '.weight']?.numbers, bias: tensors[name + '.bias']?.numbers });
  const layer = (n) => ({
    window: config.windows?.[n] ?? Infinity, // keys that a query sees, its own included
    attentionNorm: norm(`blocks.${n}.attention_norm`),
    q: linear(`blocks.${n}.attention.q_proj`),
    k: linear(`blocks.${n}.attention.k_proj`),
    v: linear(`blocks.${n}.attention.v_proj`),
    o: linear(`blocks.${n}.attention.o_proj`),
    qNorm: config.qk_norm && norm(`blocks.${n}.attention.q_norm`, 'rms', config.qk_norm_eps),
    kNorm: config.qk_norm && norm(`blocks.${n}.attention.k_norm`, 'rms', config.qk_norm_eps),
    feedForwardNorm: norm(`blocks.${n}.feed_forward_norm`),
    gate: linear(`blocks.${n}.feed_forward.gate`),
    up: linear(`blocks.${n}.feed_forward.up`),
    down: linear(`blocks.${n}.feed_forward.down`),
  });
  return {
    config,
    tokens: readTokens(block.tokenizer, block.shown),
    tokenEmbedding: tensors['token_embedding.weight'],
    positionEmbedding: tensors['position_embedding.weight'],
    embeddingNorm: config.embedding_norm && norm('embedding_norm'),
    layers: Array.from({ length: config.n_layers }, (_, n) => layer(n)),
    finalNorm: config.final_norm && norm('final_norm'),
    lmHead: { weight: tensors[config.tied ? 'token_embedding.weight' : 'lm_head.weight'] },
    rotations: [], // cosines and sines of the rotary positions met so far
  };
}

function unpackedWeights(bytes, dtype) {
  if (dtype === 'float32') return new Float32Array(bytes.buffer);
  return Float32Array.from(new Uint16Array(bytes.buffer), ofHalf);
}

// IEEE 754 half precision: one bit of sign, five of the exponent, ten of the fraction. No weight is infinite or NaN, for
// which the last exponent stands.
function ofHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

// --- The parts ---

const ACTIVATIONS = {
  relu: (x) => Math.max(0, x),
  relu2: (x) => Math.max(0, x) ** 2,
  gelu: (x) => (x / 2) * (1 + erf(x / Math.SQRT2)),
  gelu_tanh: (x) => (x / 2) * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
  silu: (x) => x / (1 + Math.exp(-x)),
};

// Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26; at most 1.5e-7 off.
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
  return Math.sign(x) * (1 - series * Math.exp(-x * x));
}

// y = W x + b
function linear({ weight: { numbers, rows, columns }, bias }, x) {
  const y = new Float32Array(rows);
  for (let row = 0, at = 0; row < rows; row++) {
    let sum = bias ? bias[row] : 0;
    for (let column = 0; column < columns; column++, at++) sum += numbers[at] * x[column];
    y[row] = sum;
  }
  return y;
}

function plus(a, b) { return a.map((value, i) => value + b[i]); }

/**
 * @param {ArrayLike<number>} a
 * @param {ArrayLike<number>} b
 * @returns {number}
 */
export function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

// LayerNorm; or RMSNorm, which takes no mean off, so that its `variance` is the mean square. Gain and bias where there are any.
function normalised({ kind, eps, gain, bias }, x) {
  const mean = kind === 'layer' ? x.reduce((sum, value) => sum + value, 0) / x.length : 0;
  const variance = x.reduce((sum, value) => sum + (value - mean) ** 2, 0) / x.length;
  const size = 1 / Math.sqrt(variance + eps);
  return x.map((value, i) => (value - mean) * size * (gain ? gain[i] : 1) + (bias ? bias[i] : 0));
}

// Rotary position: features m and m + half of a head rotate together, by an angle that grows with the position.
function rotated(model, x, position) {
  const half = x.length / 2, { cos, sin } = rotationAt(model, position, half), y = new Float32Array(x.length);
  for (let m = 0; m < half; m++) {
    y[m] = x[m] * cos[m] - x[m + half] * sin[m];
    y[m + half] = x[m + half] * cos[m] + x[m] * sin[m];
  }
  return y;
}

function rotationAt(model, position, half) {
  if (!model.rotations[position]) {
    const angles = Array.from({ length: half }, (_, m) => position * model.config.rope_theta ** (-m / half));
    model.rotations[position] = { cos: Float32Array.from(angles, Math.cos), sin: Float32Array.from(angles, Math.sin) };
  }
  return model.rotations[position];
}

function softmax(scores) {
  const top = Math.max(...scores), powers = scores.map((score) => Math.exp(score - top));
  const total = powers.reduce((sum, power) => sum + power, 0);
  return Float32Array.from(powers, (power) => power / total);
}

// --- The model ---

/**
 * Token numbers -> logits of the next token at each position, and every step on the way.
 * @param {Model} model
 * @param {number[]} ids at most config.context
 * @param {Changes} [changes]
 * @returns {Run}
 */
export function forward(model, ids, { silence = [], scale = {} } = {}) {
  checkRun(model, ids, silence, scale);
  const { config } = model, maps = {}, heads = {}, layers = [];
  let x = ids.map((id, t) => embedding(model, id, t));
  for (let n = 0; n < config.n_layers; n++) {
    const layer = model.layers[n];
    const factors = Array.from({ length: config.n_heads }, (_, h) => {
      const name = headName(n, h);
      return silence.includes(name) ? 0 : scale[name] ?? 1;
    });
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

function embedding(model, id, position) {
  const row = ({ numbers, columns }, at) => numbers.slice(at * columns, (at + 1) * columns);
  let x = row(model.tokenEmbedding, id);
  if (model.positionEmbedding) x = plus(x, row(model.positionEmbedding, position));
  return model.embeddingNorm ? normalised(model.embeddingNorm, x) : x;
}

// One layer of attention over `read`, what the layer reads: every head, and what they add together.
function attention(model, layer, read, factors) {
  const { n_heads: nHeads, n_kv_heads: nKvHeads } = model.config;
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

// Head h's part of a vector that holds `count` of them side by side.
function headPart(x, h, count) {
  const width = x.length / count;
  return x.subarray(h * width, (h + 1) * width);
}

// Queries or keys of one head, from their projection on: [{kind, rows}], the last of which is what meets.
function prepared(model, rows, norm) {
  const stages = [{ kind: 'projected', rows }];
  if (norm) stages.push({ kind: 'normed', rows: rows.map((x) => normalised(norm, x)) });
  if (model.config.position === 'rope') {
    stages.push({ kind: 'rotated', rows: stages.at(-1).rows.map((x, position) => rotated(model, x, position)) });
  }
  return stages;
}

// One head: softmax(q k / sqrt(width)) v for every query and the keys up to it, then its columns of W_O.
function attend(layer, h, g, queries, keys, values, factor) {
  const q = queries.at(-1).rows, k = keys.at(-1).rows, width = q[0].length;
  const weights = [], scores = [], out = [], added = [];
  q.forEach((query, t) => {
    const score = (s) => (t - s < layer.window ? dot(query, k[s]) / Math.sqrt(width) : -Infinity);
    scores[t] = Array.from({ length: t + 1 }, (_, s) => score(s));
    weights[t] = new Float32Array(q.length); // 0 for what comes later
    weights[t].set(softmax(scores[t]));
    out[t] = weighted(weights[t], values, t + 1, factor);
    added[t] = throughOutput(layer.o.weight, out[t], h * out[t].length);
  });
  return { g, queries, keys, values, scores, weights, out, added };
}

// The values of the first `count` keys times their weights, added up, times a factor.
function weighted(weights, values, count, factor) {
  const sum = new Float64Array(values[0].length);
  for (let s = 0; s < count; s++) for (let e = 0; e < sum.length; e++) sum[e] += weights[s] * values[s][e];
  return Float32Array.from(sum, (value) => value * factor);
}

// A head's output times its columns of W_O, from `first` on: what the head adds to the residual stream.
function throughOutput({ numbers, rows, columns }, out, first) {
  const added = new Float32Array(rows);
  for (let row = 0; row < rows; row++) {
    let sum = 0;
    for (let e = 0, at = row * columns + first; e < out.length; e++, at++) sum += numbers[at] * out[e];
    added[row] = sum;
  }
  return added;
}

function feedForward(config, layer, x) {
  const activation = ACTIVATIONS[config.activation], up = linear(layer.up, x);
  if (!layer.gate) return linear(layer.down, up.map(activation));
  const gate = linear(layer.gate, x);
  return linear(layer.down, up.map((value, i) => value * activation(gate[i])));
}

function checkRun(model, ids, silence, scale) {
  const { context, vocab_size: size } = model.config, names = new Set(headNames(model));
  if (!ids.length) throw new Error('the text has no tokens');
  if (ids.length > context) throw new Error(`${ids.length} tokens exceed the model's context of ${context}`);
  for (const id of ids) {
    if (!(Number.isInteger(id) && id >= 0 && id < size)) throw new Error(`token id ${id} lies outside 0 to ${size - 1}`);
  }
  for (const name of [...silence, ...Object.keys(scale)]) {
    if (!names.has(name)) throw new Error(`there is no head ${name}; the model has ${[...names].join(', ')}`);
  }
}

/**
 * @param {number} layer
 * @param {number} head
 * @returns {string} such as L0.H3
 */
export function headName(layer, head) { return `L${layer}.H${head}`; }

/**
 * @param {Model} model
 * @returns {string[]}
 */
export function headNames(model) {
  const { n_layers: nLayers, n_heads: nHeads } = model.config;
  return Array.from({ length: nLayers * nHeads }, (_, i) => headName(Math.floor(i / nHeads), i % nHeads));
}

// --- What comes next ---

/**
 * @param {ArrayLike<number>} logits
 * @param {number} [temperature]
 * @returns {number[]}
 */
export function probabilities(logits, temperature = 1) { return softmax(Array.from(logits, (logit) => logit / temperature)); }

/**
 * @param {number[]} chances
 * @returns {number} a token
 */
export function likeliest(chances) { return chances.reduce((best, chance, id) => (chance > chances[best] ? id : best), 0); }

function sample(chances, random = Math.random()) {
  let left = random;
  for (let id = 0; id < chances.length; id++) {
    left -= chances[id];
    if (left < 0) return id;
  }
  return likeliest(chances); // rounding left a little
}

/**
 * One token more. A text that fills the context loses its older half first, as in gpt/generate.py.
 * @param {Model} model
 * @param {number[]} ids
 * @param {Changes & {temperature?: number, random?: number}} [options]
 * @returns {{ids: number[], id: number, chances: number[]}}
 */
export function step(model, ids, { temperature = 0, random = Math.random(), ...changes } = {}) {
  const { context } = model.config, kept = ids.length > context ? ids.slice(-Math.max(1, context >> 1)) : ids;
  const chances = probabilities(forward(model, kept, changes).logits.at(-1), temperature || 1);
  const id = temperature ? sample(chances, random) : likeliest(chances);
  return { ids: [...kept, id], id, chances };
}

/**
 * A text as the model sees it: the token that begins a text, where there is one, then the text's own.
 * @param {Model} model
 * @param {string} text
 * @returns {{ids: number[], tokens: string[], pieces: {id: number, text: string, known: boolean}[]}}
 */
export function inputOf(model, text) {
  const { tokens } = model, pieces = encode(tokens, text);
  const begin = tokens.boundary === undefined ? [] : [{ id: tokens.boundary, text: '', known: true }];
  const all = [...begin, ...pieces];
  return { ids: all.map((piece) => piece.id), tokens: all.map((piece) => tokens.strings[piece.id]), pieces: all };
}

/**
 * What `window.headwise` offers to scripts and tests in a page with a model.
 * @param {Model} model
 */
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
