// --- All heads: a tile for each, the eight that look hardest, every map as it comes into sight, and one enlarged ---
//
// Heads are numbers, their places in the list `heads`; `look` (look_state.js) is what is shown now. A head is drawn
// three times: as a tile, a coloured square; as a card, with its map; and enlarged, in a dialog.

import { byId, element, say } from './page/base.js';
import { ask } from './look_ask.js';
import { changesChanged } from './look.js';
import { keepMaps, labelOf, look, maps } from './look_state.js';
import { markWords } from './look_words.js';
import { colourOf, inkOn, paint } from './report_colours.js';
import { listenToFactor, setFactor, showFactor, times } from './report_factor.js';
import { cut, data, distinct, heads, inWords, numberOf, percent, quoted, roleName } from './report_state.js';

// The kind of key that a head mostly looks at (`_kind` in heads/look.py) -> the number of its colour, .r0 to .r9 in
// report_roles.css, where roles have the same.
const SIGNS = {
  first_token: 9, self: 7, previous_token: 0, next_token: 6, delimiter: 1, duplicate_token: 3, induction: 5,
  elsewhere: 4,
};
const WRITTEN = 40; // tokens: up to so many an enlarged map is a table of numbers, and beyond it a picture
const FAINT = 0.1; // the last colour is at least for this weight, so that a map of faint weights stays pale
const wanted = new Set(); // maps to be asked for: 'a:7' is that of head 7 on text a
const inSight = new Set(); // numbers of the heads whose cards are in the window
const cards = []; // of all heads, by number
let tiles = [], watcher = null; // of all heads, by number; what tells which cards come into sight
let asking = false; // is an answer on maps awaited?

export function makeHeads() {
  for (const part of distinct(heads.map((head) => head.part))) {
    const members = heads.filter((head) => head.part === part);
    for (const layer of distinct(members.map((head) => head.layer))) makeLayer(
      members.filter((head) => head.layer === layer),
    );
  }
  tiles = [...byId('tiles').querySelectorAll('.tile')];
  const labels = [...byId('tiles').querySelectorAll('.layer')].map((label) => label.textContent);
  byId('tiles').style.setProperty('--label', Math.max(...labels.map((label) => label.length))); // room for the longest
  tiles[0].tabIndex = 0; // one stop for Tab, the arrow keys do the rest
  byId('tiles').addEventListener('keydown', walkTiles);
  // 200 pixels before a card comes into sight, its map is asked for.
  watcher = new IntersectionObserver(sighted, { rootMargin: '200px' });
  cards.forEach((card) => watcher.observe(card));
  listenToFactor(() => heads[look.open].name, (name, factor) => scale(numberOf.get(name), factor));
}

// A row of tiles, and at the end of the page the cards of the layer below its name.
function makeLayer(members) {
  const row = element('div', 'row'), box = element('div', 'layer-maps');
  const name = members[0].name.replace(/\.H\d+$/, ''); // "encoder.L0.H3" -> "encoder.L0"
  row.style.setProperty('--across', Math.max(...heads.map((head) => head.head)) + 1); // as many as the widest layer has
  row.append(element('span', 'layer', name));
  for (const head of members) {
    const number = heads.indexOf(head), card = makeCard(number);
    row.append(makeTile(number));
    cards[number] = card;
    box.append(card);
  }
  byId('tiles').append(row);
  byId('all').append(element('h3', '', name), box);
}

// A tile: to point at it is to look through its head, a click enlarges it.
function makeTile(number) {
  const tile = element('button', 'tile');
  tile.type = 'button';
  tile.tabIndex = -1;
  tile.dataset.number = number;
  tile.setAttribute('aria-haspopup', 'dialog');
  tile.addEventListener('click', () => openLarge(number));
  // A finger has no place before it touches, and a touch is a click.
  tile.addEventListener('pointerenter', (event) => { if (event.pointerType === 'mouse') lookThrough(number); });
  tile.addEventListener('pointerleave', () => lookThrough(-1));
  tile.addEventListener('focus', () => {
    for (const other of tiles) other.tabIndex = other === tile ? 0 : -1;
    lookThrough(number);
  });
  tile.addEventListener('blur', () => lookThrough(-1));
  return tile;
}

