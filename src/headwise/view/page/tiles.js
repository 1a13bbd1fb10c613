// --- The heads of a live model: a tile each, the eight that look hardest, every card as it comes into sight ---

import { arrowOf, byId, element, makeButton, on, say, stopAt } from './base.js';
import { drawCard, lookWhile, makeCard, nameCard, watchCards } from './card.js';
import { openHead } from './head.js';
import { cut, distinct, factorOf, heads, inWords, kindName, kindWords, lookThrough, quoted, times,
  view } from './state.js';

// Kind of key (`_kind` in heads/look.py) -> the number of its colour, .r0 to .r9 in heads.css, as roles have them.
const KINDS = { first_token: 9, self: 7, previous_token: 0, next_token: 6, delimiter: 1, duplicate_token: 3,
  induction: 5, elsewhere: 4 };
const cards = []; // of all heads, by number
let tiles = [], inSight = new Set(); // of all heads, by number; the numbers of the cards in the window

export function makeHeads() {
  const layerOf = ({ name }) => name.replace(/\.H\d+$/, ''); // "encoder.L0.H3" -> "encoder.L0"
  for (const name of distinct(heads.map(layerOf))) makeLayer(name, heads.filter((head) => layerOf(head) === name));
  tiles = [...byId('tiles').querySelectorAll('.tile')];
  const labels = [...byId('tiles').querySelectorAll('.layer')].map((label) => label.textContent);
  byId('tiles').style.setProperty('--label', Math.max(...labels.map((label) => label.length))); // room for the longest
  tiles[0].tabIndex = 0; // one stop for Tab, the arrow keys do the rest
  byId('tiles').addEventListener('keydown', walkTiles);
  inSight = watchCards(cards, (number) => draw(cards[number]));
}

// A row of tiles, and at the end of the page the cards of the layer below its name.
function makeLayer(name, members) {
  const row = element('div', 'row'), box = element('div', 'layer-maps');
  row.style.setProperty('--across', Math.max(...heads.map((head) => head.head)) + 1); // as many as the widest layer has
  row.append(element('span', 'layer', name));
  for (const head of members) {
    const number = heads.indexOf(head);
    cards[number] = makeCard(number);
    row.append(makeTile(number));
    box.append(cards[number]);
  }
  byId('tiles').append(row);
  byId('all').append(element('h3', '', name), box);
}

// A tile: to point at it is to look through its head, a click enlarges it.
function makeTile(number) {
  const tile = makeButton('tile', undefined, () => openHead(number));
  tile.tabIndex = -1;
  tile.setAttribute('aria-haspopup', 'dialog');
  lookWhile(tile, number);
  tile.addEventListener('focus', () => { stopAt(tiles, tile); lookThrough(number); });
  tile.addEventListener('blur', () => lookThrough(-1));
  return tile;
}

// The arrow keys go from tile to tile, and up and down by as many as stand in a row.
function walkTiles(event) {
  const across = Number(byId('tiles').querySelector('.row').style.getPropertyValue('--across'));
  const step = arrowOf(event);
  if (!step) return;
  event.preventDefault();
  tiles[tiles.indexOf(event.target) + step[0] * across + step[1]]?.focus();
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
  byId('kinds').replaceChildren(...Object.keys(KINDS).filter((kind) => seen.includes(kind)).map((kind) => {
    const entry = element('span');
    entry.append(element('span', `swatch r${KINDS[kind]}`), kindName(kind));
    return entry;
  }));
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
    sayLook(card);
    return card;
  }));
  // The card of the same head gets the focus back, or else the first.
  if (focused) (box.querySelector(`[data-number="${focused}"] .picture`) ?? box.querySelector('.picture'))?.focus();
  const hard = new Set(looks.map(([number]) => number)); // their tiles have an edge
  tiles.forEach((tile, number) => tile.classList.toggle('hard', hard.has(number)));
  drawCards();
}

// Draws the eight, and of all heads those in sight.
function drawCards() {
  for (const card of [...byId('eight').children, ...[...inSight].map((number) => cards[number])]) draw(card);
}

// Writes below a card what its head looks at: one of the eight at which word, others the kind of key, or a factor.
function sayLook(card) {
  const number = Number(card.dataset.number), factor = factorOf(number);
  const words = card.dataset.words ?? (factor === 1 || factor === 0 ? kindWords(number) : times(factor));
  card.querySelector('.largest').textContent = words;
}

// Paints the map of a card, and lights the row of the word that is looked from.
function draw(card) {
  if (!view.shown.tokens.length) return; // nothing was read yet
  const picture = drawCard(card), square = card.querySelector('.square');
  square.classList.toggle('unlit', !picture || view.at < 0 || view.at >= picture.rows);
  square.style.setProperty('--rows', picture ? picture.rows : 1);
  square.style.setProperty('--lit', view.at);
}

on('read language', () => { showTiles(); cards.forEach(sayLook); });
on('changes language', () => cards.forEach(nameCard));
on('point language', showEight);
on('maps switches', drawCards);
