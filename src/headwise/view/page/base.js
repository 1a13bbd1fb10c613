// --- What every page has: elements, blocks of data, words in two languages ---

const NAMES_OF_LANGUAGES = { en: 'English', es: 'Español' };
/** @type {Object<string, Object<string, string>>} language to key to phrase */
export const PHRASES = readData('words');
const PLACE = /\{(\w+)(?::([^|{}]*)\|([^|{}]*))?\}/g; // {count}, {count:head|heads}
const MARKS = /\*([^*]+)\*|`([^`]+)`|\b([A-Za-z])_([A-Za-z]+)/; // *strong*, `key`, k_j

/**
 * @param {string} id
 * @returns {HTMLElement}
 */
export function byId(id) { return document.getElementById(id); }

/**
 * @param {string} tag
 * @param {string} [className]
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
 * An element of a drawing.
 * @param {string} tag
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
 * A block of JSON in this file; null where the page has none of that id.
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
 * What Python sent of a text: the key of a phrase with its facts, or words of the user's own, which stay as they are.
 * @param {string|[string, Object]} sent
 * @returns {string}
 */
export function told(sent) { return typeof sent === 'string' ? sent : say(...sent); }

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
  const places = [...rest.matchAll(PLACE)].map((match) => match[0]);
  rest = rest.replace(PLACE, '\u0000');
  const plain = (text) => text.replaceAll('\u0000', () => placed(places.shift(), values));
  for (let mark = MARKS.exec(rest); mark; mark = MARKS.exec(rest)) {
    target.append(plain(rest.slice(0, mark.index)));
    if (mark[3]) target.append(mark[3], element('sub', '', mark[4]));
    else target.append(element(mark[1] ? 'b' : 'kbd', '', plain(mark[1] || mark[2])));
    rest = rest.slice(mark.index + mark[0].length);
  }
  target.append(plain(rest));
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
 * @param {HTMLElement} target
 * @param {string} key
 * @param {Object<string, string|number>} [values]
 */
export function setWord(target, key, values = {}) {
  target.dataset.word = key;
  target.dataset.values = JSON.stringify(values);
  putWords(target, key, values);
}

// Fills in all that names a phrase, and tells the page's scripts by the event `language`.
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

// The one in the address; else the one that was asked for when the page was written; else the browser's.
function firstLanguage() {
  const kept = new URLSearchParams(location.search).get('lang'), spoken = navigator.languages.map((tag) => tag.slice(0, 2));
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
  const look = () => frame.classList.toggle('goes-on', frame.scrollWidth - frame.clientWidth - frame.scrollLeft > 2);
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
 * @param {string} base64
 * @returns {Uint8Array}
 */
export function bytesOf(base64) { return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0)); }

makeLanguages();
if (firstLanguage() !== language()) setLanguage(firstLanguage());
