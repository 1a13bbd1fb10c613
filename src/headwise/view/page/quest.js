// --- Questions that the reader answers by silencing: which head finds the person, the verb, the tense? ---
//
// `data.verbs.words` says of which verbs, tenses, persons and languages a word is a form. Without a head each part of
// the word that comes next stays or changes; the head without which one part alone changes finds it. Where none does,
// heads are silenced together until it changes or none is left. A sign, and a word of the other language, show nothing
// of a part. On another text the question is about the whole word.

import { byId, element, emit, makeButton, on, putWords, say, scoped, worded } from './base.js';
import { engine, hasModel } from './engine.js';
import { lastPlace, nameOf, typed, without } from './local.js';
import { likeliest } from './model.js';
import { example, restingPlace, setOwn } from './own.js';
import { data, enumerated, heads, numberOf, percent, pin, quoted, setText, toggleSilence, view } from './state.js';

const PARTS = data.verbs ? ['person', 'verb', 'tense'] : ['word'];
const COLUMNS = { verb: 0, tense: 1, person: 2, language: 3 }; // of `data.verbs.words`
const SHOWN = 3; // heads, at most, that are named where several are each needed
const PAIRED = 8; // heads of which every two are tried, those whose silence costs most: a round choice
let topic = ''; // the part that is asked for; '' before the first question
let untouched = null, answer = null, guess = ''; // the trial without silence; what was found; the reader's guess
let left = ''; // the sentence that was there before the question

// What a word tells of a part: the numbers of the verbs, tenses or persons of which it can be a form.
function tells(part, word) { return part === 'word' ? [word] : data.verbs?.words[word]?.[COLUMNS[part]] ?? []; }

// Do two words have a part in common?
function shares(part, one, other) { return tells(part, one).some((fact) => tells(part, other).includes(fact)); }

// What the model says without some heads: the parts that stay and change; `kept`, the chance of words with this part.
function trial(names, place = untouched?.place ?? placeOf(topic)) {
  const chances = without(names, place), word = nameOf(likeliest(chances)), before = untouched?.word ?? word;
  const has = PARTS.filter((part) => tells(part, before).length);
  const keeps = (part) => shares(part, before, word);
  const kept = chances.reduce((sum, chance, id) => sum + (shares(topic, before, nameOf(id)) ? chance : 0), 0);
  const whole = has.some((part) => !tells(part, word).length) ? 'word' // languages are 0 and 1
    : tells('language', before)[0] + tells('language', word)[0] === 1 ? 'language' : '';
  if (whole) return { names, word, kept, stays: [], changes: [whole] };
  return { names, word, kept, stays: has.filter(keeps), changes: has.filter((part) => !keeps(part)) };
}

function breaks({ changes }) { return changes.includes(topic); }
function isLost({ changes }) { return !PARTS.includes(changes[0] ?? PARTS[0]); } // nothing is shown of the parts

// The pronoun, which tells the person, comes after `=`; all else at the place where the page rests. A sentence of the
// reader's may end before the word that is asked for, or behind it.
function placeOf(part) {
  const sign = typed.pieces.findIndex((piece) => piece.text === '=');
  if (part === 'person' && sign >= 0) return sign;
  const isOpen = typed.text !== example && tells(part, trial([], lastPlace()).word).length;
  return isOpen ? lastPlace() : restingPlace();
}

// --- The search ---

// A trial of each of these sets of heads: those that break the part first, of them those that break it alone.
async function tried(sets) {
  const trials = [];
  for (const names of sets) {
    trials.push(trial(names));
    await new Promise((resolve) => { setTimeout(resolve, 0); }); // the page may answer in between
  }
  return trials.sort((a, b) => breaks(b) - breaks(a) || isLost(a) - isLost(b) || a.changes.length - b.changes.length
    || a.kept - b.kept);
}

// The kind of answer, its trials, and in `all` each head alone.
async function solve() {
  if (!tells(topic, untouched.word).length) return { kind: 'unlearnt', trials: [], all: [] };
  const all = await tried(heads.map(({ name }) => [name])), alone = all.filter(breaks);
  const clean = alone.filter(({ changes }) => changes.length === 1);
  if (clean.length) return { kind: clean.length > 1 ? 'several' : 'alone', trials: clean.slice(0, SHOWN), all };
  if (alone.length) return { kind: 'mixed', trials: alone.slice(0, 1), all };
  const costly = all.map(({ names }) => names[0]), near = costly.slice(0, PAIRED);
  const [pair] = await tried(near.flatMap((one, at) => near.slice(at + 1).map((two) => [one, two].sort())));
  if (pair && breaks(pair)) return { kind: 'pair', trials: [pair], all };
  for (let count = 3; ; count = count < PAIRED ? count + 1 : 2 * count) {
    const [many] = await tried([costly.slice(0, count).sort()]), lost = [...all, many].find(isLost);
    if (breaks(many)) return { kind: 'many', trials: [many], all };
    if (count >= costly.length) return { kind: lost ? 'broken' : 'none', trials: [lost ?? many], all }; // all heads
  }
}

// --- What is shown ---

function partName(part) { return say(`report.part_of_${part}`); }
function partNames(parts) { return enumerated(parts.map(partName)); }

// "without L0.H3 the verb stays and the tense changes: traería → trae"
function putProof(box, { names, word, stays, changes }) {
  const named = names.length < heads.length ? enumerated(names) : say('report.all_heads');
  const facts = { heads: named, before: untouched.word, after: word, count: names.length, n: stays.length,
    m: changes.length, stays: partNames(stays), changes: partNames(changes), what: partName(topic) };
  const kind = isLost({ changes }) ? changes[0] : !changes.length ? 'stays' : stays.length ? 'both' : 'changes';
  putWords(box, `report.proof_${kind}`, facts);
  return box;
}

