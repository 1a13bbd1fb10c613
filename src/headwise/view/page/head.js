// --- The large view: a head enlarged, alone or beside another ---
//
// view.open is the head, view.row and view.column its chosen cell, view.at the token that is looked at. Where the text
// is `exact`, each row of a map is one token, so that the row and the token are the same.

import { arrowOf, byId, calmly, element, emit, isShortcut, makeButton, on, say, scoped, walkable } from './base.js';
import { colourOf, drawLegend, inkOn } from './colours.js';
import { hasModel } from './engine.js';
import { drawPane, fillPane, makePane, revealCell } from './map.js';
import { NAMED, lookWords, tint } from './sentence.js';
import { knownOf, pictureOf, receivedBy, rowOf, wordsForCell } from './shown.js';
import { badge, columnMeaning, columnName, data, factorOf, figure, heads, intervalIn, inWords, lookThrough, matches,
  named, numberOf, pin, point, putSentence, quoted, scaleHead, times, toggleSilence, view } from './state.js';

const SLIDE_MS = 40; // while the slider moves, before the model is asked
const panes = [...document.querySelectorAll('.pane')] // two: the head's map, and the one beside it
  .map((box) => makePane(box, chooseCell, pinRow));
let largeWords = []; // the buttons of the text beside the map, one for each token
const rescale = calmly(SLIDE_MS, scaleHead);
let opener = null; // what opened the view, which gets the focus back

// Enlarges a head; `step` says whether Back takes that again, as after a click.
export function openHead(number, step = true) {
  opener = document.activeElement;
  lookThrough(number);
  view.open = number;
  byId('large').showModal();
  byId('large-title').focus();
  beginHead();
  panes.forEach(revealCell);
  emit('address', step);
}

// Where the reader begins: at the token that is looked at, or at the last one.
export function beginHead() {
  const picture = pictureOf(view.open);
  if (picture) {
    const row = rowOf(view.at, view.open, picture);
    view.row = row >= 0 ? Math.min(row, picture.rows - 1) : picture.rows - 1;
    view.column = strongest(picture, view.row);
  }
  if (view.shown.exact && view.at < 0) view.at = view.row;
  showHead();
}

// The column of the strongest weight of a row.
function strongest(picture, row) {
  const weights = picture.drawn.slice(row * picture.columns, (row + 1) * picture.columns);
  return weights.indexOf(Math.max(...weights));
}

// Everything of the large view, made anew.
function showHead() {
  if (view.open < 0) return;
  const head = heads[view.open];
  byId('large-title').textContent = head.name;
  byId('large-roles').replaceChildren(...(head.roles ?? []).map(badge));
  putSentence(byId('large-says'), view.open);
  showOffers();
  showFactor();
  showNumbers(head);
  makeLargeText();
  showPanes();
  followPoint();
  emit('large');
}

// What can stand beside the head: nothing (''), or any other head by its name.
function showOffers() {
  const names = heads.map(({ name }) => name).filter((name) => name !== heads[view.open].name);
  byId('beside').replaceChildren(new Option(say('report.beside_none'), ''), ...names.map((name) => new Option(name)));
  if (!names.includes(view.beside)) view.beside = ''; // the head now open stood beside the last one
  byId('beside').value = view.beside;
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
  byId('large').querySelector('.legend').hidden = !picture || picture.diverging;
  if (!picture) return;
  // Another text may have a smaller map.
  view.row = Math.min(view.row, picture.rows - 1);
  view.column = Math.min(view.column, picture.columns - 1);
  drawLegend(byId('large'), picture.top === 1 ? '1' : inWords(picture.top));
}

