// --- The eight steps: each gives the elements of its page, from what `forward` kept ---

import { element, say, worded } from './base.js';
import { dot, forward, headName, probabilities } from './model.js';
import { MOST_FEATURES, MOST_KEYS, joinedSlices, lengthOf, shown, stripTable } from './walk_tables.js';
import { visible, walk } from './walk.js';

const LIKELIEST = 4; // tokens that are shown of those that are expected with the head, and as many without it

export const STEPS = ['text', 'vectors', 'products', 'scale', 'softmax', 'values', 'output', 'likelier'];

export const DRAW = { text: drawText, vectors: drawVectors, products: drawProducts, scale: drawScale, softmax: drawSoftmax,
  values: drawValues, output: drawOutput, likelier: drawLikelier };

function telling(key, values) { return worded('p', 'telling', `walk.${key}`, values); }

// What is chosen, and its numbers: q and k as they meet, after the last of their stages.
function facts() {
  const layer = walk.run.layers[walk.layer], head = layer.heads[walk.head], { at } = walk;
  return { layer, head, at, width: head.out[at].length, q: head.queries.at(-1).rows[at], k: head.keys.at(-1).rows };
}

function tokenAt(position) { return visible(walk.pieces[position]); }

// The keys that are shown, those with the largest weights, in their order; and the others.
function keysShown() {
  const { head, at } = facts(), weights = head.weights[at];
  const order = Array.from({ length: at + 1 }, (_, s) => s).sort((a, b) => weights[b] - weights[a]);
  const kept = order.slice(0, MOST_KEYS).sort((a, b) => a - b), others = order.slice(MOST_KEYS);
  const note = others.length ? [telling('some_keys', { count: at + 1, shown: kept.length })] : [];
  return { kept, others, note };
}

function keyRow(name, s, values, more = {}) {
  return { id: `${name}${s}`, label: `${name}${s}`, token: tokenAt(s), values, ...more };
}

function drawText() {
  const { layer, at } = facts(), { model } = walk;
  const rows = [];
  if (walk.layer === 0) {
    const row = ({ numbers, columns }, n) => numbers.slice(n * columns, (n + 1) * columns);
    rows.push({ id: 'token', label: say('walk.embedding'), token: tokenAt(at), values: row(model.tokenEmbedding, walk.ids[at]) });
    if (model.positionEmbedding) {
      rows.push({ id: 'place', label: say('walk.position', { at }), values: row(model.positionEmbedding, at) });
    }
  }
  const sum = rows.length === 2 && !model.embeddingNorm;
  rows.push({ id: 'x', label: 'x', values: layer.x[at],
    origin: sum ? (i) => from('sum_of_two', { a: rows[0].values[i], b: rows[1].values[i] }, [`token:${i}`, `place:${i}`]) : null });
  rows.push({ id: 'read', label: say('walk.read'), values: layer.read[at],
    origin: (i) => from('normed', { a: layer.x[at][i], norm: model.config.norm === 'rms' ? 'RMSNorm' : 'LayerNorm' }, [`x:${i}`]) });
  const key = walk.layer ? 'text_later' : model.positionEmbedding ? 'text_learned' : 'text_first';
  return [telling('asked', { token: tokenAt(at), at, seen: at + 1, count: walk.ids.length }), telling(key, { layer: walk.layer }),
    stripTable(say('walk.text'), rows)];
}

function drawVectors() {
  const { layer, head, at, width, q, k } = facts(), { config } = walk.model, { kept, note } = keysShown();
  const parts = layer.heads.map((each) => each.queries[0].rows[at]);
  const shared = config.n_kv_heads < config.n_heads;
  const nodes = [telling('query_is', { token: tokenAt(at), width: config.d_model, heads: config.n_heads, part: width }),
    joinedSlices(say('walk.queries'), 'q', parts, walk.head), telling(shared ? 'keys_shared' : 'keys_are', { shared: head.g })];
  const last = head.queries.length - 1;
  for (let stage = 0; stage < last; stage++) nodes.push(stageTable(stage, kept));
  if (last) nodes.push(telling(`stage_${head.queries[last].kind}`, { width }));
  return [...nodes, ...note, stripTable(say('walk.vectors'), [
    { id: 'q', label: 'q', token: tokenAt(at), values: q, origin: (i) => vectorOrigin('q', i), strong: true },
    ...kept.map((s) => keyRow('k', s, k[s], { origin: (i) => vectorOrigin(`k${s}`, i) })),
  ])];
}

// Queries and keys as they were before the last of their stages: projected, and normed where rotation follows.
function stageTable(stage, kept) {
  const { head, at, width } = facts(), { kind } = head.queries[stage], group = element('div');
  group.append(telling(`stage_${kind}`, { width }), stripTable(say('walk.vectors'), [
    { id: `${kind} q`, label: 'q', token: tokenAt(at), values: head.queries[stage].rows[at] },
    ...kept.map((s) => ({ ...keyRow('k', s, head.keys[stage].rows[s]), id: `${kind} k${s}` })),
  ]));
  return group;
}

