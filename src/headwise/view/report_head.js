// --- The large view: a head enlarged, alone or beside another ---
//
// Heads are numbers, their places in the list `heads`. What is shown now stands in `view` (report_state.js):
// view.open is the head that is enlarged, view.row and view.column its chosen cell, view.at the token that is looked
// at. Where the text is `shown.exact`, each row of a map is one token, so that the row and the token are the same.

import { byId, element, isShortcut, say } from './page/base.js';
import { changeAddress, leaveAddress } from './report_address.js';
import { colourOf, drawLegend, inkOn } from './report_colours.js';
import { showFactor } from './report_factor.js';
import { matches } from './report_filter.js';
import { badge } from './report_grid.js';
import { drawPane, fillPane, makePane, revealCell } from './report_map.js';
import { hasModel } from './report_model.js';
import { pictureOf, rowOf, wordsForCell } from './report_pictures.js';
import { NAMED, lookThrough, lookWords, pin, point, stopAt, tint } from './report_sentence.js';
import { lists, receivedBy, shown } from './report_shown.js';
import { data, figure, heads, intervalIn, inWords, keyOf, named, numberOf, putSentence, quoted, roleName, sayOr, scoped,
  view } from './report_state.js';
import { hideTip } from './report_table.js';
import { showWalk } from './report_walk.js';

let panes = []; // two: the head's map, and the one beside it (`makePane`)
let largeWords = []; // the buttons of the text beside the map, one for each token

export function openHead(number) {
  hideTip();
  view.opener = document.activeElement; // gets the focus back when the view is closed
  lookThrough(number);
  view.open = number;
  if (!panes.length) panes = [...document.querySelectorAll('.pane')].map(makePane);
  byId('large').showModal();
  byId('large-title').focus();
  beginHead();
  panes.forEach(revealCell);
  changeAddress(true); // a step that Back takes again
}

// Where the reader begins: at the token that is looked at, or at the last one.
export function beginHead() {
  const picture = pictureOf(view.open);
  if (picture) {
    const row = rowOf(view.at, view.open, picture);
    view.row = row >= 0 ? row : picture.rows - 1;
    view.column = strongest(picture, view.row);
  }
  if (shown.exact && view.at < 0) view.at = view.row;
  showHead();
}

// The column of the strongest weight of a row.
function strongest(picture, row) {
  const weights = picture.drawn.slice(row * picture.columns, (row + 1) * picture.columns);
  return weights.indexOf(Math.max(...weights));
}

// Everything of the large view, made anew.
export function showHead() {
  const head = heads[view.open];
  byId('large-title').textContent = head.name;
  byId('large-roles').replaceChildren(...head.roles.map(badge));
  putSentence(byId('large-says'), head);
  showOffers();
  showSilence();
  showNumbers(head);
  makeLargeText();
  showPanes();
  followPoint();
  showWalk();
}

// What can stand beside the head: nothing (''), or any other head by its name.
function showOffers() {
  const offers = [['', say('report.beside_none')]]; // [value, text]
  for (const head of heads) if (head !== heads[view.open]) offers.push([head.name, head.name]);
  const list = byId('beside');
  list.replaceChildren(...offers.map(([value, text]) => {
    const offer = element('option', '', text);
    offer.value = value;
    return offer;
  }));
  if (!offers.some(([value]) => value === view.beside)) view.beside = ''; // the head now open stood beside the last one
  list.value = view.beside;
}

// The maps: that of the head and, where one is chosen, the one beside it.
function showPanes() {
  const [first, second] = panes, two = view.beside !== '';
  byId('large').classList.toggle('two', two);
  second.box.hidden = !two;
  fillPane(first, view.open);
  if (two) fillPane(second, numberOf.get(view.beside));
  panes.forEach((pane) => {
    pane.caption.hidden = !two;
    if (pane.number >= 0) pane.caption.textContent = heads[pane.number].name; // the second may have shown nothing yet
  });
  const picture = first.picture;
  byId('large').querySelector('.legend').hidden = !picture;
  if (!picture) return;
  // Another text may have a smaller map.
  view.row = Math.min(view.row, picture.rows - 1);
  view.column = Math.min(view.column, picture.columns - 1);
  drawLegend(byId('large'), picture.top === 1 ? '1' : inWords(picture.top));
}

// The token that is looked at has changed, in the sentence or in a map: rows, words and numbers follow.
export function followPoint() {
  const picture = panes[0].picture, row = picture ? rowOf(view.at, view.open, picture) : -1;
  if (row >= 0 && row !== view.row) { // in a row that was chosen in the map, the chosen column stays
    view.row = Math.min(row, picture.rows - 1);
    view.column = strongest(picture, view.row);
  }
  tint(largeWords, view.at, view.open);
  // Without a token: what each token receives from all;
  // in cross attention keys are of another text, and none is tinted.
  byId('row-title').textContent = view.at >= 0
    ? say('report.where_looks', { token: named(view.at, shown.tokens) })
    : say(heads[view.open].cross ? 'report.choose_other' : 'report.what_receives');
  byId('row-most').textContent = view.at >= 0 ? lookWords(view.at, view.open) : mostReceived();
  if (view.at < 0) tintReceived();
  showCell();
}

// The maps with the chosen cell, and the cell in words, a line for each map that has it.
function showCell() {
  panes.forEach(drawPane);
  const lines = panes.filter((pane) => pane.picture && !pane.box.hidden
    && view.row < pane.picture.rows && view.column < pane.picture.columns);
  byId('readout').textContent = lines.map((pane) => (lines.length > 1 ? `${heads[pane.number].name}: ` : '') +
    wordsForCell(pane.number, pane.picture, view.row, view.column)).join('\n');
}

