// --- The page of a model that answers while it is touched: what it listens to, and how it begins ---

import { byId, isShortcut } from './page/base.js';
import { ask, sayTrouble } from './look_ask.js';
import { closeLarge, drawAgain, makeHeads, showHeads, stepLarge } from './look_heads.js';
import { goOn, showNext, silenceEach, stopRanking, tellWhy, wakeAll } from './look_next.js';
import { fade, keepWords, look, turn } from './look_state.js';
import { makeSentence, markWords, walkWords } from './look_words.js';
import { buildRamps } from './report_colours.js';
import { data } from './report_state.js';

const WAIT_MS = 120; // after a key, before the model is asked
let typing = 0;

// Asks for both texts as they stand; a newer question makes the older ones stale.
async function read(slots = ['a', ...(look.beside ? ['b'] : [])]) {
  const number = turn();
  fade(true);
  for (const slot of slots) {
    const text = byId(slot === 'a' ? 'own-text' : 'second').value;
    if (slot === 'b' && !text.trim()) continue;
    const at = slot === 'a' ? look.place : -1, changes = Object.fromEntries(look.changes);
    const answer = await ask({ do: 'read', slot, turn: number, text, changes, at, follow: look.follow });
    if (answer.stale || !look.isLatest(number)) return;
    fade(false);
    if (!answer.words) return;
    keepWords(slot, answer);
    if (slot === 'a') look.text = text;
  }
  showAll();
}

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

// Asks for what is predicted at another place; -1 is behind the text.
export function changePlace(at) {
  Object.assign(look, { place: at, follow: -1, at });
  stopRanking();
  read(['a']);
}

// Everything that depends on which heads are changed.
export function changesChanged() {
  byId('wake').hidden = !look.changes.size;
  read();
}

function typed() {
  clearTimeout(typing);
  typing = setTimeout(() => {
    look.place = look.follow = look.at = -1;
    stopRanking();
    read();
  }, WAIT_MS);
}

function putText(text) {
  byId('own-text').value = text;
  typed();
}

// Puts the sign that the model fills in where the chosen word stands.
function hideWord() {
  const words = look.words.filter((word) => !word.sign);
  const hidden = words.map((word) => (word === look.words[look.at] ? { ...word, text: data.mask } : word));
  putText(hidden.map((word) => (word.gap ? ' ' : '') + word.text + '\n'.repeat(word.lines)).join('').trim());
}

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
  ask({ do: 'read', slot: 'b', turn: turn(), text: '', changes: {}, at: -1, follow: look.follow }).then(() => read(['a']));
}

function again() {
  look.changes.clear();
  look.at = -1;
  byId('wake').hidden = true;
  putText(data.example);
}

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
  byId('large').addEventListener('click', (event) => { if (event.target === byId('large')) byId('large').close(); });
  document.addEventListener('keydown', keysOnPage);
  document.addEventListener('language', () => { if (look.words.length) showAll(); sayTrouble(); });
  window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { buildRamps(); drawAgain(); });
}

buildRamps();
byId('go-on').hidden = data.predicts !== 'next';
byId('why').hidden = !data.predicts || data.seconds !== null;
byId('hide-word').hidden = !data.mask;
byId('own-text').value = data.example;
makeHeads();
listen();
read();