// The arrow keys go from tile to tile, and up and down by as many as stand in a row.
function walkTiles(event) {
  const across = Number(byId('tiles').querySelector('.row').style.getPropertyValue('--across'));
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -across, ArrowDown: across }[event.key];
  if (!step) return;
  event.preventDefault();
  tiles[tiles.indexOf(event.target) + step]?.focus();
}

// A card: its picture silences the head, the name below enlarges it.
function makeCard(number) {
  const card = element('div', 'head'), picture = element('button', 'picture');
  // 'unlit' until it is known which row to light.
  const name = element('button', 'name', heads[number].name), frame = element('span', 'square unlit');
  card.dataset.number = number;
  picture.type = name.type = 'button';
  name.append(element('span', 'larger', '⤢'));
  name.setAttribute('aria-haspopup', 'dialog');
  frame.append(element('canvas'), element('span', 'lit'), element('span', 'hush')); // map, row of the word, "silenced"
  picture.append(frame);
  card.append(picture, name, element('span', 'words'));
  nameCard(card);
  // A click on a changed head, silent or scaled, leaves it as it is in the model.
  picture.addEventListener('click', () => scale(number, look.changes.has(heads[number].name) ? 1 : 0));
  name.addEventListener('click', () => openLarge(number));
  card.addEventListener('pointerenter', (event) => { if (event.pointerType === 'mouse') lookThrough(number); });
  card.addEventListener('pointerleave', () => lookThrough(-1));
  picture.addEventListener('focus', () => lookThrough(number));
  picture.addEventListener('blur', () => lookThrough(-1));
  return card;
}

// What its two buttons do, for those who do not see them.
function nameCard(card) {
  const { name } = heads[card.dataset.number], changed = look.changes.has(name);
  const picture = card.querySelector('.picture');
  picture.setAttribute('aria-pressed', String(changed));
  picture.setAttribute('aria-label', say(changed ? 'report.wake' : 'report.silence', { name }));
  card.querySelector('.name').setAttribute('aria-label', say('report.enlarge', { name }));
}

// Sees the sentence through a head; -1: through none.
function lookThrough(number) {
  look.through = number;
  if (number >= 0) want(number);
  markWords();
}

// Gives a head another factor: 0 silences it, 1 leaves it as it is.
export function scale(number, factor) {
  const { name } = heads[number];
  setFactor(look.changes, name, factor);
  changesChanged();
}

// --- Maps, asked for together and only when they are needed ---

// Asks for a head's maps, where they are not there yet. The question waits for the end of what runs now, so that
// heads that are wanted together are asked for together.
function want(number) {
  for (const slot of look.differ ? ['a', 'b'] : ['a'])
    if (!maps.has(`${slot}:${number}`)) wanted.add(`${slot}:${number}`);
  if (!asking && wanted.size) {
    asking = true;
    setTimeout(fetchMaps, 0);
  }
}

// Asks one question for each text, with the numbers of all heads whose maps are wanted, and draws what comes.
async function fetchMaps() {
  const version = look.version; // another one in the end means that a text was read in between: these maps are old
  const asked = [...wanted];
  wanted.clear(); // what is wanted while these come is asked for in the end
  for (const slot of ['a', 'b']) {
    const numbers = asked.filter((key) => key.startsWith(slot)).map((key) => Number(key.slice(2)));
    if (!numbers.length) continue;
    const answer = await ask({ do: 'maps', slot, heads: numbers });
    if (version === look.version) keepMaps(slot, answer);
  }
  asking = wanted.size > 0;
  if (asking) setTimeout(fetchMaps, 0);
  if (version !== look.version) {
    drawAgain(); // which asks for the new ones
    return;
  }
  drawCards();
  markWords();
  if (look.open >= 0) drawLarge();
}

