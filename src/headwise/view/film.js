// --- The film: what the heads did while the model trained; on a page that has a place for it ---
//
// `heads/film.py` says what a film holds: a header, and frames, each with the heads' maps and roles at one step.

import { PHRASES, byId, bytesOf, element, language, readData, say, setWord, svg, worded } from './page/base.js';

function startFilm() {
  // Pixels of the two curves, one above the other: the margins, the height of the losses, the gap for words, and the
  // height of how alike heads look.
  const PLOT = { left: 44, right: 12, top: 26, loss: 128, gap: 44, alike: 44 };
  const BEAT = 250; // milliseconds a frame
  const LABELLED = 14; // tokens of a line at most that have room beside a picture
  const HEADS = byId('film-heads');
  // losses: rows {step, loss} and sometimes held_out_loss; known: name of a head -> the roles that the survey of the
  // trained model gave it, null while it trains. A report has all in its data; live.js adds what it hears.
  const film = { header: null, frames: [], losses: [], known: null, ...readData('film-data') };
  const view = {
    at: 0, line: 0, // the frame and the text that are shown
    timer: 0, // of the film that plays; 0 while it stands
    follow: true, // is the last frame shown, so that a newer one takes its place?
    ramp: [], tiles: [], // 256 colours of weights; the elements of each head
  };

  // --- What a frame says ---

  function stepOf(index) { return film.frames[index].step.toLocaleString('en-US'); }

  // The map of one head on one line. The maps of a frame are bytes: head by head, line by line, each row up to the
  // token itself, so n (n + 1) / 2 of n tokens.
  function mapOf(index, head, line) {
    const frame = film.frames[index];
    const sizes = film.header.lines.map((tokens) => tokens.length * (tokens.length + 1) / 2);
    frame.bytes ??= bytesOf(frame.maps); // unpacked once
    const ofHead = sizes.reduce((sum, size) => sum + size, 0); // bytes of all lines
    const start = head * ofHead + sizes.slice(0, line).reduce((sum, size) => sum + size, 0);
    return frame.bytes.subarray(start, start + sizes[line]);
  }

  // A weight from 0 to 1; a byte is so many of 255 parts. Above the diagonal nothing is kept:
  // a causal head sees nothing.
  function weightAt(map, row, column) { return column > row ? 0 : map[row * (row + 1) / 2 + column] / 255; }

  // Has a head a role in a frame? A film scores few texts. So where the survey of many texts is known, only what it
  // gave the head counts.
  function hasRole(index, head, role) {
    const known = film.known && (film.known[film.header.heads[head]] ?? []);
    return film.frames[index].roles[head].includes(role) && (!known || known.includes(role));
  }

  // For each head and role that it has in the last frame, the first frame from which on it always had it.
  function earnedRoles() {
    const earned = [], last = film.frames.length - 1;
    film.header.heads.forEach((name, head) => film.frames[last].roles[head].forEach((role) => {
      if (!hasRole(last, head, role)) return;
      let first = last;
      while (first > 0 && hasRole(first - 1, head, role)) first -= 1;
      earned.push({ name, head, role, first });
    }));
    return earned.sort((a, b) => a.first - b.first);
  }

  // The name of a role in the page's language; as it is, where words.toml has no phrase for it.
  function roleWords(role) {
    const key = 'role.' + role.replaceAll(' ', '_');
    return key in PHRASES[language()] ? say(key) : role;
  }

  // The loss that was written last before a step, or at it; rows come in the order of their steps.
  function lossAt(step) {
    const known = film.losses.filter((row) => row.step <= step);
    return known.length ? known[known.length - 1].loss : null;
  }

  // How alike the heads of a layer look, the mean over layers; null where each layer has one head.
  function meanAlike(index) {
    const shares = film.frames[index].alike.filter((share) => share !== null);
    return shares.length ? shares.reduce((sum, share) => sum + share, 0) / shares.length : null;
  }

  // --- The curves ---
  //
  // Frames are the same distance apart, whatever their steps: so the first steps, where most happens, have room.

  function width() { return byId('film-curves').clientWidth || 600; } // 0 while the film is not laid out

  function xOf(place) {
    return PLOT.left + (width() - PLOT.left - PLOT.right) * place / Math.max(1, film.frames.length - 1);
  }

  // Where a step lies, counted in frames: 2.5 is halfway between the third frame and the fourth.
  function placeOf(step) {
    const next = film.frames.findIndex((frame) => frame.step >= step);
    if (next < 0) return film.frames.length - 1;
    if (next === 0) return 0;
    const [from, to] = [film.frames[next - 1].step, film.frames[next].step];
    return next - 1 + (step - from) / (to - from);
  }

  function drawn(tag, attributes, text) {
    byId('film-curves').append(svg(tag, attributes, text));
  }

  function drawPath(points, className) {
    if (points.length) drawn('path', {
      class: className, d: 'M' + points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join('L'),
    });
  }

  // Draws a line and its number at both ends of the range; gives the function from a value to its height.
  function panel(top, height, low, high) {
    const y = (value) => top + height * (1 - (value - low) / (high - low || 1));
    for (const value of [low, high]) {
      drawn('line', { class: 'grid-line', x1: PLOT.left, x2: width() - PLOT.right, y1: y(value), y2: y(value) });
      // `Number` drops zeros at the end: 4.10 -> 4.1
      drawn('text', { x: PLOT.left - 8, y: y(value) + 4, 'text-anchor': 'end' }, Number(value.toFixed(2)).toString());
    }
    return y;
  }

  // A phrase at the end of an axis.
  function axis(key, x, y, anchor) { drawn('text', { x, y, 'text-anchor': anchor }, say(key)); }

  function drawCurves() {
    byId('film-curves').replaceChildren();
    // While the model trains, losses come more often than frames: those behind the last frame have no place yet.
    const last = film.frames[film.frames.length - 1].step, shown = film.losses.filter((row) => row.step <= last);
    const values = shown.flatMap((row) => [row.loss, row.held_out_loss ?? row.loss]);
    if (values.length) {
      const y = panel(PLOT.top, PLOT.loss, 0, Math.ceil(Math.max(...values) * 10) / 10); // to the next tenth above
      const x = (row) => xOf(placeOf(row.step)), held = shown.filter((row) => row.held_out_loss !== undefined);
      drawPath(shown.map((row) => [x(row), y(row.loss)]), 'train');
      drawPath(held.map((row) => [x(row), y(row.held_out_loss)]), 'held-out');
    }
    const top = PLOT.top + PLOT.loss + PLOT.gap, y = panel(top, PLOT.alike, 0, 1);
    const shares = film.frames.map((_, index) => [xOf(index), meanAlike(index)]);
    drawPath(shares.filter(([, share]) => share !== null).map(([x, share]) => [x, y(share)]), 'alike');
    for (const { first } of earnedRoles()) { // a small triangle under the losses
      const x = xOf(first), foot = PLOT.top + PLOT.loss + 14;
      drawn('path', { class: 'earned', d: `M${x} ${foot - 10}l5 10h-10z` });
    }
    // Every frame has its step below it, or every nth where a label would have less than 48 pixels.
    const bottom = top + PLOT.alike, every = Math.max(1, Math.ceil(film.frames.length * 48 / width()));
    film.frames.forEach((_, index) => {
      if (index % every === 0) drawn('text', { x: xOf(index), y: bottom + 18, 'text-anchor': 'middle' }, stepOf(index));
    });
    axis('film.axis_loss', PLOT.left - 8, 10, 'start');
    axis('film.axis_alike', PLOT.left - 8, top - 10, 'start');
    axis('film.axis_step', width() - PLOT.right, bottom + 36, 'end');
    const x = xOf(view.at); // the frame that is shown
    drawn('line', { class: 'now', x1: x, x2: x, y1: PLOT.top - 6, y2: bottom + 4 });
  }

  // --- The pictures ---

  // 256 colours from weight 0 to 1, mixed between the four of the style sheet, which are written as #rrggbb.
  function readRamp() {
    const style = getComputedStyle(document.documentElement);
    const stops = [0, 1, 2, 3].map((stop) => style.getPropertyValue(`--ramp-${stop}`).trim())
      .map((text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)));
    view.ramp = Array.from({ length: 256 }, (_, level) => {
      const place = 3 * level / 255, low = Math.min(2, Math.floor(place)); // between the stops `low` and `low + 1`
      return stops[low].map((from, i) => Math.round(from + (stops[low + 1][i] - from) * (place - low)));
    });
  }

  // One pixel a cell, which the style sheet enlarges; above the diagonal it is transparent.
  function paint(canvas, map, size) {
    canvas.width = canvas.height = size;
    const image = new ImageData(size, size);
    for (let row = 0; row < size; row++) {
      for (let column = 0; column < size; column++) {
        const level = column > row ? 0 : map[row * (row + 1) / 2 + column];
        // Red, green, blue and opacity of a pixel.
        image.data.set([...view.ramp[level], column > row ? 0 : 255], 4 * (row * size + column));
      }
    }
    canvas.getContext('2d').putImageData(image, 0, 0);
  }

  // Where the head looks hardest, in words: the weight that is furthest above that of even attention, 1 / (row + 1)
  // on each of the tokens up to the row's own.
  function hardest(map, tokens) {
    let best = [0, 0], most = -1;
    for (let row = 0; row < tokens.length; row++) {
      for (let column = 0; column <= row; column++) {
        const more = weightAt(map, row, column) - 1 / (row + 1);
        if (more > most) [best, most] = [[row, column], more];
      }
    }
    return cellWords(tokens, ...best, weightAt(map, ...best));
  }

  // First strong isolates (U+2068, U+2069) keep a right-to-left token from turning the words around it.
  function cellWords(tokens, row, column, weight) {
    return say('film.cell', { looks: `\u2068${shown(tokens[row])}\u2069`, at: `\u2068${shown(tokens[column])}\u2069`,
      weight: weight.toFixed(2) });
  }

  function shown(token) { return token.replaceAll(' ', '␣').replaceAll('\n', '⏎').replaceAll('\t', '⇥'); }

  function makeTiles() {
    // As many pictures side by side as a layer has heads, but at least two and at most eight.
    const layers = new Set(film.header.heads.map((name) => name.split('.H')[0])).size; // "L0.H3" -> "L0"
    HEADS.style.setProperty('--across', Math.min(8, Math.max(2, film.header.heads.length / layers)));
    view.tiles = film.header.heads.map((name, head) => {
      const figure = element('figure'), canvas = element('canvas'), words = element('figcaption');
      figure.setAttribute('role', 'listitem');
      canvas.setAttribute('role', 'img');
      canvas.addEventListener('pointermove', (event) => sayCell(event, head));
      canvas.addEventListener('pointerleave', () => { byId('film-said').textContent = ''; });
      const [top, side, map] = ['film-top', 'film-side', 'film-map'].map((className) => element('div', className));
      for (const labels of [top, side]) labels.setAttribute('aria-hidden', 'true');
      map.append(top, side, canvas);
      figure.append(map, words);
      return { figure, canvas, words, name, labels: [top, side] };
    });
    HEADS.replaceChildren(...view.tiles.map((tile) => tile.figure));
    labelTiles();
  }

  // The tokens beside and above each picture; a long line has none.
  function labelTiles() {
    const tokens = film.header.lines[view.line], some = tokens.length <= LABELLED ? tokens : [];
    for (const { labels } of view.tiles) {
      for (const label of labels) label.replaceChildren(...some.map((token) => element('span', '', shown(token))));
    }
  }

  // The weight under the pointer, in words below the pictures.
  function sayCell(event, head) {
    const tokens = film.header.lines[view.line], box = event.target.getBoundingClientRect();
    // A part of the picture's height or width -> a token; a pointer on the very edge still counts.
    const inside = (part) => Math.min(tokens.length - 1, Math.max(0, Math.floor(part * tokens.length)));
    const row = inside((event.clientY - box.top) / box.height), column = inside((event.clientX - box.left) / box.width);
    const weight = weightAt(mapOf(view.at, head, view.line), row, column);
    byId('film-said').textContent = `${film.header.heads[head]}: ${cellWords(tokens, row, column, weight)}`;
  }

  function drawTiles() {
    const tokens = film.header.lines[view.line];
    view.tiles.forEach(({ canvas, words, name }, head) => {
      const map = mapOf(view.at, head, view.line), hardestWords = hardest(map, tokens);
      paint(canvas, map, tokens.length);
      canvas.setAttribute('aria-label', `${name}: ${hardestWords}`);
      const roles = film.frames[view.at].roles[head].filter((role) => hasRole(view.at, head, role));
      words.replaceChildren(element('b', '', name), hardestWords, element('br'),
        ...roles.flatMap((role) => [element('span', 'role', roleWords(role)), ' ']));
    });
  }

  // --- Words around them ---

  // What each curve and sign stands for.
  function makeKey() {
    const parts = [ // [class, phrase]
      ['train', 'film.train'], ['held-out', 'film.held_out'], ['earned', 'film.earns'], ['alike', 'film.alike'],
    ];
    byId('film-key').replaceChildren(...parts.map(([className, key]) => {
      const item = element('span');
      item.append(element('i', className), worded('span', '', key));
      return item;
    }));
  }

  // A radio button for each filmed text. Tokens that are single characters are written without gaps.
  function makeLines() {
    const labels = film.header.lines.map((tokens, line) => {
      const label = element('label', 'switch'), radio = element('input');
      Object.assign(radio, { type: 'radio', name: 'film-line', autocomplete: 'off', checked: line === view.line });
      radio.addEventListener('change', () => { view.line = line; labelTiles(); drawTiles(); });
      label.append(radio,
        element('bdi', '', tokens.map(shown).join(tokens.every((token) => token.length < 2) ? '' : ' ')));
      return label;
    });
    byId('film-lines').replaceChildren(byId('film-lines').firstElementChild, ...labels); // its first is the legend
  }

  // The list of who earned which role when; a click goes to that frame.
  function drawEarned() {
    const items = earnedRoles().map(({ name, role, first }) => {
      const item = element('li'), text = say('film.earned', { step: stepOf(first), head: name, role: roleWords(role) });
      const button = element('button', '', text);
      button.type = 'button';
      button.setAttribute('aria-pressed', String(first === view.at));
      button.addEventListener('click', () => { stop(); go(first); });
      item.append(button);
      return item;
    });
    // The buttons are made anew: the one at the same place gets the focus that the old one had.
    const list = element('ol'), had = document.activeElement && byId('film-earned').contains(document.activeElement);
    const place = had ? [...byId('film-earned').querySelectorAll('button')].indexOf(document.activeElement) : -1;
    list.append(...items);
    const title = worded('p', 'caption', items.length ? 'film.earned_title' : 'film.earned_none');
    byId('film-earned').replaceChildren(title, ...(items.length ? [list] : []));
    if (place >= 0) byId('film-earned').querySelectorAll('button')[place]?.focus();
  }

  function drawWords() {
    const step = film.frames[view.at].step, loss = lossAt(step), alike = meanAlike(view.at);
    const parts = [say('film.now', { step: stepOf(view.at), steps: film.header.steps.toLocaleString('en-US') })];
    if (loss !== null) parts.push(say('film.now_loss', { loss: loss.toFixed(3) }));
    if (alike !== null) parts.push(say('film.now_alike', { share: Math.round(100 * alike) }));
    byId('film-now').textContent = parts.join(' · ');
    byId('film-at').setAttribute('aria-valuetext', parts.join(', '));
    setWord(byId('film-play'), view.timer ? 'film.pause' : 'film.play');
  }

  // --- Moving ---

  function draw() {
    drawCurves();
    drawTiles();
    drawEarned();
    drawWords();
  }

  // Shows a frame, the nearest that there is.
  function go(index) {
    view.at = Math.min(film.frames.length - 1, Math.max(0, index));
    view.follow = view.at === film.frames.length - 1;
    byId('film-at').value = String(view.at);
    draw();
  }

  function stop() {
    clearInterval(view.timer);
    view.timer = 0;
    drawWords();
  }

  function play() {
    if (view.timer) { stop(); return; }
    if (view.at === film.frames.length - 1) go(0); // from the end it begins anew
    view.timer = setInterval(() => {
      go(view.at + 1);
      if (view.at === film.frames.length - 1) stop();
    }, BEAT);
    drawWords();
  }

  // Once the header is there: what stays the same for all frames.
  function begin() {
    readRamp();
    makeKey();
    makeLines();
    makeTiles();
    byId('film').hidden = false;
  }

  // Shows all that came since the last time: the film goes along, unless the reader has gone back in it.
  function update() {
    if (!film.header || !film.frames.length) return;
    if (byId('film').hidden) begin();
    byId('film-at').max = String(film.frames.length - 1);
    go(view.follow ? film.frames.length - 1 : view.at); // also where the frame stays, for the curves have grown
  }

  byId('film-play').addEventListener('click', play);
  byId('film-at').addEventListener('input', (event) => { stop(); go(Number(event.target.value)); });
  document.addEventListener('language', () => { if (film.frames.length) draw(); });
  window.addEventListener('resize', () => { if (film.frames.length) drawCurves(); });
  window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { // other colours
    readRamp();
    if (film.frames.length) draw();
  });
  update(); // a report has all frames already; a page of a training has none yet
  return { film, update };
}

// null on a report without a film. live.js, on a page that is served while the model trains, adds to the film.
export const started = byId('film') ? startFilm() : null;
