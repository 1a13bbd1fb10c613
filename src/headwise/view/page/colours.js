// --- Colours of weights: from the one of 0 to the last one, whose weight is called `top` ---

import { emit, say } from './base.js';
import { view } from './state.js';

const COLOURS = 255; // steps of a ramp; an odd number, so that there is a middle, which is 0 where weights diverge
const DECADES = 3; // the log scale begins at a thousandth of its end
const ramps = { plain: [], diverging: [] }; // each COLOURS times [red, green, blue]

// A variable of the style sheet, such as a colour.
export function variable(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

// "#0c2340" -> [12, 35, 64]
function fromHex(text) { return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)); }

// Colours between some of the style sheet, mixed as they are coded (sRGB), which is close to even for the eye.
function rampBetween(names) {
  const stops = names.map((name) => fromHex(variable(name))), last = stops.length - 1;
  return Array.from({ length: COLOURS }, (_, step) => {
    // Between the stops `low` and `low + 1`; the last step lies at the end of the last two.
    const place = (step / (COLOURS - 1)) * last, low = Math.min(last - 1, Math.floor(place));
    return stops[low].map((c, i) => Math.round(c + (stops[low + 1][i] - c) * (place - low)));
  });
}

// Reads the colours of the style sheet, again where it changes between light and dark.
function buildRamps() {
  ramps.plain = rampBetween(['--ramp-0', '--ramp-1', '--ramp-2', '--ramp-3']);
  ramps.diverging = rampBetween(['--below-2', '--below-1', '--ramp-0', '--above-1', '--above-2']);
}

// How far along the colours a weight is, 0 to 1, where `top` has the last colour. On the log scale the top is 1, a
// tenth of it 2/3, a hundredth 1/3, and a thousandth and all below 0.
function along(weight, top) {
  const part = Math.min(1, Math.max(0, weight / top));
  return !view.log ? part : part > 0 ? Math.max(0, 1 + Math.log10(part) / DECADES) : 0;
}

// The colour of a weight, [red, green, blue]; `top` is the weight that has the last colour, and with `diverging` there
// are weights below 0, with colours of their own.
export function colourOf(weight, top, diverging) {
  if (!diverging) return ramps.plain[Math.round((COLOURS - 1) * along(weight, top))];
  // From the middle towards one end or the other.
  return ramps.diverging[Math.round(((COLOURS - 1) / 2) * (1 + Math.sign(weight) * along(Math.abs(weight), top)))];
}

// Black or white, whichever stands out more from the colour. The luminance L is that of WCAG 2; black has the
// contrast (L + 0.05) / 0.05, white 1.05 / (L + 0.05), and at L = 0.179 both are equal.
export function inkOn(colour) {
  // The coding of sRGB undone (IEC 61966-2-1), so that numbers are amounts of light; the eye weighs green most.
  const [r, g, b] = colour.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? '#000' : '#fff';
}

// The strip of colours and the numbers at its two ends; `largest` is what the last colour stands for, in words.
export function drawLegend(place, largest) {
  const image = new ImageData(COLOURS, 1);
  ramps.plain.forEach((colour, step) => image.data.set([...colour, 255], 4 * step));
  place.querySelector('.ramp').getContext('2d').putImageData(image, 0, 0);
  const part = largest === '1' ? (10 ** -DECADES).toString() : say('report.thousandth'); // where the log scale begins
  place.querySelector('.ramp-low').textContent = view.log ? part : '0';
  place.querySelector('.ramp-high').textContent = largest;
}

// Paints a map, one pixel a cell; the style sheet enlarges it.
export function paint(canvas, picture) {
  Object.assign(canvas, { width: picture.columns, height: picture.rows });
  const image = new ImageData(picture.columns, picture.rows);
  picture.drawn.forEach((weight, at) => {
    image.data.set(colourOf(weight, picture.top, picture.diverging), 4 * at); // four bytes a pixel: red, green, blue,
    image.data[4 * at + 3] = 255; // and opacity
  });
  canvas.getContext('2d').putImageData(image, 0, 0);
}

buildRamps();
window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
  buildRamps();
  emit('switches');
});

// A switch stands on the page and in the large view; both change together. `kind` is the class of both.
function listenTo(kind, set) {
  const switches = [...document.querySelectorAll('.' + kind)];
  for (const box of switches) {
    box.addEventListener('change', () => {
      for (const other of switches) other.checked = box.checked;
      set(box.checked);
      emit('switches');
    });
  }
}

listenTo('hide-first', (on) => { view.hideFirst = on; });
listenTo('log-scale', (on) => { view.log = on; });
listenTo('fixed-scale', (on) => { view.scale = on ? 'fixed' : 'own'; });
