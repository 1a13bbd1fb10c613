// --- The film: where the heads looked on one line, at some of the steps while the model trained ---
//
// film.json of a run folder (gpt/film.py): heads, tokens, steps of the whole run, and frames {step, maps}. The maps of a
// frame are bytes, 255 times each weight: head by head, row by row.

import { byId, bytesOf, element, readData, say } from './page/base.js';

function startFilm() {
  const film = readData('film-data');
  const slider = byId('film-at');
  let ramp = [], canvases = [];

  function visible(token) { return token.replaceAll(' ', '␣').replaceAll('\n', '⏎').replaceAll('\t', '⇥'); }

  // 256 colours from weight 0 to 1, mixed between the four of the style sheet, which are written as #rrggbb.
  function readRamp() {
    const style = getComputedStyle(document.documentElement);
    const stops = [0, 1, 2, 3].map((stop) => style.getPropertyValue(`--ramp-${stop}`).trim())
      .map((text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)));
    ramp = Array.from({ length: 256 }, (_, level) => {
      const place = 3 * level / 255, low = Math.min(2, Math.floor(place)); // between the stops `low` and `low + 1`
      return stops[low].map((from, i) => Math.round(from + (stops[low + 1][i] - from) * (place - low)));
    });
  }

  // The bytes of one head in the frame that is shown.
  function mapOf(head) {
    const frame = film.frames[slider.value], size = film.tokens.length ** 2;
    frame.bytes ??= bytesOf(frame.maps); // unpacked once
    return frame.bytes.subarray(head * size, (head + 1) * size);
  }

  // One pixel a cell, which the style sheet enlarges; above the diagonal, where a causal head sees nothing, transparent.
  function paint(canvas, map) {
    const size = film.tokens.length, image = new ImageData(size, size);
    canvas.width = canvas.height = size;
    map.forEach((level, at) => image.data.set([...ramp[level], at % size > at / size ? 0 : 255], 4 * at));
    canvas.getContext('2d').putImageData(image, 0, 0);
  }

  // The weight under the pointer, in words below the pictures.
  function sayCell(event, head) {
    const size = film.tokens.length, box = event.target.getBoundingClientRect();
    const inside = (part) => Math.min(size - 1, Math.max(0, Math.floor(part * size)));
    const row = inside((event.clientY - box.top) / box.height), column = inside((event.clientX - box.left) / box.width);
    // First strong isolates (U+2068, U+2069) keep a right-to-left token from turning the words around it.
    const [looks, at] = [row, column].map((place) => `\u2068${visible(film.tokens[place])}\u2069`);
    const weight = (mapOf(head)[row * size + column] / 255).toFixed(2);
    byId('film-said').textContent = `${film.heads[head]}: ${say('film.cell', { looks, at, weight })}`;
  }

  function begin() {
    readRamp();
    byId('film-line').textContent = film.tokens.map(visible).join(film.tokens.every((t) => t.length < 2) ? '' : ' ');
    const layers = new Set(film.heads.map((name) => name.split('.H')[0])).size; // "L0.H3" -> "L0"
    byId('film-heads').style.setProperty('--across', Math.min(8, Math.max(2, film.heads.length / layers)));
    canvases = film.heads.map((name, head) => {
      const canvas = element('canvas');
      canvas.setAttribute('role', 'img');
      canvas.setAttribute('aria-label', name);
      canvas.addEventListener('pointermove', (event) => sayCell(event, head));
      return canvas;
    });
    byId('film-heads').replaceChildren(...canvases.map((canvas, head) => {
      const figure = element('figure');
      figure.setAttribute('role', 'listitem');
      figure.append(canvas, element('figcaption', '', film.heads[head]));
      return figure;
    }));
    byId('film').hidden = false;
  }

  function draw() {
    const [step, steps] = [film.frames[slider.value].step, film.steps].map((number) => number.toLocaleString('en-US'));
    byId('film-now').textContent = say('film.now', { step, steps });
    slider.setAttribute('aria-valuetext', byId('film-now').textContent);
    canvases.forEach((canvas, head) => paint(canvas, mapOf(head)));
  }

  if (!film.frames.length) return;
  begin();
  slider.max = String(film.frames.length - 1);
  slider.value = slider.max;
  draw();
  slider.addEventListener('input', draw);
  document.addEventListener('language', draw);
  window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { readRamp(); draw(); });
}

if (byId('film')) startFilm(); // a report may have no film
