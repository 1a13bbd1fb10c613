// --- The reader's own sentence: typed, run through the model in the page, and continued token by token ---

import { byId, calmly, element, emit, language, makeButton, on, say, visible } from './base.js';
import { engine, hasModel } from './engine.js';
import { goOn, growing, lastPlace, longer, model, nameOf, ordered, strange, typed } from './local.js';
import { BLANK, probabilities } from './model.js';
import { passage, sentence, showText } from './shown.js';
import { count, data, percent, quoted, setText, view } from './state.js';
import { alike, nearest, replaced } from './tokens.js';

// Round choices, all at most but for the chance: larger counts show more, and a longer wait lets the page lag.
const WAIT_MS = 60; // after a key, before the model runs, so that it does not run for each key of a fast typist
const FOLLOWING = 6, LEAST_CHANCE = 0.001; // words offered as the next, and the least chance of one
const KNOWN = 1500; // words in the list of those that the model knows
const FIRST = 48; // tokens of a passage that the page begins with
export let opening = '', example = ''; // the text that the page opens with, and that of its maps and questions

// Listens to the panel and puts the first sentence there; hides the panel where there is no model in the page.
export function startOwn() {
  byId('own').hidden = byId('next-panel').hidden = byId('workbench').hidden = !hasModel();
  if (!hasModel()) return showOwn();
  byId('own-text').addEventListener('input', calmly(WAIT_MS, () => setOwn(byId('own-text').value)));
  byId('likeliest').addEventListener('click', () => lengthen(0));
  byId('sampled').addEventListener('click', () => lengthen(view.temperature));
  byId('again').addEventListener('click', () => setOwn(opening, restingPlace));
  byId('vocabulary').addEventListener('toggle', showVocabulary);
  on('changes', () => { if (typed.whole) engine.run(typed); showOwn(); });
  on('language', () => { if (typed.whole && !reopen()) sayUnknown(); });
  begin();
}

// A page in Spanish opens with Spanish words; another language brings another opening, where the first still stands.
function reopen() {
  const first = language() === 'es' && data.verbs ? data.verbs.spanish : example, isOpening = typed.text === opening;
  if (first === opening || engine.tokens(first).pieces.some((piece) => !piece.known)) return false;
  opening = first;
  if (isOpening) setOwn(opening, restingPlace);
  return isOpening;
}

// The text that the page opens with is put together from the tokens of its maps, which are written as a reader sees
// them: those that the vocabulary has, one after the other.
function begin() {
  const ids = new Map(model.tokens.shown.map((_, id) => [nameOf(id), id]));
  const tokens = sentence ? sentence.tokens : passage.tokens.slice(0, FIRST);
  // `longer` appends one id after the other.
  opening = example = tokens.filter((token) => ids.has(token)).map((token) => ids.get(token)).reduce(longer, '');
  setOwn(opening, restingPlace);
}

// Where the page begins to look: at the token before the last. There the last one is predicted, and the truth known.
export function restingPlace() { return Math.max(0, typed.ids.length - 2); }
// Takes another sentence; `placed` says at which token the page looks then.
export function setOwn(text, placed = lastPlace) { takeOwn(engine.tokens(text), placed); }

// One token more; the one that ends a text is no word, and nothing is put there.
function lengthen(temperature) {
  const input = goOn(temperature);
  if (input.text !== typed.text) takeOwn(input, lastPlace);
  else byId('own-trouble').textContent = say('report.ends_here');
}

// The same of a sentence whose ids are known. A sentence that the model cannot read leaves the last one in place.
function takeOwn(input, placed) {
  const tokens = input.ids.length, longest = model.config.context;
  // Only where it differs: a field that is written to loses its cursor.
  if (byId('own-text').value !== input.text) byId('own-text').value = input.text;
  if (!tokens || tokens > longest) {
    byId('own-trouble').textContent = say(tokens ? 'look.beyond_context' : 'look.empty', { tokens, longest });
    return;
  }
  engine.run(input);
  view.pinned = false;
  view.at = placed();
  view.follow = -1; // what was chosen was of the sentence before
  showOwn();
  emit('address');
}

// Shows the sentence with the maps of the changed heads.
export function showOwn() {
  if (!typed.whole) return showText(sentence || passage);
  const tokens = typed.pieces.map(({ id, text, known }) => (known ? nameOf(id) : visible(text)));
  const unknown = strange(), isKnown = !unknown.includes(true); // of words that the model lacks nothing is shown
  showText({ tokens, exact: true, typed: true, maps: isKnown ? engine.maps : new Map(), unknown });
  sayUnknown();
}

// --- What can stand next, and what stands for a word that the model lacks ---

