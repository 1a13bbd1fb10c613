// --- The story of a prediction: choose a head, and the words that it looks at are tinted ---
//
// story.py has the fields of a `Story`; beside them come its sentences in every language, and `moves`: name of a head
// -> nats that come with it, above 0 towards the answer.

import { byId, element, language, on, readData, remake, shadeEdge, svg, worded } from './base.js';

const LISTED = 16; // heads in the table, where the story tells of fewer: a round choice
const story = readData('story');
let chosen = story.told[0]; // a head, by its name

// All that is in words, in the page's language.
function draw() {
  for (const name of ['opening', 'closing']) {
    byId(name).replaceChildren(...story[name][language()].map((line) => strong('p', line)));
  }
  remake(byId('heads'), 'head', story.told.map((name, place) => {
    const button = strong('button', story.sentences[language()][place]);
    button.type = 'button';
    button.dataset.head = name;
    button.className = side(name);
    button.setAttribute('aria-pressed', String(name === chosen));
    button.addEventListener('click', () => { chosen = name; draw(); });
    return button;
  }));
  byId('numbers').replaceChildren(table());
  shadeEdge(byId('numbers'));
  tint();
}

// An element with a text, never as HTML, in which what stands between * and * is bold.
function strong(tag, text) {
  const made = element(tag);
  // "a *b* c" -> "a ", "b", " c": every other piece stands between marks.
  text.split('*').forEach((piece, place) => made.append(place % 2 ? element('b', '', piece) : piece));
  return made;
}

// Which side a head is on: what it moves goes towards the answer, or against it.
const side = (name) => (story.moves[name] < 0 ? 'against' : 'towards');

// Tints each word by how much the chosen head looks at it, and marks the one from which it looks.
function tint() {
  const { at, looks: pairs } = story.heads.find((part) => part.head === chosen), looks = new Map(pairs);
  for (const token of document.querySelectorAll('.token')) {
    const place = Number(token.dataset.token), weight = looks.get(place) || 0;
    token.classList.toggle('acts', place === at);
    token.style.setProperty('--look', `${Math.round(100 * weight)}%`);
    token.title = weight ? `${chosen}: ${weight.toFixed(2)}` : '';
  }
  for (const node of document.querySelectorAll('.node')) node.classList.toggle('chosen', node.dataset.head === chosen);
}

// The heads in numbers; '-' for what is not known.
function table() {
  const made = element('table'), head = made.createTHead().insertRow();
  for (const name of ['head', 'adds', 'carries', 'looks', 'without']) {
    const cell = worded('th', '', `why.column_${name}`);
    cell.scope = 'col';
    head.append(cell);
  }
  const signed = (x) => (x === null ? '-' : (x > 0 ? '+' : '') + x.toFixed(2)); // toFixed brings a minus along
  const body = made.createTBody();
  for (const part of story.heads.slice(0, Math.max(LISTED, story.told.length))) {
    // The fields are called adds, brings and without; the column of `brings` is headed "carries".
    const row = body.insertRow(), looks = part.looks.map(([t, weight]) => `${story.tokens[t]} ${weight.toFixed(2)}`);
    for (const text of [part.head, signed(part.adds), signed(part.brings), looks.join(', '), signed(part.without)]) {
      row.insertCell().textContent = text;
    }
  }
  return made;
}

// The words of the text, and the answer behind them.
function writePrompt() {
  const words = story.tokens.map((text, t) => {
    const token = element('span', 'token', text);
    token.dataset.token = t;
    return token;
  });
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
  const place = (name) => { // [x, y] of a head
    return [margin + (headOf(name) + 0.5) * (width - 2 * margin) / nHeads, level(layers.indexOf(layerOf(name)))];
  };
  // A curve that leaves and comes upright; from a `strength` of 1 on it has the widest line, of 6.
  const line = ([x1, y1], [x2, y2], way, strength) => {
    const kind = strength < 0 ? `${way} against` : way;
    const middle = (y1 + y2) / 2, d = `M${x1} ${y1} C${x1} ${middle} ${x2} ${middle} ${x2} ${y2}`;
    return svg('path', { class: kind, d, 'stroke-width': 1 + 5 * Math.min(1, Math.abs(strength)) });
  };
  const node = (name) => {
    const [x, y] = place(name), { adds, brings } = parts.get(name), group = svg('g', { class: `node ${side(name)}` });
    // A radius from 9 to 18 by what the head carries; where that was not measured, by what it adds, or moves.
    const r = 9 + 9 * Math.min(1, Math.abs(brings ?? adds ?? story.moves[name]));
    group.dataset.head = name;
    group.append(svg('circle', { cx: x, cy: y, r }), svg('text', { x, y: y + r + 4 }, name)); // the name below it
    return group;
  };
  const drawing = byId('drawing');
  drawing.setAttribute('viewBox', `0 0 ${width} ${height}`);
  for (let layer = 0; layer < layers.length; layer++) {
    const y = level(layer);
    drawing.append(svg('line', { class: 'layer', x1: margin, x2: width - margin, y1: y, y2: y }));
    drawing.append(svg('text', { class: 'name', x: 4, y: y + 4 }, layers[layer]));
  }
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
