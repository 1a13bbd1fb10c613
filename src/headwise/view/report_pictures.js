// --- What a picture shows: rows, columns, and weights from 0 to 1 row by row ---

const packed = new Map(); // base64 -> its weights, made when first needed

function kept(base64) {
  if (!packed.has(base64)) packed.set(base64, weights(base64));
  return packed.get(base64);
}

// The small picture as it is stored: the share of its attention that a block of rows gives a block of columns.
function sharesOf(number, which) {
  const head = which === 'other' ? heads[number].other : heads[number];
  return head && { rows: head.rows, columns: head.columns, weights: kept(head.shares), first: kept(head.first) };
}

const exactMaps = new Map();

function hasExact(number) { return Boolean(data.maps) && heads[number].name in data.maps.weights; }

function usesExact(number) { return view.which === 'this' && view.exact && hasExact(number); }

function exactOf(number) {
  if (exactMaps.has(number)) return exactMaps.get(number);
  const count = data.maps.tokens.length, stored = weights(data.maps.weights[heads[number].name]);
  const full = new Float32Array(count * count), first = new Float32Array(count);
  for (let row = 0, at = 0; row < count; row++) {
    // A causal map is stored without the zeros above its diagonal.
    const width = data.maps.causal ? row + 1 : count;
    full.set(stored.subarray(at, at + width), row * count);
    first[row] = full[row * count];
    at += width;
  }
  const map = { rows: count, columns: count, weights: full, first };
  exactMaps.set(number, map);
  return map;
}

// What is left without the first token; the first column of a small picture holds others, too.
function withoutFirst(stored) {
  const left = stored.weights.slice();
  stored.first.forEach((weight, row) => {
    left[row * stored.columns] = Math.max(0, left[row * stored.columns] - weight);
  });
  return left;
}

function largestOf(numbers) { return numbers.reduce((most, value) => Math.max(most, Math.abs(value)), 0); }

// As it is drawn: `drawn` are weights after the switches, `top` has the last colour, `read` is what is said.
function prepared(stored) {
  const drawn = view.hideFirst ? withoutFirst(stored) : stored.weights;
  return { ...stored, drawn, read: stored.weights, top: view.hideFirst ? largestOf(drawn) || 1 : 1, diverging: false };
}

function difference(one, other) {
  const minus = (a, b) => a.map((weight, at) => weight - b[at]);
  const [a, b] = [one, other].map(prepared), drawn = minus(a.drawn, b.drawn);
  return { ...a, drawn, read: minus(a.read, b.read), top: largestOf(drawn) || 1, diverging: true };
}

// The small picture of a head; or in words why there is none.
function pictureOf(number) {
  const one = sharesOf(number, 'this'), other = sharesOf(number, 'other');
  if (view.which === 'this') return prepared(one);
  if (!other) return 'not there';
  if (view.which === 'other') return prepared(other);
  return one.rows === other.rows && one.columns === other.columns ? difference(one, other) : 'other size';
}

// One pixel a cell; the style sheet enlarges it.
function paint(canvas, picture) {
  canvas.width = picture.columns;
  canvas.height = picture.rows;
  const image = new ImageData(picture.columns, picture.rows);
  picture.drawn.forEach((weight, at) => {
    image.data.set(colourOf(weight, picture.top, picture.diverging), 4 * at);
    image.data[4 * at + 3] = 255;
  });
  canvas.getContext('2d').putImageData(image, 0, 0);
}

// --- Where a row or a column lies in the text ---

// First and last token of a block, or nothing where the length of the text is not known.
function spanOf(block, blocks, length) {
  if (!length) return null;
  return [Math.ceil((block * length) / blocks), Math.ceil(((block + 1) * length) / blocks) - 1];
}

function percent(block, blocks) { return `${Math.round((100 * block) / blocks)}–${Math.round((100 * (block + 1)) / blocks)} %`; }

function shownHead() { return view.which === 'other' ? heads[view.open].other : heads[view.open]; }

function placeLabel(block, blocks) {
  if (usesExact(view.open)) return cut(data.maps.tokens[block]);
  const span = spanOf(block, blocks, shownHead().length);
  if (!span) return percent(block, blocks);
  return span[0] < span[1] ? `${span[0]}–${span[1]}` : cut(data.tokens[span[0]] ?? String(span[0]));
}

function named(token, tokens) { return `token ${token}` + (token in tokens ? ' ' + quoted(tokens[token]) : ''); }

function placeWords(block, blocks, isKey) {
  if (usesExact(view.open)) return [named(block, data.maps.tokens), false];
  const head = shownHead(), span = spanOf(block, blocks, head.length);
  const text = isKey && head.cross ? 'the other text' : 'the text';
  if (!span) return [`${percent(block, blocks)} of ${text}`, false];
  return span[0] < span[1] ? [`tokens ${span[0]} to ${span[1]}`, true] : [named(span[0], data.tokens), false];
}

function wordsForCell() {
  const picture = view.picture, weight = picture.read[view.row * picture.columns + view.column];
  const [from, many] = placeWords(view.row, picture.rows, false);
  const [to] = placeWords(view.column, picture.columns, true);
  const value = picture.diverging ? `difference ${signed(weight)}` : inWords(weight);
  return `${from} ${many ? 'look' : 'looks'} at ${to}: ${value}`;
}
