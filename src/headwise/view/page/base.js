// --- What every page has: elements, blocks of data, words in two languages ---
//
// A page carries the phrases that it uses, of words.toml, in every language. An element that follows the language
// names its phrase, <p data-word="report.hint">, and the values in it as JSON in data-values;
// `setLanguage` fills it in.

const NAMES_OF_LANGUAGES = { en: 'English', es: 'Español' };
/** @type {Object<string, Object<string, string>>} language -> key -> phrase */
export const PHRASES = readData('words');
// A place in a phrase: "{count}" for a value, "{count:head|heads}" for one word where the value is 1, else the other.
const PLACE = /\{(\w+)(?::([^|{}]*)\|([^|{}]*))?\}/g;
// Marks in a phrase, in this order: "*strong*", "`key`" of a keyboard, "k_j" for k with an index.
const MARKS = /\*([^*]+)\*|`([^`]+)`|\b([A-Za-z])_([A-Za-z]+)/;

/**
 * @param {string} id
 * @returns {HTMLElement|null}
 */
export function byId(id) { return document.getElementById(id); }

/**
 * A new element.
 * @param {string} tag
 * @param {string} [className]  one class or several, '' for none
 * @param {string} [text]
 * @returns {HTMLElement}
 */
export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/**
 * A new element of a drawing.
 * @param {string} tag  of SVG, such as line
 * @param {Object<string, string|number>} attributes
 * @param {string} [text]
 * @returns {SVGElement}
 */
export function svg(tag, attributes, text) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/**
 * What a block of JSON in this file holds, <script type="application/json" id="...">;
 * null where there is no such block.
 * @param {string} id
 * @returns {any}
 */
export function readData(id) {
  const block = document.getElementById(id);
  return block && JSON.parse(block.textContent);
}

/** @returns {string} en or es */
export function language() { return document.documentElement.lang; }

/**
 * A phrase of the table in the language of the page, with its values in their places.
 * @param {string} key of words.toml, such as report.lede
 * @param {Object<string, string|number>} [values]
 * @returns {string}
 */
export function say(key, values = {}) { return placed(PHRASES[language()][key], values); }

/**
 * The text of what Python sent: the key of a phrase with its values, or words of the user's own,
 * which stay as they are.
 * @param {string|[string, Object]} sent
 * @returns {string}
 */
export function told(sent) { return typeof sent === 'string' ? sent : say(...sent); }

// A phrase with its values in its places.
function placed(text, values) {
  return text.replace(PLACE, (_, name, single, several) =>
    single === undefined ? String(values[name]) : Number(values[name]) === 1 ? single : several);
}

/**
 * A phrase as the content of an element, its marks as elements. Only the table has marks: values are text.
 * @param {Element} target
 * @param {string} key
 * @param {Object<string, string|number>} [values]
 */
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
}

/**
 * A new element with a phrase that follows the language.
 * @param {string} tag
 * @param {string} className
 * @param {string} key
 * @param {Object<string, string|number>} [values]
 * @returns {HTMLElement}
 */
export function worded(tag, className, key, values = {}) {
  const made = element(tag, className);
  setWord(made, key, values);
  return made;
}

/**
 * Gives an element a phrase that follows the language.
 * @param {HTMLElement} target
 * @param {string} key
 * @param {Object<string, string|number>} [values]
 */
export function setWord(target, key, values = {}) {
  target.dataset.word = key;
  target.dataset.values = JSON.stringify(values);
  putWords(target, key, values);
}

// Fills in all that names a phrase, and tells the page's scripts by the event `language`: what they have put into
// words they make anew.
function setLanguage(lang) {
  document.documentElement.lang = lang;
  for (const target of document.querySelectorAll('[data-word]')) {
    putWords(target, target.dataset.word, JSON.parse(target.dataset.values || '{}'));
  }
  for (const name of ['aria-label', 'title', 'placeholder']) {
    for (const target of document.querySelectorAll(`[data-word-${name}]`)) {
      target.setAttribute(name, say(target.getAttribute(`data-word-${name}`)));
    }
  }
  for (const button of byId('languages').children) button.setAttribute('aria-pressed', String(button.lang === lang));
  document.dispatchEvent(new Event('language'));
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
    const button = element('button', '', NAMES_OF_LANGUAGES[lang]);
    button.type = 'button';
    button.lang = lang;
    button.setAttribute('aria-pressed', String(lang === language()));
    button.addEventListener('click', () => chooseLanguage(lang));
    byId('languages').append(button);
  }
  byId('languages').hidden = false;
}

/**
 * A frame that scrolls sideways is shaded at the edge behind which there is more.
 * @param {HTMLElement} frame
 */
export function shadeEdge(frame) {
  // More than 2 pixels: with fractions of pixels a frame at its end may seem to have one more.
  const look = () => frame.classList.toggle('goes-on', frame.scrollWidth - frame.clientWidth - frame.scrollLeft > 2);
  // The observer also calls at once, for the first time.
  const sizes = new ResizeObserver(look);
  for (const part of [frame, ...frame.children]) sizes.observe(part);
  frame.addEventListener('scroll', look);
}

/**
 * Is a key pressed together with one that makes a shortcut of the browser or the system?
 * @param {KeyboardEvent} event
 * @returns {boolean}
 */
export function isShortcut(event) { return event.altKey || event.ctrlKey || event.metaKey; }

/**
 * The bytes that a text in base64 stands for; `atob` gives them as characters of the codes 0 to 255.
 * @param {string} base64
 * @returns {Uint8Array}
 */
export function bytesOf(base64) { return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0)); }

makeLanguages();
if (firstLanguage() !== language()) setLanguage(firstLanguage());