// Chooses a cell of the map, the nearest that there is.
export function chooseCell(row, column) {
  const picture = panes[0].picture, inside = (value, size) => Math.min(size - 1, Math.max(0, value));
  if (!picture) return;
  const cell = [inside(row, picture.rows), inside(column, picture.columns)];
  if (cell[0] === view.row && cell[1] === view.column) return;
  [view.row, view.column] = cell;
  if (shown.exact && view.at !== view.row) point(view.row); // which calls `followPoint`, and that `showCell`
  else showCell();
  revealToken(shown.exact ? view.column : -1);
}

// Keeps the token of the chosen row while the pointer moves on.
export function pinRow() {
  if (!shown.exact) return; // a row of blocks stands for many tokens
  view.pinned = true;
  changeAddress();
  followPoint();
}

// To the next head (1), or the one before (-1), of those that the filter leaves; behind the last comes the first.
export function stepHead(by) {
  const offered = heads.map((_, number) => number).filter((number) => number === view.open || matches(number));
  view.open = offered[(offered.indexOf(view.open) + by + offered.length) % offered.length];
  view.through = view.open;
  beginHead();
  changeAddress();
}

// The button that silences the head and the slider of its factor, which need the model in the page.
export function showSilence() {
  const { name } = heads[view.open];
  byId('large-silence').hidden = byId('slider').hidden = !hasModel();
  showFactor(name, view.changes.get(name) ?? 1);
}

// The arrows go to the next head, except where they choose in a list or move the slider. A map takes them for its
// cells and stops the event (report_map.js).
export function keysInDialog(event) {
  if (isShortcut(event) || event.target.matches('select, [type=range]')) return;
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step || event.target.closest('#row-text')) return; // there the arrows belong to the words; up and down scroll
  event.preventDefault();
  stepHead(step);
}

// The dialog was closed, by its button, by Escape, or by Back.
export function closed() {
  view.open = -1;
  leaveAddress();
  lookThrough(-1);
  if (view.opener?.isConnected) view.opener.focus(); // what opened it may have been made anew, and be gone
}

// --- The text beside the map ---

// The tokens from which it is known where the head looks. In a passage the file has the k strongest keys of each
// token, for so many of them as it stored.
function makeLargeText() {
  const head = heads[view.open];
  const size = shown.exact ? shown.tokens.length : head.k ? lists(head).keys.length / head.k : 0;
  const tokens = shown.tokens.slice(0, size);
  const old = largeWords.map((word) => word.textContent);
  // The same text: its words stay, so that one of them keeps the focus.
  if (old.length === tokens.length && old.every((token, at) => token === tokens[at])) return;
  largeWords = tokens.map((token, at) => {
    const word = element('button', 'word');
    word.type = 'button';
    word.tabIndex = at ? -1 : 0; // Tab stops at one word; the arrows go on from there
    word.append(element('bdi', '', token));
    word.addEventListener('click', () => pin(view.pinned && view.at === at ? -1 : at)); // a second click looks at none
    word.addEventListener('focus', () => stopAt(largeWords, word));
    return word;
  });
  byId('row-text').replaceChildren(...largeWords);
}

// Tints the words by what they receive from all queries; the last colour is the largest of them.
function tintReceived() {
  const received = receivedBy(view.open), top = Math.max(...received, 1e-9); // never 0: weights are divided by it
  largeWords.forEach((word, at) => {
    const colour = colourOf(received[at] ?? 0, top, false);
    word.style.backgroundColor = `rgb(${colour})`;
    word.style.color = inkOn(colour);
    word.title = `${named(at, shown.tokens)}: ${inWords(received[at] ?? 0)}`;
  });
}

// The words that receive most, in words: "Most to ‘the’ 0.310, ...".
function mostReceived() {
  const received = receivedBy(view.open), best = [...received.keys()].filter((at) => received[at] > 0);
  best.sort((a, b) => received[b] - received[a]);
  const most = best.slice(0, NAMED).map((at) => `${quoted(shown.tokens[at])} ${inWords(received[at])}`);
  return most.length ? say('report.most_received', { most: most.join(', ') }) : '';
}

// A long text scrolls inside its panel to the token that the chosen cell of the map stands for.
function revealToken(token) {
  const panel = byId('row-text'), word = largeWords[token];
  if (word) panel.scrollTop = word.offsetTop - panel.offsetTop - panel.clientHeight / 2;
}

// --- The numbers of the head, each with a word of explanation ---

function showNumbers(head) {
  // The columns of the table, each [phrase, function]. The function gives what the column says of a statistic.
  const columns = [
    ['report.value', (column, at) => figure(head.values[at]?.[0], column)],
    ['report.interval', (column, at) => intervalIn(head.values[at], column)],
    // Two controls: what even attention would have, and the best head of the untrained model.
    ['report.even', (column, at) => figure(head.uniform[at], column)],
  ];
  if (data.untrained.some((value) => value !== null)) columns.push(
    ['report.untrained', (column, at) => figure(data.untrained[at], column)],
  );
  const top = element('tr');
  top.append(element('td'), ...columns.map(([key]) => scoped('col', say(key))));
  const rows = data.columns.map((column, at) => {
    const row = element('tr'), name = scoped('row', columnName(column));
    name.append(element('small', '', columnMeaning(column)));
    row.append(name, ...columns.map(([, cell]) => element('td', '', cell(column, at))));
    return row;
  });
  byId('numbers').replaceChildren(top, ...rows);
}

// The name of a statistic in the page's language.
export function columnName(column) { return sayOr(`column.${keyOf(column.key)}`, roleName(column.label)); }

// What a statistic means, in a sentence.
export function columnMeaning(column) { return sayOr(`meaning.${keyOf(column.key)}`, column.meaning); }
