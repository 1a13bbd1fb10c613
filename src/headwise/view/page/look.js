// --- The page of a live model, which runs in the process that serves it: its texts, and how it begins ---

import { byId, calmly, emit, language, makeButton, on, say, told, element } from './base.js';
import { engine } from './engine.js';
import { openHead } from './head.js';
import './next.js';
import './served.js';
import { showText } from './shown.js';
import { data, numberOf, quoted, setText, view } from './state.js';
import { makeHeads } from './tiles.js';

const WAIT_MS = 120; // after a key, before the model is asked, so that it is not asked for each key of a fast typist
const readSoon = calmly(WAIT_MS, () => { forget(); read(); });
let rest = 0, beside = false; // the word at which the prediction rests; is there a second text?
let troubled = ''; // what stands below the text, as `told` takes it
let waiting = []; // what was asked for while a text is read: it is done when the text is there
let story = null; // the answer to "why": {answer, other, why}, and in `why` for each head [name, {en, es}], a sentence

// What is written of a word where it stands alone: never nothing, for a token may be a line end, or a space.
function labelOf(word) { return word.text || '⏎'.repeat(word.lines) || '·'; }

// Has the model read the texts as they stand; a newer question makes the older ones stale, and their answers are
// dropped. In b the prediction behind the text is asked for: a place in a need not be one there.
async function read() {
  byId('main').classList.add('asking'); // pale while it waits
  const first = await engine.run({ text: byId('own-text').value }, { at: view.pinned ? view.at : -1 });
  const second = first && beside && byId('second').value;
  if (second && second.trim()) await engine.run({ text: second }, { slot: 'b', first: false });
  if (first) keep(first);
}

function keep({ words: found, at, kinds, hardest }) {
  const words = found.map(([text, gap, lines, sign]) => ({ text, gap, lines, sign }));
  // The prediction rests at its own place; where that is none, or a sign, at the last word that is no sign.
  const behind = at < 0 || words[at].sign;
  rest = behind ? Math.max(0, words.findLastIndex((word) => !word.sign)) : at;
  if (!beside) view.differ = null;
  Object.assign(view, { kinds, hardest, at: Math.min(view.at < 0 ? rest : view.at, words.length - 1) });
  byId('main').classList.remove('asking');
  showText({ tokens: words.map(labelOf), exact: true, typed: true, maps: engine.maps, words });
  emit('read');
  showTitle();
}

function showTitle() {
  const title = data.predicts === 'masked' ? 'look.fills'
    : data.predicts && engine.next()?.rows.length ? 'report.next_after' : 'look.output';
  setText('next-title', title, { token: quoted(view.shown.tokens[rest] ?? '') });
  showStory();
}

// Forgets what was chosen of the text before.
function forget() {
  Object.assign(view, { pinned: false, at: -1, follow: -1 });
  story = null;
}

// Resolves once the text that stands there was read, or refused.
engine.ready = () => new Promise((resolve) => {
  if (byId('main').classList.contains('asking')) waiting.push(resolve);
  else resolve();
});

function goOnWaiting() { for (const resolve of waiting.splice(0)) resolve(); }

// A key was pressed. After a pause the new text is read.
function keyPressed() {
  byId('main').classList.add('asking');
  readSoon();
}

// As if the reader had typed it.
function putText(text) {
  byId('own-text').value = text;
  keyPressed();
}

// Another place is asked for, or none: then the prediction behind the text.
function changePlace() {
  if (!view.pinned) view.at = -1;
  view.follow = -1;
  story = null;
  read();
}

// Puts the sign that the model fills in, such as [MASK], in place of the chosen word; signs such as [CLS] stay away.
function hideWord() {
  const all = view.shown.words, words = all.filter((word) => !word.sign);
  const hidden = words.map((word) => (word === all[view.at] ? { ...word, text: data.mask } : word));
  putText(hidden.map((word) => (word.gap ? ' ' : '') + word.text + '\n'.repeat(word.lines)).join('').trim());
}

// Opens the second text, which begins as a copy of the first, or closes it.
async function compare() {
  beside = !beside;
  for (const part of document.querySelectorAll('.beside')) part.hidden = !beside;
  byId('compare').setAttribute('aria-pressed', String(beside));
  story = null;
  if (beside) {
    if (!byId('second').value) byId('second').value = byId('own-text').value;
    byId('second').focus();
  } else await engine.run({ text: '' }, { slot: 'b' }); // an empty text tells the process to forget b
  read();
}

// --- Why ---

// Asks for the story of the prediction, which takes longer than the rest; meanwhile the text may have changed.
async function tellWhy() {
  await engine.ready();
  const asked = view.shown;
  setText('story-note', 'look.why_at_work');
  const answer = await engine.why();
  story = asked === view.shown && answer.why ? answer : null;
  showStory();
}

function showStory() {
  byId('story').hidden = !story;
  byId('story-note').textContent = story
    ? say('look.why_of', { answer: quoted(story.answer.trim()), other: quoted(story.other.trim()) }) : '';
  byId('story').replaceChildren(...(story?.why ?? []).map(([name, sentences]) => {
    const button = makeButton('token', () => openHead(numberOf.get(name)), name);
    button.setAttribute('aria-label', say('report.enlarge', { name }));
    // The sentence without its marks, and without the head with which it begins, since the button says it.
    return element('li', '', button, sentences[language()].replaceAll('*', '').replace(name, ''));
  }));
}

function sayTrouble() { byId('trouble').textContent = troubled ? told(troubled) : ''; }

for (const field of ['own-text', 'second']) byId(field).addEventListener('input', keyPressed);
byId('go-on').addEventListener('click', () => putText(byId('own-text').value + engine.goesOn()));
byId('hide-word').addEventListener('click', hideWord);
byId('compare').addEventListener('click', compare);
byId('again').addEventListener('click', () => { view.changes.clear(); putText(data.example); });
byId('why').addEventListener('click', tellWhy);
on('language', () => { if (view.shown.words) showTitle(); sayTrouble(); });
on('trouble', ({ detail }) => {
  troubled = detail;
  if (troubled) { byId('main').classList.remove('asking'); goOnWaiting(); }
  sayTrouble();
});
on('read', goOnWaiting);
on('pin', changePlace);
on('changes', read);

// predicts: 'next', 'masked', or null.
byId('go-on').hidden = data.predicts !== 'next';
byId('why').hidden = !data.predicts;
byId('hide-word').hidden = !data.mask;
byId('own-text').value = data.example;
makeHeads();
engine.run({ text: '' }, { slot: 'b' }).then(read); // a page that was open before may have had a second text
