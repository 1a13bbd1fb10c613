// --- The whole page of a report: what it listens to, and how it begins ---

import { byId, isShortcut, shadeEdge } from './page/base.js';
import { changeAddress, readAddress } from './report_address.js';
import { buildRamps } from './report_colours.js';
import { listenToFactor } from './report_factor.js';
import { filterChanged, searchFor, showAll } from './report_filter.js';
import { drawGrid, makeGrid, makeLabels, nameHeads, walkGrid } from './report_grid.js';
import { closed, keysInDialog, showHead, stepHead } from './report_head.js';
import { opening, restingPlace, sayUnknown, setOwn, showOwn, startOwn, typed } from './report_own.js';
import { makeRoles } from './report_roles.js';
import { makeRun } from './report_run.js';
import { drawArcs, free, invite, makeSentence, sayBoundary, showPoint, walkSentence } from './report_sentence.js';
import { passage, showText, shown } from './report_shown.js';
import { scaleHead, silenceEach, toggleSilence, wakeAll } from './report_silence.js';
import { heads, view } from './report_state.js';
import { hideTip, makeTable, showOverflow, table, turnColumns } from './report_table.js';
import { sayQuestion, showTop } from './report_top.js';
import './film.js';

// All that changes with the switches: the pictures, the sentence, the large view.
function redraw() {
  drawGrid();
  if (view.open >= 0) showHead();
  showPoint();
}

// A switch stands on the page and in the large view; both change together. `kind` is the class of both;
// `set` keeps what was chosen.
function listenToSwitch(kind, set) {
  const switches = [...document.querySelectorAll('.' + kind)];
  for (const box of switches) {
    box.addEventListener('change', () => {
      for (const other of switches) other.checked = box.checked;
      set(box.checked);
      redraw();
    });
  }
}

function listenToPictures() {
  listenToSwitch('hide-first', (on) => { view.hideFirst = on; });
  listenToSwitch('log-scale', (on) => { view.log = on; });
  listenToSwitch('fixed-scale', (on) => { view.scale = on ? 'fixed' : 'own'; });
  listenToSwitch('with-arcs', (on) => { view.arcs = on; });
  for (const radio of document.querySelectorAll('[name="text"]')) {
    radio.addEventListener('change', () => {
      if (radio.value === 'passage') showText(passage);
      else showOwn();
    });
  }
  byId('find').addEventListener('input', (event) => searchFor(event.target.value));
  byId('all-heads').addEventListener('click', showAll);
  byId('grid').addEventListener('keydown', walkGrid);
  byId('all-columns').addEventListener('change', (event) => table.classList.toggle('all', event.target.checked));
  table.parentElement.addEventListener('scroll', () => { hideTip(); showOverflow(); });
  byId('more-columns').addEventListener('click', turnColumns);
  shadeEdge(table.parentElement);
  // The table may grow with its columns, and its frame with the window.
  const sizes = new ResizeObserver(showOverflow);
  [table, table.parentElement].forEach((frame) => sizes.observe(frame));
}

function listenToHead() {
  const dialog = byId('large');
  byId('previous').addEventListener('click', () => stepHead(-1));
  byId('next-head').addEventListener('click', () => stepHead(1));
  byId('close').addEventListener('click', () => dialog.close());
  listenToFactor(() => heads[view.open].name, scaleHead);
  byId('beside').addEventListener('change', (event) => { view.beside = event.target.value; showHead(); });
  byId('row-text').addEventListener('keydown', walkSentence);
  dialog.addEventListener('close', closed);
  dialog.addEventListener('keydown', keysInDialog);
  // A click beside the sheet is one on the dialog itself.
  dialog.addEventListener('click', (event) => { if (event.target === dialog) dialog.close(); });
}

// Escape lets a pinned token go (in the large view it closes the dialog, which the browser does); s silences the head
// through which the sentence is seen.
function keysOnPage(event) {
  if (isShortcut(event) || event.target.matches('input:not([type="checkbox"]), textarea, select')) return;
  if (event.key === 'Escape') {
    hideTip();
    if (view.open < 0) free();
  }
  if (event.key === 's' && view.through >= 0) toggleSilence(view.through);
}

function listen() {
  byId('sentence').addEventListener('keydown', walkSentence);
  byId('free').addEventListener('click', free);
  byId('wake').addEventListener('click', wakeAll);
  byId('each').addEventListener('click', silenceEach);
  byId('question').addEventListener('click', askQuestion);
  listenToPictures();
  listenToHead();
  document.addEventListener('keydown', keysOnPage);
  document.addEventListener('language', showWords);
  window.addEventListener('popstate', readAddress); // Back and Forward
  window.addEventListener('resize', () => { hideTip(); drawArcs(); if (view.open >= 0) showHead(); });
  window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { buildRamps(); redraw(); });
}

// The suggested question: the first press leads to the place and leaves time to think, the second tries every head.
function askQuestion() {
  const asked = isAsked();
  if (typed.text !== opening) setOwn(opening);
  view.at = restingPlace();
  view.pinned = true;
  showPoint();
  changeAddress();
  if (asked) silenceEach();
  byId('think').hidden = asked;
  sayQuestion(!asked);
}

// Was the button pressed once, and is the reader still at the place of the question?
function isAsked() { return !byId('think').hidden && typed.text === opening && view.at === restingPlace(); }

// Everything that the scripts have put into words.
function showWords() {
  showTop();
  sayQuestion(!byId('think').hidden); // the line "think" stands there while the question is asked
  nameHeads();
  makeTable();
  makeRoles();
  sayBoundary();
  makeRun();
  filterChanged();
  redraw();
  if (typed.whole) sayUnknown();
}

// The order matters: colours come before pictures, and the grid and the words before what is written into them.
function start() {
  byId('heads').hidden = byId('look').hidden = false;
  buildRamps();
  makeGrid();
  makeSentence();
  makeLabels();
  // The token before the last: from there the last one is predicted.
  if (shown.exact) view.at = Math.max(0, shown.tokens.length - 2);
  showWords();
  listen();
  const address = location.hash; // the opening sentence makes an address of its own
  startOwn();
  if (address) history.replaceState(null, '', address);
  readAddress();
  invite();
}

start();