function showQuestions() {
  byId('quest').hidden = !hasModel();
  byId('quest').classList.toggle('topic', Boolean(topic));
  setText('quest-title', PARTS.length > 1 ? 'report.quest_title' : 'report.quest_one');
  byId('quests').replaceChildren(...PARTS.map((part) => {
    const button = makeButton('question', () => ask(part), say(`report.quest_${part}`));
    button.dataset.part = part;
    button.setAttribute('aria-pressed', String(part === topic));
    return button;
  }));
  byId('quest-how').replaceChildren();
  byId('guesses').hidden = !topic || Boolean(answer);
  if (topic) {
    const token = view.shown.tokens[untouched.place];
    setText('quest-how', 'report.quest_how', { place: quoted(token), word: untouched.word, what: partName(topic) });
    if (typed.pieces.some(({ text }) => text === '=')) byId('quest-how').append(' ', say('report.quest_equals'));
    if (left && left !== typed.text) { // the reader's own: back to it, or the same question about it
      byId('quest-how').append(' ', makeButton('known', () => setOwn(left), say('report.back_to', { text: left })));
      const isRead = engine.tokens(left).pieces.every(({ known }) => known);
      if (isRead) byId('quest-how').append(' ', makeButton('known', () => ask(topic, left), say('report.ask_own')));
    }
    byId('guesses').replaceChildren(...[...heads.map(({ name }) => name), ''].map((name) =>
      makeButton('guess', () => take(name), name || say('report.guess_none'))));
  }
  showLive();
  showAnswer();
}

// What stays and what changes with the heads that are silenced now.
function showLive() {
  const silent = [...view.changes.keys()].filter((name) => !view.changes.get(name)).sort();
  const words = () => (topic && silent.length ? putProof(element('span'), trial(silent)) : '');
  // Beside the question; and in a narrow window below the pictures, which lie far from it.
  for (const id of ['quest-live', 'live-below']) byId(id).replaceChildren(words());
}

function showAnswer() {
  const box = byId('quest-answer');
  box.replaceChildren();
  if (!answer) return;
  const { kind, trials, all } = answer, names = trials.flatMap((each) => each.names);
  const others = [...new Set(trials.flatMap(({ changes }) => changes))].filter((part) => part !== topic);
  const facts = { heads: enumerated(names), count: names.length, what: partName(topic), word: untouched.word,
    others: partNames(others), n: others.length };
  const line = (className, key) => worded('p', className, key, facts);
  const guessed = all.find((each) => each.names[0] === guess);
  const single = ['alone', 'several'].includes(kind), shared = ['mixed', 'pair', 'many'].includes(kind);
  const how = guess && shared && names.includes(guess) ? 'half'
    : (guess ? single && names.includes(guess) : !single) ? 'right' : 'wrong';
  const shown = guessed && !trials.includes(guessed) ? [...trials, guessed] : trials;
  box.append(line('', `report.guess_${how}`), line('found', `report.answer_${kind}`),
    element('ul', 'proofs', ...shown.map((each) => putProof(element('li'), each))));
  if (all.length) box.append(trialTable(all), line('caption', 'report.badge_how'));
  // Of several heads the one that is missed most.
  view.answer = { name: all.find((each) => names.includes(each.names[0]))?.names[0], at: untouched.place };
  emit('proofs', new Map(all.map((each) => [each.names[0], each.changes.map(partName)])));
}

// Each head alone: the word that comes then, what becomes of each part, and the chance that is left to the part.
function trialTable(all) {
  const parts = PARTS.filter((part) => tells(part, untouched.word).length);
  const titles = [say('report.without_it'), say('report.then'), ...parts.map(partName)];
  const rows = all.map(({ names: [name], word, stays, changes, kept }) => element('tr', '',
    scoped('row', makeButton('token', () => toggleSilence(numberOf.get(name)), name)), element('td', '', word),
    ...parts.map((part) => {
      const isBroken = changes.includes(part), left = part === topic ? ` ${percent(kept)}` : '';
      return element('td', isBroken ? 'fall' : '', (isBroken ? '✗' : stays.includes(part) ? '✓' : '?') + left);
    })));
  const top = element('tr', '', ...titles.map((text) => scoped('col', text)));
  return element('details', '', element('summary', '', say('report.each_alone')),
    element('table', 'trials', top, ...rows), worded('p', 'caption', 'report.trial_signs'));
}

// --- The moves ---

// Leads to the sentence of the question, marks the word, wakes all heads, and leaves time to think.
function ask(part, text = example) {
  view.changes.clear();
  const before = typed.text === example ? left : typed.text;
  if (typed.text !== text || !view.shown.typed) setOwn(text); // which ends the question before
  emit('changes');
  [topic, answer, untouched, left] = [part, null, null, before];
  untouched = { ...trial([]), place: placeOf(part) };
  view.pinned = false;
  pin(untouched.place);
  showQuestions();
  byId('quests').querySelector('[aria-pressed="true"]').focus();
}

// The guess, and with it the answer, unless another question was asked meanwhile.
async function take(name) {
  const begun = untouched, found = await solve();
  if (begun !== untouched || !topic) return;
  [guess, answer] = [name, found];
  showQuestions();
  byId('quest-answer').focus();
}

on('language', showQuestions);
on('words', () => { // another sentence ends the question
  [topic, answer, view.answer, left] = ['', null, null, ''];
  emit('proofs', new Map());
  showQuestions();
});
on('changes', showLive);