// [id, chance] of all tokens at a place of the text, the likeliest first; in their own order, with a chance of 0,
// where nothing stands before it. The two signs that stand for no word are left out.
function likelyAt(place) {
  const chances = place < 0 ? new Float32Array(model.tokens.shown.length) : probabilities(typed.whole.logits[place]);
  return ordered(chances).filter((id) => id !== model.tokens.boundary && id !== model.tokens.unknown)
    .map((id) => [id, chances[id]]);
}

// Offers words as buttons: while a word is typed those that it can become, else those that the model expects.
function showFollowing() {
  const begun = growing(), fits = ([id, chance]) =>
    (begun ? model.tokens.shown[id].startsWith(begun) : chance >= LEAST_CHANCE);
  const offers = likelyAt(lastPlace()).filter(fits).slice(0, FOLLOWING);
  byId('offers').hidden = !offers.length;
  setText('offers-title', begun ? 'report.can_become' : 'report.can_follow', { word: quoted(begun) });
  byId('offers-list').replaceChildren(...offers.map(([id, chance]) => {
    // The word replaces its own beginning.
    const before = begun ? typed.text.slice(0, -begun.length) : typed.text;
    const button = wordButton(nameOf(id), () => longer(before, id));
    if (chance >= LEAST_CHANCE) button.append(' ', element('span', 'part', percent(chance)));
    return button;
  }));
}

// A button that puts another sentence there, and the cursor behind it: the next key goes on typing.
function wordButton(name, changed) {
  return makeButton('known', () => {
    const text = byId('own-text');
    setOwn(changed());
    text.focus();
    text.setSelectionRange(text.value.length, text.value.length);
  }, name);
}

// Names the words that the model lacks, and offers others in their place: before they are put right it says nothing.
function sayUnknown() {
  const wrong = strange(), places = new Map(); // word that the model lacks -> where it stands first
  typed.pieces.forEach(({ text }, at) => { if (wrong[at] && !places.has(text)) places.set(text, at); });
  for (const id of ['likeliest', 'sampled']) byId(id).disabled = places.size > 0;
  const words = [...places.keys()].map((word) => quoted(visible(word))).join(', ');
  const offers = [...places].flatMap(([word, at]) => { // those most like it, of equal ones the more likely
    const near = nearest(model.tokens, word, new Map(likelyAt(at - 1))).map((name) => replacement(word, name));
    return near.length ? [` ${quoted(visible(word))} →`, ...near] : [];
  });
  const [slip, meant] = places.size ? [] : noSubject();
  if (slip) offers.push(...meant.map((name) => replacement(slip, name)));
  const unread = typed.text.split(BLANK).slice(1).join(' ___ ').trim();
  byId('own-trouble').textContent = places.size ? say('report.unknown_words', { words, count: places.size })
    : unread ? say('report.not_read', { words: quoted(unread) })
      : slip ? say('report.no_subject', { word: quoted(slip) }) : isTurned() ? say('report.turned') : '';
  byId('own-trouble').append(...offers);
  if (places.size) byId('offers').hidden = true;
  else showFollowing();
}

// The first word that stands where a subject does, before a verb or last, and what of its letters is one: ‘el’, [‘él’].
function noSubject() {
  const facts = (word) => data.verbs?.words[word] ?? [[], [], []], isSubject = (word) => facts(word)[2].length;
  const texts = typed.pieces.map(({ text }) => text);
  const ends = (at) => at + 1 === texts.length || facts(texts[at + 1])[0].length;
  const at = texts.findIndex((text, n) => n && ['', '=', ','].includes(texts[n - 1]) && ends(n) && !isSubject(text)
    && alike(model.tokens, text).some(isSubject));
  return at < 0 ? [] : [texts[at], alike(model.tokens, texts[at]).filter(isSubject)];
}

// Is there a Spanish word before `=`, or an English one behind it? No line that the verb model learned has one.
function isTurned() {
  const words = typed.pieces.map(({ text }) => text), sign = words.indexOf('=');
  return sign >= 0 && words.some((word, at) => data.verbs?.words[word]?.[3][0] === (at < sign ? 1 : 0));
}

// A button that puts a word that the model knows in the place of one that it does not.
function replacement(word, near) { return wordButton(near, () => replaced(typed.text, word, near)); }

// The words that the model knows, made when the list is first opened; a click adds one.
function showVocabulary() {
  const list = byId('vocabulary-words');
  if (!byId('vocabulary').open || list.childElementCount) return;
  const known = model.tokens.shown.map((_, id) => [nameOf(id), id]).filter(([, id]) => id !== model.tokens.boundary);
  known.sort(([a], [b]) => a.localeCompare(b));
  list.append(...known.slice(0, KNOWN).map(([name, id]) => wordButton(name, () => longer(typed.text, id))));
  if (known.length > KNOWN) list.append(say('report.and_more', { count: count(known.length - KNOWN) }));
}
