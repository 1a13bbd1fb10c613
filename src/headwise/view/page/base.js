// --- What every page has: elements, blocks of data, events, words in two languages ---
//
// A page carries the phrases that it uses, of words.toml, in every language. An element that follows the language
// names its phrase, <p data-word="report.hint">, and the values in it as JSON in data-values;
// `setLanguage` fills it in.

const NAMES_OF_LANGUAGES = { en: 'English', es: 'Español' };
export const PHRASES = readData('words'); // language -> key -> phrase
// A place in a phrase: "{count}" for a value, "{count:head|heads}" for one word where the value is 1, else the other.
const PLACE = /\{(\w+)(?::([^|{}]*)\|([^|{}]*))?\}/g;
// Marks in a phrase, in this order: "*strong*", "`key`" of a keyboard, "k_j" for k with an index.
const MARKS = /\*([^*]+)\*|`([^`]+)`|\b([A-Za-z])_([A-Za-z]+)/;

export function byId(id) { return document.getElementById(id); }

// A new element with its children, texts or elements; `className` may be several classes, or '' for none.
export function element(tag, className = '', ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

export function makeButton(className, act, ...children) {
  const button = element('button', className, ...children);
  button.type = 'button';
  button.addEventListener('click', act);
  return button;
}

// The heading of a row or column of a table; `scope` is row or col.
export function scoped(scope, ...children) { return Object.assign(element('th', '', ...children), { scope }); }

// A new element of a drawing, such as line; attributes by name.
export function svg(tag, attributes, ...children) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// What a block of JSON in this file holds, <script type="application/json" id="...">; null where there is none.
export function readData(id) {
  const block = document.getElementById(id);
  return block && JSON.parse(block.textContent);
}

// The bytes that a text in base64 stands for; `atob` gives them as characters of the codes 0 to 255.
export function bytesOf(base64) { return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0)); }

// --- Events: a script that changes something emits one, and those above it that show it listen ---

// What calls `act` once it has not been called itself for so many milliseconds.
export function calmly(wait, act) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(act, wait, ...values);
  };
}

export function on(names, act) { for (const name of names.split(' ')) document.addEventListener(name, act); }
export function emit(name, detail) { document.dispatchEvent(new CustomEvent(name, { detail })); }

// --- Words ---

export function language() { return document.documentElement.lang; } // en or es
// A phrase of words.toml in the language of the page, with its values in their places.
export function say(key, values = {}) { return placed(PHRASES[language()][key], values); }
// The text of what Python sent: [key of a phrase, values], or words of the user's own, which stay as they are.
export function told(sent) { return typeof sent === 'string' ? sent : say(...sent); }

// A phrase with its values in its places; in Spanish 12,000 becomes 12 000, and 1,200 is 1200.
function placed(text, values) {
  return text.replace(PLACE, (_, name, single, several) =>
    single === undefined ? grouped(String(values[name])) : Number(values[name]) === 1 ? single : several);
}

export function grouped(text) {
  if (language() !== 'es' || !/^\d{1,3}(,\d{3})+(\.\d+)?$/.test(text)) return text;
  return text.replaceAll(',', text.length > 5 ? '\u202f' : '');
}

// A phrase as the content of an element, its marks as elements. Only the table has marks: values are text.
export function putWords(target, key, values = {}) {
  target.replaceChildren();
  let rest = PHRASES[language()][key];
  // A value may hold `*` itself. So each place becomes one character that no phrase has while marks are looked for;
  // the values come in afterwards, in the order of their places.
  const places = [...rest.matchAll(PLACE)].map((match) => match[0]);
  rest = rest.replace(PLACE, '\u0000');
  const plain = (text) => text.replaceAll('\u0000', () => placed(places.shift(), values));
  for (let mark = MARKS.exec(rest); mark; mark = MARKS.exec(rest)) {
    target.append(plain(rest.slice(0, mark.index)));
    if (mark[3]) target.append(mark[3], element('sub', '', mark[4])); // k_j: the letter, and its index below the line
    else target.append(element(mark[1] ? 'b' : 'kbd', '', plain(mark[1] || mark[2])));
    rest = rest.slice(mark.index + mark[0].length);
  }
  target.append(plain(rest)); // what stands behind the last mark
  if (target.tagName === 'TITLE') target.textContent = target.textContent; // elements in a title are not shown
}

// A new element with a phrase that follows the language.
export function worded(tag, className, key, values = {}) {
  const made = element(tag, className);
  Object.assign(made.dataset, { word: key, values: JSON.stringify(values) });
  putWords(made, key, values);
  return made;
}

// Fills in all that names a phrase; what scripts have put into words they make anew at the event `language`.
function setLanguage(lang) {
  document.documentElement.lang = lang;
  for (const target of document.querySelectorAll('[data-word]')) {
    putWords(target, target.dataset.word, JSON.parse(target.dataset.values || '{}'));
  }
  for (const name of ['aria-label', 'placeholder']) {
    for (const target of document.querySelectorAll(`[data-word-${name}]`)) {
      target.setAttribute(name, say(target.getAttribute(`data-word-${name}`)));
    }
  }
  for (const button of byId('languages').children) button.setAttribute('aria-pressed', String(button.lang === lang));
  emit('language');
}

// The language in the address; else the one that was asked for when the page was written; else the browser's.
// English, with which a page is written where nobody asked, gives way to the browser's.
function firstLanguage() {
  const kept = new URLSearchParams(location.search).get('lang');
  const spoken = navigator.languages.map((tag) => tag.slice(0, 2)); // es-MX -> es; the most wanted first
  const wishes = [kept, ...(language() === 'en' ? spoken : [])];
  return wishes.find((lang) => Object.keys(PHRASES).includes(lang)) ?? language();
}

// The choice stays in the address, so that a link and a reload keep it.
function chooseLanguage(lang) {
  setLanguage(lang);
  const address = new URL(location.href);
  address.searchParams.set('lang', lang);
  history.replaceState(history.state, '', address);
}

// The switch: a button for each language. It is hidden in the HTML, since without this script it would do nothing.
function makeLanguages() {
  for (const lang of Object.keys(PHRASES)) {
    const button = makeButton('', () => chooseLanguage(lang), NAMES_OF_LANGUAGES[lang]);
    button.lang = lang;
    button.setAttribute('aria-pressed', String(lang === language()));
    byId('languages').append(button);
  }
  byId('languages').hidden = false;
}

// Signs for what cannot be seen, as in view/terminal.py.
const SIGNS = { ' ': '␣', '\n': '⏎', '\t': '⇥', '\r': '␍', '': '∅' };

// A token with signs in place of what cannot be seen. Characters of these classes (control, format, lone surrogates,
// line, paragraph and space separators) that have no sign become <U+00AD>.
export function visible(token) {
  if (token in SIGNS) return SIGNS[token]; // also '', which the replacement would not meet
  return token.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}\p{Zs}]/gu, (sign) => SIGNS[sign] ??
    // The joiner U+200D stays, since it holds the parts of an emoji together.
    (sign === '\u200d' ? sign : `<U+${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, '0')}>`));
}

// --- The part of an address behind #, which report and walk hand to each other: a head, a token, a text ---

export function hashOf(parts) { return '#' + parts.map(encodeURIComponent).join('/'); }

export function hashParts() {
  try {
    return location.hash.slice(1).split('/').map(decodeURIComponent);
  } catch { // an address that nobody made here, such as one with a lone %
    return [''];
  }
}

// --- Frames and keys ---

// A frame that scrolls sideways is shaded at the edge behind which there is more.
export function shadeEdge(frame) {
  // More than 2 pixels: with fractions of pixels a frame at its end may seem to have one more.
  const look = () => frame.classList.toggle('goes-on', frame.scrollWidth - frame.clientWidth - frame.scrollLeft > 2);
  const sizes = new ResizeObserver(look); // it also calls at once
  for (const part of [frame, ...frame.children]) sizes.observe(part);
  frame.addEventListener('scroll', look);
}

// Is a key pressed together with one that makes a shortcut of the browser or the system?
export function isShortcut(event) { return event.altKey || event.ctrlKey || event.metaKey; }

// Where an arrow key leads, as [rows, columns]; nothing for other keys and for shortcuts.
export function arrowOf(event) {
  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  return isShortcut(event) ? undefined : steps[event.key];
}

// Gives an element new children; the one of the same `data-key` gets the focus that the old one had.
export function remake(box, key, children) {
  const held = box.contains(document.activeElement) && document.activeElement.dataset[key];
  box.replaceChildren(...children);
  if (held) box.querySelector(`[data-${key}="${held}"]`)?.focus();
}

// Makes an element the one at which Tab stops among all of these.
export function stopAt(elements, chosen) {
  for (const stop of elements) if (stop.tabIndex === 0) stop.tabIndex = -1;
  if (chosen) chosen.tabIndex = 0;
}

// Arrow keys, Home and End go from stop to stop in a box; `rows()` gives its stops row by row, some maybe missing. `go`
// brings the focus to one. Tab comes back to the stop that had it last.
export function walkable(box, rows, go = (stop) => stop.focus()) {
  const ends = { Home: [0, -Infinity], End: [0, Infinity] };
  box.addEventListener('keydown', (event) => {
    const step = arrowOf(event) ?? (isShortcut(event) ? null : ends[event.key]), all = step ? rows() : [];
    const isHere = (stop) => stop?.contains(event.target), row = all.findIndex((stops) => stops.some(isHere));
    const there = row < 0 ? undefined : all[row + step[0]];
    if (!there) return;
    event.preventDefault();
    event.stopPropagation(); // around it the same keys may go to the next head, or to the next step
    const stop = there[Math.max(0, Math.min(there.length - 1, all[row].findIndex(isHere) + step[1]))];
    if (stop) go(stop);
  });
  box.addEventListener('focusin', ({ target }) => {
    const stops = rows().flat();
    if (stops.includes(target)) stopAt(stops, target);
  });
}

makeLanguages();
setLanguage(firstLanguage());