// Cards came into sight or went out of it.
function sighted(entries) {
  for (const entry of entries) {
    const number = Number(entry.target.dataset.number);
    if (entry.isIntersecting) inSight.add(number);
    else inSight.delete(number);
  }
  if (look.words.length) inSight.forEach(want);
  drawCards();
}

// After a reading: what is in sight is drawn anew, and the rest when it comes there.
export function drawAgain() {
  wanted.clear();
  cards.forEach(nameCard);
  inSight.forEach(want);
  showTiles();
  showHeads();
  if (look.open >= 0) {
    want(look.open);
    drawLarge();
  }
}

// What is painted of a head: its map; where two texts are compared, and both maps are there, a minus b. Null while
// the map is not there, and for a head that did not run, whose map has no rows.
// `top` is the weight of the last colour.
function pictureFor(number) {
  const map = maps.get(`a:${number}`), other = maps.get(`b:${number}`);
  if (!map || !map.rows) return null;
  if (look.differ && other) {
    const drawn = map.weights.map((weight, at) => weight - other.weights[at]);
    return { ...map, drawn, diverging: true, top: drawn.reduce((most, x) => Math.max(most, Math.abs(x)), FAINT) };
  }
  // Without the first row, the first column and the diagonal, whose large weights would leave all others pale. Cell
  // `at` is in row at / columns; on the diagonal lie 0, columns + 1, 2 (columns + 1), ...
  const hard = map.weights.filter((_, at) => at >= map.columns && at % map.columns && at % (map.columns + 1));
  return {
    ...map, drawn: map.weights, diverging: false, top: hard.reduce((most, weight) => Math.max(most, weight), FAINT),
  };
}

// Draws the eight, and of all heads those in sight.
function drawCards() {
  const shown = [...byId('eight').children, ...[...inSight].map((number) => cards[number])];
  for (const card of shown) drawCard(card);
}

// Paints the map of a card, lights the row of the word that is looked from, and writes what stands below.
function drawCard(card) {
  const number = Number(card.dataset.number), picture = pictureFor(number);
  const factor = look.changes.get(heads[number].name); // undefined where it is not changed
  const square = card.querySelector('.square');
  if (picture) paint(card.querySelector('canvas'), picture);
  square.classList.toggle('unlit', !picture || look.at < 0 || look.at >= picture.rows);
  square.style.setProperty('--rows', picture ? picture.rows : 1);
  square.style.setProperty('--lit', look.at);
  card.classList.toggle('silent', factor === 0);
  card.querySelector('.hush').textContent = factor === 0 ? say('report.silenced') : '';
  nameCard(card);
  const [kind, part] = look.kinds[number] ?? ['elsewhere', 0]; // no kinds before the first text was read
  if (card.parentElement.id === 'eight') return; // there it says what the head looks at: `showHeads` has written it
  // Below it a factor, or else what the head looks at most and how much of its weight goes there.
  card.querySelector('.words').textContent = factor ? times(factor) : part ? `${kindName(kind)} ${percent(part)}` : '';
}

// --- The overview ---

// Most kinds have the names of roles.
function kindName(kind) { return kind === 'elsewhere' ? say('look.elsewhere') : roleName(kind); }

// Colours each tile by the kind of key that its head looks at most, the stronger the more of its weight goes there;
// and says what the colours stand for.
function showTiles() {
  tiles.forEach((tile) => {
    const number = Number(tile.dataset.number), { name } = heads[number];
    const [kind, part] = look.kinds[number] ?? ['elsewhere', 0];
    tile.className = `tile r${SIGNS[kind]}`; // which also takes the edge away that `showHeads` gives to some
    tile.style.setProperty('--strength', Math.min(1, part).toFixed(2));
    tile.classList.toggle('silent', look.changes.get(name) === 0);
    tile.title = `${name}: ${kindName(kind)} ${percent(part)}`;
    tile.setAttribute('aria-label', tile.title);
  });
  const seen = distinct(look.kinds.map(([kind]) => kind));
  byId('kinds').replaceChildren(...Object.keys(SIGNS).filter((kind) => seen.includes(kind)).map((kind) => {
    const entry = element('span');
    entry.append(element('span', `swatch r${SIGNS[kind]}`), kindName(kind));
    return entry;
  }));
}