// The token that is looked at has changed, in the sentence or in a map: rows, words and numbers follow.
function followPoint() {
  if (view.open < 0) return;
  const picture = panes[0].picture, row = picture ? rowOf(view.at, view.open, picture) : -1, { tokens } = view.shown;
  if (row >= 0 && row !== view.row) { // in a row that was chosen in the map, the chosen column stays
    view.row = Math.min(row, picture.rows - 1);
    view.column = strongest(picture, view.row);
  }
  tint(largeWords, view.at, view.open);
  // Without a token: what each receives from all; of cross attention nothing, since keys are of another text.
  byId('row-title').textContent = view.at >= 0 ? say('report.where_looks', { token: named(view.at, tokens) })
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
function chooseCell(row, column) {
  const picture = panes[0].picture, inside = (value, size) => Math.min(size - 1, Math.max(0, value));
  if (!picture) return;
  const cell = [inside(row, picture.rows), inside(column, picture.columns)];
  if (cell[0] === view.row && cell[1] === view.column) return;
  [view.row, view.column] = cell;
  if (view.shown.exact && view.at !== view.row) point(view.row); // which calls `followPoint`, and that `showCell`
  else showCell();
  revealToken(view.shown.exact ? view.column : -1);
}

// Keeps the token of the chosen row while the pointer moves on.
function pinRow() {
  if (!view.shown.exact) return; // a row of blocks stands for many tokens
  view.pinned = false; // a second click does not let go
  pin(view.row);
}

// To the next head (1), or the one before (-1), of those that the filter leaves; behind the last comes the first.
function stepHead(by) {
  const offered = heads.map((_, number) => number).filter((number) => number === view.open || matches(number));
  view.open = offered[(offered.indexOf(view.open) + by + offered.length) % offered.length];
  view.through = view.open;
  beginHead();
  emit('through');
  emit('address');
}

// The button that silences the head and the slider of its factor, which need the model.
function showFactor() {
  if (view.open < 0) return;
  const { name } = heads[view.open], factor = factorOf(view.open), button = byId('large-silence');
  button.hidden = byId('slider').hidden = !hasModel();
  button.setAttribute('aria-pressed', String(factor === 0));
  button.textContent = say(factor === 0 ? 'report.wake' : 'report.silence', { name });
  byId('factor').value = String(factor);
  byId('factor-shown').textContent = times(factor);
}

function slide() {
  const factor = Number(byId('factor').value);
  byId('factor-shown').textContent = times(factor);
  rescale(view.open, factor);
}

// The arrows go to the next head, except in a list, on the slider and in a map, which keeps the event.
function keysInDialog(event) {
  if (isShortcut(event) || event.target.matches('select, [type=range]')) return;
  const [down, step] = arrowOf(event) ?? [1, 0];
  if (down || event.target.closest('#row-text')) return; // there the arrows belong to the words; up and down scroll
  event.preventDefault();
  stepHead(step);
}

// Escape lets a pinned token go; s silences the head through which the sentence is seen, e enlarges it.
function keysOnPage(event) {
  if (isShortcut(event) || event.target.matches('input:not([type="checkbox"]), textarea, select')) return;
  if (event.key === 'Escape' && view.pinned && view.open < 0) pin(-1);
  if (event.key === 'e' && view.through >= 0 && view.open < 0) openHead(view.through);
  if (event.key === 's' && view.through >= 0 && hasModel()) toggleSilence(view.through);
}

// The dialog was closed, by its button, by Escape, or by Back.
function closed() {
  view.open = -1;
  emit('closed');
  lookThrough(-1);
  if (opener?.isConnected) opener.focus(); // what opened it may have been made anew, and be gone
}

// --- The text beside the map ---

// The tokens from which it is known where the head looks.
function makeLargeText() {
  const tokens = view.shown.tokens.slice(0, knownOf(view.open));
  const old = largeWords.map((word) => word.textContent);
  // The same text: its words stay, so that one of them keeps the focus.
  if (old.length === tokens.length && old.every((token, at) => token === tokens[at])) return;
  largeWords = tokens.map((token, at) => {
    // A second click looks at none.
    const act = () => pin(view.pinned && view.at === at ? -1 : at);
    const word = makeButton('word', act, element('bdi', '', token));
    word.tabIndex = at ? -1 : 0; // Tab stops at one word; the arrows go on from there
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
    word.title = `${named(at, view.shown.tokens)}: ${inWords(received[at] ?? 0)}`;
  });
}

// The words that receive most, in words: "Most to ‘the’ 0.310, ...".
function mostReceived() {
  const received = receivedBy(view.open), best = [...received.keys()].filter((at) => received[at] > 0);
  best.sort((a, b) => received[b] - received[a]);
  const most = best.slice(0, NAMED).map((at) => `${quoted(view.shown.tokens[at])} ${inWords(received[at])}`);
  return most.length ? say('report.most_received', { most: most.join(', ') }) : '';
}

// A long text scrolls inside its panel to the token that the chosen cell of the map stands for.
function revealToken(token) {
  const panel = byId('row-text'), word = largeWords[token];
  if (word) panel.scrollTop = word.offsetTop - panel.offsetTop - panel.clientHeight / 2;
}

// --- The numbers of the head, each with a word of explanation ---

function showNumbers(head) {
  byId('numbers').parentElement.hidden = !data.columns;
  if (!data.columns) return;
  // The columns of the table, each [phrase, function]. The function gives what the column says of a statistic.
  const columns = [
    ['report.value', (column, at) => figure(head.values[at]?.[0], column)],
    ['report.interval', (column, at) => intervalIn(head.values[at], column)],
    // Two controls: what even attention would have, and the best head of the untrained model.
    ['report.even', (column, at) => figure(head.uniform[at], column)],
  ];
  const untrained = (column, at) => figure(data.untrained[at], column);
  if (data.untrained.some((value) => value !== null)) columns.push(['report.untrained', untrained]);
  const top = element('tr', '', element('td'), ...columns.map(([key]) => scoped('col', say(key))));
  byId('numbers').replaceChildren(top, ...data.columns.map((column, at) => element('tr', '',
    scoped('row', columnName(column), element('small', '', columnMeaning(column))),
    ...columns.map(([, cell]) => element('td', '', cell(column, at))))));
}

const dialog = byId('large');
byId('previous').addEventListener('click', () => stepHead(-1));
byId('next-head').addEventListener('click', () => stepHead(1));
byId('close').addEventListener('click', () => dialog.close());
byId('factor').addEventListener('input', slide);
byId('large-silence').addEventListener('click', () => toggleSilence(view.open));
byId('beside').addEventListener('change', (event) => { view.beside = event.target.value; showHead(); });
walkable(byId('row-text'), () => [largeWords], (word) => {
  word.focus();
  if (!view.pinned) point(largeWords.indexOf(word));
});
dialog.addEventListener('close', closed);
dialog.addEventListener('keydown', keysInDialog);
document.addEventListener('keydown', keysOnPage);
// A click beside the sheet is one on the dialog itself.
dialog.addEventListener('click', (event) => { if (event.target === dialog) dialog.close(); });
window.addEventListener('resize', showHead);
on('maps switches language', showHead);
on('changes', showFactor);
on('point pin', followPoint);