function vectorOrigin(name, i) {
  const { head, width } = facts(), stages = head.queries, before = stages.at(-2)?.kind, { kind } = stages.at(-1);
  const half = width / 2;
  if (kind === 'rotated') {
    const partner = i < half ? i + half : i - half;
    return from('rotated', { i, partner }, [`${before} ${name}:${i}`, `${before} ${name}:${partner}`]);
  }
  if (kind === 'normed') return from('normed_head', { i }, [`${before} ${name}:${i}`]);
  return from(name === 'q' ? 'projected_q' : 'projected_k', { i }, []);
}

function drawProducts() {
  const { at, q, k, width } = facts(), { kept, note } = keysShown();
  const products = kept.map((s) => keyRow('qk', s, Array.from(q, (value, i) => value * k[s][i]), {
    label: `q k${s}`,
    origin: (i) => from('product', { a: q[i], b: k[s][i], first: `q[${i}]`, second: `k${s}[${i}]` }, [`q:${i}`, `k${s}:${i}`]),
    tail: { value: dot(q, k[s]), origin: () => from('sum_of_row', { count: width }, Array.from(q, (_, i) => `qk${s}:${i}`)) },
  }));
  return [telling('products_are', {}), ...note,
    stripTable(say('walk.vectors'), [{ id: 'q', label: 'q', token: tokenAt(at), values: q, strong: true },
      ...kept.map((s) => keyRow('k', s, k[s]))]),
    stripTable(say('walk.products'), products, { tail: 'q·k' })];
}

function drawScale() {
  const { head, at, width, q, k } = facts(), { kept, note } = keysShown(), root = Math.sqrt(width);
  const rows = kept.map((s) => keyRow('k', s, [dot(q, k[s]), head.scores[at][s]], {
    origin: (i) => i === 0 ? from('dot_of', { s }, []) : from('quotient', { a: dot(q, k[s]), b: root }, [`k${s}:0`]),
  }));
  return [telling('scale_is', { width, root: Number(root.toFixed(3)) }), ...note,
    stripTable(say('walk.scale'), rows, { columns: ['q·k', say('walk.score')], figures: true })];
}

function drawSoftmax() {
  const { head, at } = facts(), { kept, others, note } = keysShown(), scores = head.scores[at], top = Math.max(...scores);
  const power = (s) => Math.exp(scores[s] - top), total = scores.reduce((sum, _, s) => sum + power(s), 0);
  const rows = kept.map((s) => keyRow('s', s, [scores[s], scores[s] - top, power(s), head.weights[at][s]], {
    label: `k${s}`, bar: head.weights[at][s],
    origin: (i) => [from('score_of', { s }, []), from('difference', { a: scores[s], b: top }, [`s${s}:0`]),
      from('power', { a: scores[s] - top }, [`s${s}:1`]), from('quotient', { a: power(s), b: total }, [`s${s}:2`, 'total:tail'])][i],
  }));
  const left = others.reduce((sum, s) => sum + head.weights[at][s], 0);
  const best = kept.reduce((a, b) => (head.weights[at][b] > head.weights[at][a] ? b : a));
  return [telling('softmax_is', { top: shown(top), total: shown(total) }), ...note,
    stripTable(say('walk.softmax'), rows, { columns: [say('walk.score'), say('walk.shifted'), 'exp', say('walk.weight')], figures: true }),
    ...(others.length ? [telling('others_weight', { count: others.length, weight: shown(left, 3) })] : []),
    telling('looks_at', { token: tokenAt(at), most: tokenAt(best), weight: shown(head.weights[at][best], 2) })];
}

function drawValues() {
  const { head, at, width } = facts(), { kept, others, note } = keysShown(), weights = head.weights[at];
  const values = kept.map((s) => keyRow('v', s, head.values[s]));
  const rows = kept.map((s) => keyRow('w', s, head.values[s].map((value) => value * weights[s]), {
    label: `${shown(weights[s], 2)} v${s}`,
    origin: (i) => from('product', { a: weights[s], b: head.values[s][i], first: say('walk.weight'), second: `v${s}[${i}]` }, [`v${s}:${i}`]),
  }));
  if (others.length) {
    rows.push({ id: 'rest', label: say('walk.others'),
      values: head.out[at].map((sum, i) => sum - kept.reduce((part, s) => part + weights[s] * head.values[s][i], 0)) });
  }
  const parts = rows.map((row) => row.id);
  rows.push({ id: 'out', label: say('walk.sum'), values: head.out[at], strong: true,
    origin: (i) => from('sum_of_column', { count: parts.length }, parts.map((id) => `${id}:${i}`)) });
  return [telling('values_are', { width }), ...note, stripTable(say('walk.the_values'), values),
    telling('weighted_are', { head: headName(walk.layer, walk.head) }), stripTable(say('walk.values'), rows)];
}

