// --- The story of a prediction: choose a head, and the words that it looks at are tinted ---
//
// story.py has the fields of a `Story`; beside them come its sentences in every language, and `moves`: name of a head
// -> nats that come with it, above 0 towards the answer.

import { byId, element, language, makeButton, on, readData, remake, scoped, shadeEdge, svg, worded } from './base.js';

const LISTED = 16; // heads in the table, where the story tells of fewer: a round choice
const story = readData('story');
let chosen = story.told[0]; // a head, by its name

// All that is in words, in the page's language.
function draw() {
  for (const name of ['opening', 'closing']) {
    byId(name).replaceChildren(...story[name][language()].map((line) => element('p', '', ...strong(line))));
  }
  remake(byId('heads'), 'head', story.told.map((name, place) => {
    const sentence = strong(story.sentences[language()][place]);
    const button = makeButton(side(name), () => { chosen = name; draw(); }, ...sentence);
    button.dataset.head = name;
    button.setAttribute('aria-pressed', String(name === chosen));
    return button;
  }));
  byId('numbers').replaceChildren(table());
  shadeEdge(byId('numbers'));
  tint();
}

// A text in pieces, of which those between * and * are bold: "a *b* c" -> "a ", "b", " c".
function strong(text) { return text.split('*').map((piece, place) => (place % 2 ? element('b', '', piece) : piece)); }

// Which side a head is on: what it moves goes towards the answer, or against it.
function side(name) { return story.moves[name] < 0 ? 'against' : 'towards'; }

// Tints each word by how much the chosen head looks at it, and marks the one from which it looks.
function tint() {
  const { at, looks: pairs } = story.heads.find((part) => part.head === chosen), looks = new Map(pairs);
  for (const [place, token] of document.querySelectorAll('.token').entries()) {
    const weight = looks.get(place) || 0;
    token.classList.toggle('acts', place === at);
    token.style.setProperty('--look', `${Math.round(100 * weight)}%`);
    token.title = weight ? `${chosen}: ${weight.toFixed(2)}` : '';
  }
  for (const node of document.querySelectorAll('.node')) node.classList.toggle('chosen', node.dataset.head === chosen);
}

// The heads in numbers; '-' for what is not known.
function table() {
  const names = ['head', 'adds', 'carries', 'looks', 'without'];
  const top = element('tr', '', ...names.map((name) => scoped('col', worded('span', '', `why.column_${name}`))));
  const signed = (x) => (x === null ? '-' : (x > 0 ? '+' : '') + x.toFixed(2)); // toFixed brings a minus along
  const rows = story.heads.slice(0, Math.max(LISTED, story.told.length)).map((part) => {
    // The fields are called adds, brings and without; the column of `brings` is headed "carries".
    const looks = part.looks.map(([t, weight]) => `${story.tokens[t]} ${weight.toFixed(2)}`).join(', ');
    const texts = [part.head, signed(part.adds), signed(part.brings), looks, signed(part.without)];
    return element('tr', '', ...texts.map((text) => element('td', '', text)));
  });
  return element('table', '', element('thead', '', top), element('tbody', '', ...rows));
}

// The words of the text, and the answer behind them.
function writePrompt() {
  const words = story.tokens.map((text) => element('span', 'token', text));
  byId('prompt').replaceChildren(...words, element('span', 'answer', story.answer));
}

// Layers from below, heads where their numbers are in them, paths between, the answer on top; `against` is broken.
function drawPaths() {
  const width = 640, layerHeight = 84, margin = 40; // of the drawing, of a layer, and what stays free around
  const parts = new Map(story.heads.map((part) => [part.head, part])); // name -> `StoryHead`
  // The heads that are told of, and those at both ends of a path.
  const paths = story.paths.flatMap((path) => path.sender.split('+').map((sender) => ({ ...path, sender })));
  const names = [...new Set([...story.told, ...paths.flatMap((path) => [path.sender, path.reader])])].sort();
  // "encoder.L0.H3" -> "encoder.L0", and 3
  const layerOf = (name) => name.replace(/\.H\d+$/, ''), headOf = (name) => Number(/\d+$/.exec(name)[0]);
  const layers = story.layers.filter((layer) => names.some((name) => layerOf(name) === layer)); // with a head of these
  const nHeads = 1 + Math.max(...[...parts.keys()].map(headOf)); // the places across, those of the widest layer
  // Above the layers one more height has room for the answer; `top` is where the lines to it end.
  const height = layerHeight * (layers.length + 1) + margin, top = [width / 2, margin / 2 + 12];
  const level = (layer) => height - margin - layerHeight * (layer + 0.5); // y grows downwards
  const place = (name) => // [x, y] of a head
    [margin + (headOf(name) + 0.5) * (width - 2 * margin) / nHeads, level(layers.indexOf(layerOf(name)))];
  // A curve that leaves and comes upright; from a `strength` of 1 on it has the widest line, of 6.
  const line = ([x1, y1], [x2, y2], way, strength) => {
    const kind = strength < 0 ? `${way} against` : way;
    const middle = (y1 + y2) / 2, d = `M${x1} ${y1} C${x1} ${middle} ${x2} ${middle} ${x2} ${y2}`;
    return svg('path', { class: kind, d, 'stroke-width': 1 + 5 * Math.min(1, Math.abs(strength)) });
  };
  const node = (name) => {
    const [x, y] = place(name), { adds, brings } = parts.get(name);
    // A radius from 9 to 18 by what the head carries; where that was not measured, by what it adds, or moves.
    const r = 9 + 9 * Math.min(1, Math.abs(brings ?? adds ?? story.moves[name]));
    return svg('g', { class: `node ${side(name)}`, 'data-head': name }, svg('circle', { cx: x, cy: y, r }),
      svg('text', { x, y: y + r + 4 }, name)); // the name below it
  };
  const drawing = byId('drawing');
  drawing.setAttribute('viewBox', `0 0 ${width} ${height}`);
  drawing.append(...layers.flatMap((name, layer) => [
    svg('line', { class: 'layer', x1: margin, x2: width - margin, y1: level(layer), y2: level(layer) }),
    svg('text', { class: 'name', x: 4, y: level(layer) + 4 }, name)]));
  // What a head adds is drawn as a part of the answer's logit; where that is below 1 nat, as it is.
  const whole = Math.max(1, Math.abs(story.logit));
  const direct = names.filter((name) => parts.get(name).adds !== null);
  drawing.append(...direct.map((name) => line(place(name), top, 'direct', parts.get(name).adds / whole)));
  drawing.append(...paths.map((p) => line(place(p.sender), place(p.reader), `path ${p.at}`, p.effect)));
  drawing.append(...names.map(node), svg('text', { class: 'goal', x: top[0], y: top[1] - 4 }, story.answer));
}

on('language', draw);
writePrompt();
drawPaths();
draw();
