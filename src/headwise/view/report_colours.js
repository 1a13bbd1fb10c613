// --- Colours of weights ---

import { say } from './page/base.js';
import { view } from './report_state.js';

const COLOURS = 255;
const DECADES = 3; // the log scale begins at a thousandth of its end
const ramps = { plain: [], diverging: [] };

export function variable(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function fromHex(text) {
  const value = parseInt(text.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

// 255 colours between those of the style sheet, mixed as they are coded, which is close to even for the eye. An odd
// number, so that there is a middle.
function rampBetween(names) {
  const stops = names.map((name) => fromHex(variable(name))), last = stops.length - 1;
  return Array.from({ length: COLOURS }, (_, step) => {
    const place = (step / (COLOURS - 1)) * last, low = Math.min(last - 1, Math.floor(place));
    return stops[low].map((c, i) => Math.round(c + (stops[low + 1][i] - c) * (place - low)));
  });
}

export function buildRamps() {
  ramps.plain = rampBetween(['--ramp-0', '--ramp-1', '--ramp-2', '--ramp-3']);
  ramps.diverging = rampBetween(['--below-2', '--below-1', '--ramp-0', '--above-1', '--above-2']);
}

// How far along the colours a weight is, 0 to 1, where `top` has the last colour.
function along(weight, top) {
  const part = Math.min(1, Math.max(0, weight / top));
  if (!view.log) return part;
  return part > 0 ? Math.max(0, 1 + Math.log10(part) / DECADES) : 0;
}

/**
 * @param {number} weight
 * @param {number} top  the weight that has the last colour
 * @param {boolean} diverging  are there weights below 0, with colours of their own?
 * @returns {number[]} red, green, blue
 */
export function colourOf(weight, top, diverging) {
  if (!diverging) return ramps.plain[Math.round((COLOURS - 1) * along(weight, top))];
  return ramps.diverging[Math.round(((COLOURS - 1) / 2) * (1 + Math.sign(weight) * along(Math.abs(weight), top)))];
}

/**
 * Black or white, whichever stands out more from the colour: relative luminance as WCAG 2 defines it, and 0.179 is where
 * the contrast with both is equal.
 * @param {number[]} colour
 * @returns {string}
 */
export function inkOn(colour) {
  const [r, g, b] = colour.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? '#000' : '#fff';
}

/**
 * The strip of colours and its two ends.
 * @param {Element} place
 * @param {boolean} diverging
 * @param {string} largest  what the last colour stands for, in words
 */
export function drawLegend(place, diverging, largest) {
  const image = new ImageData(COLOURS, 1);
  ramps[diverging ? 'diverging' : 'plain'].forEach((colour, step) => image.data.set([...colour, 255], 4 * step));
  place.querySelector('.ramp').getContext('2d').putImageData(image, 0, 0);
  const part = largest === '1' ? (10 ** -DECADES).toString() : say('report.thousandth');
  place.querySelector('.ramp-low').textContent = diverging ? `−${largest}` : view.log ? part : '0';
  place.querySelector('.ramp-high').textContent = diverging ? `+${largest}` : largest;
}

/**
 * One pixel a cell; the style sheet enlarges it.
 * @param {HTMLCanvasElement} canvas
 * @param {Picture} picture  of report_pictures.js
 */
export function paint(canvas, picture) {
  canvas.width = picture.columns;
  canvas.height = picture.rows;
  const image = new ImageData(picture.columns, picture.rows);
  picture.drawn.forEach((weight, at) => {
    image.data.set(colourOf(weight, picture.top, picture.diverging), 4 * at);
    image.data[4 * at + 3] = 255;
  });
  canvas.getContext('2d').putImageData(image, 0, 0);
}