function drawOutput() {
  const { layer, head, at, width } = facts(), out = head.out[at], { weight } = walk.model.layers[walk.layer].o;
  const column = (e) => Float32Array.from({ length: weight.rows }, (_, c) => weight.numbers[c * weight.columns + walk.head * width + e]);
  const order = Array.from(out, (_, e) => e).sort((a, b) => Math.abs(out[b]) - Math.abs(out[a]));
  const kept = order.slice(0, MOST_FEATURES).sort((a, b) => a - b);
  const rows = kept.map((e) => ({ id: `o${e}`, label: `out[${e}] ${shown(out[e], 2)}`,
    values: column(e).map((value) => value * out[e]),
    origin: (c) => from('product', { a: out[e], b: column(e)[c], first: `out[${e}]`, second: `W_O[${c},${walk.head * width + e}]` }, []) }));
  rows.push({ id: 'added', label: say('walk.adds', { head: headName(walk.layer, walk.head) }), values: head.added[at], strong: true,
    origin: (c) => from('sum_of_column', { count: width }, kept.map((e) => `o${e}:${c}`)) });
  const all = layer.heads.map((each, h) => ({ id: `h${h}`, label: headName(walk.layer, h), values: each.added[at],
    strong: h === walk.head, tail: { value: lengthOf(each.added[at]), origin: () => from('length', {}, []) } }));
  const { bias } = walk.model.layers[walk.layer].o;
  if (bias) all.push({ id: 'bias', label: 'b', values: bias });
  const { x, middle } = layer, parts = [...all.map((row) => row.id), 'x'];
  all.push({ id: 'x', label: 'x', values: x[at] });
  all.push({ id: 'new', label: say('walk.new_x'), values: middle[at], strong: true,
    origin: (c) => from('sum_of_column', { count: parts.length }, parts.map((id) => `${id}:${c}`)) });
  const outputs = layer.heads.map((each) => each.out[at]);
  return [telling('joined_is', { heads: layer.heads.length }), joinedSlices(say('walk.outputs'), 'out', outputs, walk.head),
    telling('through_is', { width }), ...(kept.length < width ? [telling('some_features', { count: width, shown: kept.length })] : []),
    stripTable(say('walk.output'), rows), telling('residual_is', {}), stripTable(say('walk.new_x'), all, { tail: say('walk.length') })];
}

// The model once more without this head: what it makes likelier is the difference.
function drawLikelier() {
  const { at } = facts(), name = headName(walk.layer, walk.head);
  const whole = probabilities(walk.run.logits[at]);
  const without = probabilities(forward(walk.model, walk.ids, { silence: [name] }).logits[at]);
  const ids = Array.from(whole, (_, id) => id), change = (id) => whole[id] - without[id];
  const rise = ids.reduce((best, id) => (change(id) > change(best) ? id : best));
  const fall = ids.reduce((best, id) => (change(id) < change(best) ? id : best));
  const most = (chances) => [...ids].sort((a, b) => chances[b] - chances[a]).slice(0, LIKELIEST);
  const kept = [...new Set([...most(whole), ...most(without), rise, fall])].sort((a, b) => whole[b] - whole[a]);
  const word = (id) => visible({ text: walk.model.tokens.shown[id] });
  const rows = kept.map((id) => ({ id: `p${id}`, label: '', token: word(id), values: [whole[id], without[id], change(id)],
    bar: [whole[id], without[id]],
    origin: (i) => i < 2 ? from(i ? 'chance_without' : 'chance_with', { head: name }, [])
      : from('difference', { a: whole[id], b: without[id] }, [`p${id}:0`, `p${id}:1`]) }));
  const nodes = [telling('likelier_is', { head: name, token: tokenAt(at) }),
    stripTable(say('walk.likelier'), rows, { columns: [say('walk.with'), say('walk.without'), say('walk.change')], figures: true })];
  if (change(rise) >= 0.0005) { // else both have the same three decimals
    nodes.push(telling('rises', { token: word(rise), before: shown(without[rise], 3), after: shown(whole[rise], 3), head: name }));
  } else nodes.push(telling('no_change', { head: name }));
  return nodes;
}

// Where a number came from: a sentence with the numbers, rounded, and the cells to mark.
function from(key, values, cells) {
  const rounded = Object.fromEntries(Object.entries(values).map(([name, value]) =>
    [name, typeof value === 'number' && !Number.isInteger(value) ? shown(value) : value]));
  return { key: `walk.from_${key}`, values: rounded, cells };
}
