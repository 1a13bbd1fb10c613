// --- The page of a model that answers while it is touched: what it listens to, and how it begins ---
//
// The model runs in the process that serves this page (view/look.py); each question goes there. There are two texts,
// called slots: a, and b beside it. A "word" is a token as it is written;
// `look` (look_state.js) is what is shown now.

import { byId, isShortcut } from './page/base.js';
import { ask, sayTrouble } from './look_ask.js';
import { closeLarge, drawAgain, makeHeads, showHeads, stepLarge } from './look_heads.js';
import { goOn, showNext, silenceEach, stopRanking, tellWhy, wakeAll } from './look_next.js';
import { fade, keepWords, look, turn } from './look_state.js';
import { makeSentence, markWords, walkWords } from './look_words.js';
import { buildRamps } from './report_colours.js';
import { data } from './report_state.js';

const WAIT_MS = 120; // after a key, before the model is asked, so that it is not asked for each key of a fast typist
let typing = 0; // the timer that runs while a key may follow

// Has the model read the texts as they stand; a newer question makes the older ones stale,
// and their answers are dropped.
async function read(slots = ['a', ...(look.beside ? ['b'] : [])]) {
  const number = turn();
  fade(true);
  for (const slot of slots) {
    const text = byId(slot === 'a' ? 'own-text' : 'second').value;
    if (slot === 'b' && !text.trim()) continue;
    // In b the prediction behind the text is asked for: a place in a need not be one there.
    const at = slot === 'a' ? look.place : -1, changes = Object.fromEntries(look.changes);
    const answer = await ask({ do: 'read', slot, turn: number, text, changes, at, follow: look.follow });
    if (answer.stale || !look.isLatest(number)) return;
    fade(false);
    if (!answer.words) return; // refused: `ask` has said why
    keepWords(slot, answer);
    if (slot === 'a') look.text = text;
  }
  showAll();
}

// Everything anew. The reader goes on looking from the same word; after a change of the text, from the one at which
// the prediction is made.
function showAll() {
  makeSentence();
  point(Math.min(look.at < 0 ? look.rest : look.at, look.words.length - 1));
  showNext();
  drawAgain();
}

// Looks at a word; the heads that look hardest from there follow.
export function point(at) {
  look.at = at;
  markWords();
  showHeads();
}

// Asks for what is predicted at another place, and looks from there; -1 is behind the text.
export function changePlace(at) {
  Object.assign(look, { place: at, follow: -1, at });
  stopRanking();
  read(['a']);
}

// Everything that depends on which heads are changed.
export function changesChanged() { // a factor was set or taken back
  byId('wake').hidden = !look.changes.size;
  read();
}

// A key was pressed. After a pause the new text is read; the place, token and word that were chosen belonged to the
// old.
function typed() {
  clearTimeout(typing);
  typing = setTimeout(() => {
    look.place = look.follow = look.at = -1;
    stopRanking();
    read();
  }, WAIT_MS);
}

// As if the reader had typed it.
function putText(text) {
  byId('own-text').value = text;
  typed();
}

// Puts the sign that the model fills in, such as [MASK], where the chosen word stands. The text is put together from
// its words, without the signs around it, such as [CLS].
function hideWord() {
  const words = look.words.filter((word) => !word.sign);
  const hidden = words.map((word) => (word === look.words[look.at] ? { ...word, text: data.mask } : word));
  putText(hidden.map((word) => (word.gap ? ' ' : '') + word.text + '\n'.repeat(word.lines)).join('').trim());
}

// Opens the second text, which begins as a copy of the first, or closes it.
function compare() {
  look.beside = !look.beside;
  for (const part of document.querySelectorAll('.beside')) part.hidden = !look.beside;
  byId('compare').setAttribute('aria-pressed', String(look.beside));
  stopRanking();
  if (look.beside) {
    if (!byId('second').value) byId('second').value = byId('own-text').value;
    byId('second').focus();
    read();
    return;
  }
  look.differ = null;
  // An empty text tells the process to forget b; the answer on a then no longer compares.
  ask({ do: 'read', slot: 'b', turn: turn(), text: '', changes: {}, at: -1, follow: look.follow })
    .then(() => read(['a']));
}

// From the beginning: no head changed, and the text that the page opened with.
function again() {
  look.changes.clear();
  look.at = -1;
  byId('wake').hidden = true;
  putText(data.example);
}

// Escape goes back to the prediction behind the text; with a head enlarged the arrows go to the next, except in its
// map, which they scroll.
function keysOnPage(event) {
  if (isShortcut(event) || event.target.matches('textarea, [type=range]')) return;
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (event.key === 'Escape' && look.place >= 0 && !byId('large').open) changePlace(-1);
  if (byId('large').open && step && !event.target.closest('#large-map')) {
    event.preventDefault();
    stepLarge(step);
  }
}

function listen() {
  for (const field of ['own-text', 'second']) byId(field).addEventListener('input', typed);
  byId('sentence').addEventListener('keydown', walkWords);
  byId('go-on').addEventListener('click', () => putText(byId('own-text').value + goOn()));
  byId('hide-word').addEventListener('click', hideWord);
  byId('compare').addEventListener('click', compare);
  byId('again').addEventListener('click', again);
  byId('wake').addEventListener('click', wakeAll);
  byId('each').addEventListener('click', silenceEach);
  byId('why').addEventListener('click', tellWhy);
  byId('previous').addEventListener('click', () => stepLarge(-1));
  byId('next-head').addEventListener('click', () => stepLarge(1));
  byId('close').addEventListener('click', () => byId('large').close());
  byId('large').addEventListener('close', closeLarge);
  // A click beside the sheet is one on the dialog itself.
  byId('large').addEventListener('click', (event) => { if (event.target === byId('large')) byId('large').close(); });
  document.addEventListener('keydown', keysOnPage);
  document.addEventListener('language', () => { if (look.words.length) showAll(); sayTrouble(); });
  window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { buildRamps(); drawAgain(); });
}

// predicts: 'next', 'masked', or null.
buildRamps();
byId('go-on').hidden = data.predicts !== 'next';
byId('why').hidden = !data.predicts;
byId('hide-word').hidden = !data.mask;
byId('own-text').value = data.example;
makeHeads();
listen();
read();
