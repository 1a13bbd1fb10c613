// --- The heads of a live model: a tile each, the eight that look hardest, every card as it comes into sight ---

import { byId, element, makeButton, on, say, walkable } from './base.js';
import { drawCard, lookWhile, makeCard } from './card.js';
import { openHead } from './head.js';
import { cut, distinct, factorOf, heads, inWords, kindName, kindWords, lookThrough, quoted, view } from './state.js';

// Kind of key (`_kind` in heads/look.py) -> the number of its colour, .r0 to .r9 in heads.css, as roles have them.
const KINDS = { first_token: 9, self: 7, previous_token: 0, next_token: 6, delimiter: 1, duplicate_token: 3,
  induction: 5, elsewhere: 4 };
const tiles = []; // of all heads, by number

export function makeHeads() {
  const layerOf = ({ name }) => name.replace(/\.H\d+$/, ''); // "encoder.L0.H3" -> "encoder.L0"
  const layers = distinct(heads.map(layerOf));
  const rows = layers.map((name) => makeLayer(name, [...heads.keys()].filter((at) => layerOf(heads[at]) === name)));
  byId('tiles').style.setProperty('--label', Math.max(...layers.map((name) => name.length))); // room for the longest
  tiles[0].tabIndex = 0; // one stop for Tab, the arrow keys do the rest
  walkable(byId('tiles'), () => rows);
}

// A row of tiles, which is given back, and at the end of the page the cards of the layer below its name.
function makeLayer(name, numbers) {
  const row = numbers.map(makeTile), box = element('div', 'row', element('span', 'layer', name), ...row);
  box.style.setProperty('--across', Math.max(...heads.map((head) => head.head)) + 1); // as many as the widest layer has
  byId('tiles').append(box);
  byId('all').append(element('h3', '', name), element('div', 'layer-maps', ...numbers.map(makeCard)));
  return row;
}

// A tile: to point at it is to look through its head, a click enlarges it.
function makeTile(number) {
  const tile = makeButton('tile', () => openHead(number));
  tile.tabIndex = -1;
  tile.setAttribute('aria-haspopup', 'dialog');
  lookWhile(tile, number);
  tile.addEventListener('focus', () => lookThrough(number));
  tile.addEventListener('blur', () => lookThrough(-1));
  tiles[number] = tile;
  return tile;
}

// Colours each tile by the kind of key that its head looks at most, the stronger the more, and explains the colours.
function showTiles() {
  tiles.forEach((tile, number) => {
    const [kind, part] = view.kinds[number] ?? ['elsewhere', 0];
    for (const sign of Object.values(KINDS)) tile.classList.toggle(`r${sign}`, sign === KINDS[kind]);
    tile.style.setProperty('--strength', Math.min(1, part).toFixed(2));
    tile.classList.toggle('silent', factorOf(number) === 0);
    tile.title = tile.ariaLabel = `${heads[number].name}: ${kindWords(number)}`;
  });
  const seen = distinct(view.kinds.map(([kind]) => kind));
  byId('kinds').replaceChildren(...Object.keys(KINDS).filter((kind) => seen.includes(kind))
    .map((kind) => element('span', '', element('span', `swatch r${KINDS[kind]}`), kindName(kind))));
}

// The eight heads that look hardest from the word, or that differ most between two texts.
function showEight() {
  const box = byId('eight'), { tokens } = view.shown; // a look is [number of the head, key, weight]
  const looks = ((view.differ ?? view.hardest)[view.at] ?? []).filter(([, , weight]) => weight > 0);
  const focused = box.contains(document.activeElement) && document.activeElement.closest('.head').dataset.number;
  const title = view.differ ? 'look.eight_differ' : 'look.eight';
  byId('eight-title').textContent = tokens[view.at] === undefined ? '' : say(title, { token: quoted(tokens[view.at]) });
  box.replaceChildren(...looks.map(([number, key, weight]) => {
    const card = makeCard(number);
    card.dataset.words = `${quoted(cut(tokens[key] ?? ''))} ${inWords(weight)}`;
    drawCard(card); // at once: they come anew with every word that is pointed at
    return card;
  }));
  // The card of the same head gets the focus back, or else the first.
  if (focused) (box.querySelector(`[data-number="${focused}"] .picture`) ?? box.querySelector('.picture'))?.focus();
  const hard = new Set(looks.map(([number]) => number)); // their tiles have an edge
  tiles.forEach((tile, number) => tile.classList.toggle('hard', hard.has(number)));
}

on('read language', showTiles);
on('point language', showEight);
