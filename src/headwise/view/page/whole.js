// --- The whole model in one picture: from the tokens to the next word, each part with its size ---
//
// A part is a small picture of what it gives, a row for each token; it opens to a larger one with a word about it.

import { byId, element, makeButton, on, say, visible, worded } from './base.js';
import { paint } from './colours.js';
import { engine, hasModel } from './engine.js';
import { openHead } from './head.js';
import { model, nameOf, typed } from './local.js';
import { headName } from './model.js';
import { pictureOf } from './shown.js';
import { bar, count, cut, largestOf, numberOf, percent, view } from './state.js';

const TOKENS = 12; // that are listed with their numbers, at most
let painted = []; // [canvas, a function that gives its picture] of each part

// Vectors as a picture, a row each: numbers above 0 have one colour, those below it another.
function rowsOf(rows) {
  const drawn = rows.flatMap((row) => [...row]);
  return { rows: rows.length, columns: rows[0].length, drawn, top: largestOf(drawn) || 1, diverging: true };
}

function canvasOf(picture) {
  const canvas = element('canvas');
  canvas.setAttribute('aria-hidden', 'true');
  painted.push([canvas, picture]);
  return canvas;
}

// A part that opens.
function part(key, values, picture) {
  const top = element('summary', '', worded('span', 'part-name', `whole.${key}`, values),
    worded('span', 'part-size', `whole.${key}_size`, values), picture ? canvasOf(picture) : '');
  return element('details', `whole-part ${key}`, top, worded('p', 'caption', `whole.${key}_how`, values));
}

// A layer: its heads side by side, and below them the feed-forward.
function layerPart(n, tokens) {
  const { n_heads: nHeads, d_model: width } = model.config, { q, up } = model.layers[n];
  const row = Array.from({ length: nHeads }, (_, h) => {
    const name = headName(n, h), number = numberOf.get(name);
    const button = makeButton('part-head', () => openHead(number), canvasOf(() => pictureOf(number)), name);
    button.setAttribute('aria-label', say('report.enlarge', { name }));
    button.dataset.name = name;
    return button;
  });
  return element('div', 'part-layer', worded('p', 'part-name', 'whole.layer', { n }),
    worded('p', 'part-size', 'whole.layer_size', { heads: nHeads, tokens, size: q.weight.rows / nHeads }),
    element('div', 'part-heads', ...row),
    part('mlp', { width, middle: up.weight.rows, tokens }, () => rowsOf(typed.less.layers[n].fed)));
}

// All parts, made anew for another text; one that was open stays open.
function makeWhole() {
  byId('whole').hidden = !hasModel() || !view.shown.typed || view.shown.unknown.includes(true);
  if (byId('whole').hidden) return;
  const { n_layers: nLayers, d_model: width, vocab_size: size } = model.config, tokens = typed.ids.length;
  const flow = byId('whole-flow'), open = [...flow.querySelectorAll('details')].map((box) => box.open);
  painted = [];
  const values = { tokens, width, size: count(size), parameters: count(model.parameters) };
  flow.replaceChildren(part('tokens', values), part('embedding', values, () => rowsOf(typed.less.layers[0].x)),
    ...Array.from({ length: nLayers }, (_, n) => layerPart(n, tokens)),
    part('stream', values, () => rowsOf(typed.less.final)), part('logits', values), element('p', 'part-next'));
  flow.querySelectorAll('details').forEach((box, at) => { box.open = Boolean(open[at]); });
  flow.querySelector('.tokens summary').append(...typed.pieces.slice(0, TOKENS).map(({ id, text, known }) =>
    element('span', 'part-token', `${cut(known ? nameOf(id) : visible(text), 14)} ${id}`)));
}

function paintWhole() {
  if (byId('whole').hidden) return;
  for (const [canvas, picture] of painted) paint(canvas, picture());
  byId('whole-flow').querySelectorAll('.part-head').forEach((button) =>
    button.classList.toggle('silent', view.changes.get(button.dataset.name) === 0));
}

// The end of the way: the likeliest tokens, and the word that comes next.
function showEnd() {
  const flow = byId('whole-flow'), found = byId('whole').hidden ? null : engine.next(view.at);
  flow.querySelectorAll('.part-bar').forEach((row) => row.remove());
  flow.querySelector('.part-next')?.replaceChildren();
  if (!found) return;
  const rows = [...found.rows].sort((a, b) => b[3] - a[3]);
  flow.querySelector('.logits summary').append(...rows.map(([, token, , chance]) =>
    element('span', 'part-bar', element('bdi', '', token), bar(chance, 'ours', 'span'))));
  const [[, word, , chance]] = rows;
  flow.querySelector('.part-next').append(element('bdi', '', word), element('span', 'part-size', percent(chance)));
}

on('words', makeWhole);
on('maps switches', paintWhole);
on('maps point language', showEnd);