// The eight heads that look hardest from the word, or that differ most between two texts.
export function showHeads() {
  const list = (look.differ ?? look.hardest)[look.at] ?? [], box = byId('eight'); // [number of the head, key, weight]
  const focused = box.contains(document.activeElement) && document.activeElement.closest('.head').dataset.number;
  const title = look.differ ? 'look.eight_differ' : 'look.eight';
  byId('eight-title').textContent = look.at < 0 ? '' : say(title, { token: quoted(labelOf(look.words[look.at])) });
  const shown = list.filter(([, , weight]) => weight > 0);
  box.replaceChildren(...shown.map(([number, key, weight]) => {
    const card = makeCard(number);
    card.querySelector('.words').textContent = `${quoted(cut(labelOf(look.words[key])))} ${inWords(weight)}`;
    want(number);
    return card;
  }));
  // The card of the same head gets the focus that the old one had;
  // where it is not among the eight any more, the first.
  if (focused) (box.querySelector(`[data-number="${focused}"] .picture`) ?? box.querySelector('.picture'))?.focus();
  const hard = new Set(shown.map(([number]) => number)); // their tiles have an edge
  tiles.forEach((tile) => tile.classList.toggle('hard', hard.has(Number(tile.dataset.number))));
  drawCards();
}

// --- One head, enlarged ---

export function openLarge(number) { // also from one enlarged head to the next
  look.open = number;
  if (!byId('large').open) byId('large').showModal();
  byId('large-silence').focus();
  want(number);
  drawLarge();
}

export function closeLarge() { look.open = -1; }

// The next head (1), or the one before (-1); behind the last comes the first.
export function stepLarge(step) { openLarge((look.open + step + heads.length) % heads.length); }

// The head that is enlarged: its map as a table of numbers, or, of a long text, as a picture.
function drawLarge() {
  const { name } = heads[look.open], picture = pictureFor(look.open), factor = look.changes.get(name) ?? 1;
  byId('large-title').textContent = name;
  showFactor(name, factor);
  const [kind, part] = look.kinds[look.open] ?? ['elsewhere', 0];
  byId('large-says').textContent = picture ? `${kindName(kind)}: ${percent(part)}` : '';
  if (!picture) byId('large-map').replaceChildren();
  else if (Math.max(picture.rows, picture.columns) <= WRITTEN) byId('large-map').replaceChildren(writtenMap(picture));
  else {
    const canvas = element('canvas');
    paint(canvas, picture);
    canvas.style.width = `${Math.max(560, 3 * picture.columns)}px`; // three pixels a token at least
    canvas.style.imageRendering = 'pixelated';
    byId('large-map').replaceChildren(canvas);
  }
}

// A map as a table: queries down, keys across, and each weight on its colour.
function writtenMap(picture) {
  const table = element('table'), top = element('tr');
  const label = (word) => (word ? cut(labelOf(word)) : ''); // in cross attention there may be more keys than words
  const name = (scope, text, here) => {
    const cell = element('th', here ? 'here' : '', text);
    cell.scope = scope;
    return cell;
  };
  top.append(element('td'));
  for (let key = 0; key < picture.columns; key++) {
    top.append(name('col', label(look.words[key]), false));
  }
  table.createTHead().append(top);
  const body = table.createTBody();
  for (let row = 0; row < picture.rows; row++) {
    const line = element('tr');
    line.append(name('row', label(look.words[row]), row === look.at));
    for (let key = 0; key < picture.columns; key++) {
      const weight = picture.drawn[row * picture.columns + key];
      const colour = colourOf(weight, picture.top, picture.diverging);
      // What two decimals would round to 0.00 stays empty.
      const cell = element('td', '',
        Math.abs(weight) < 0.005 ? '' : `${weight < 0 ? '−' : ''}${Math.abs(weight).toFixed(2)}`);
      cell.style.backgroundColor = `rgb(${colour})`;
      cell.style.color = inkOn(colour);
      line.append(cell);
    }
    body.append(line);
  }
  return table;
}
