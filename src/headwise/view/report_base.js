const LEVELS = 65535; // a stored weight is a whole number of this many parts
const COLOURS = 255;
const DECADES = 3; // the log scale begins at a thousandth of its end

const data = readData('data');
const heads = data.heads;
const view = { which: 'this', hideFirst: false, log: false, exact: true, roles: new Set(), words: [], // what is shown
  open: -1, opener: null, picture: null, row: 0, column: 0, token: -1, cell: 0, gutter: 0, // in the large view
  ramps: { plain: [], diverging: [] } };

// Whole numbers, little-endian, of two or four bytes each.
function unpacked(base64, bytes = 2) {
  const text = atob(base64), numbers = new Array(text.length / bytes);
  for (let place = 0, at = 0; place < numbers.length; place++, at += bytes) {
    let value = 0;
    for (let byte = bytes - 1; byte >= 0; byte--) value = value * 256 + text.charCodeAt(at + byte);
    numbers[place] = value;
  }
  return numbers;
}

function weights(base64) { return Float32Array.from(unpacked(base64), (level) => level / LEVELS); }

// --- Colours ---

function variable(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

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

function buildRamps() {
  view.ramps.plain = rampBetween(['--ramp-0', '--ramp-1', '--ramp-2', '--ramp-3']);
  view.ramps.diverging = rampBetween(['--below-2', '--below-1', '--ramp-0', '--above-1', '--above-2']);
}

// How far along the colours a weight is, 0 to 1, where `top` has the last colour.
function along(weight, top) {
  const part = Math.min(1, Math.max(0, weight / top));
  if (!view.log) return part;
  return part > 0 ? Math.max(0, 1 + Math.log10(part) / DECADES) : 0;
}

function colourOf(weight, top, diverging) {
  if (!diverging) return view.ramps.plain[Math.round((COLOURS - 1) * along(weight, top))];
  return view.ramps.diverging[Math.round(((COLOURS - 1) / 2) * (1 + Math.sign(weight) * along(Math.abs(weight), top)))];
}

// Black or white, whichever stands out more from the colour (relative luminance as contrast rules define it).
function inkOn(colour) {
  const [r, g, b] = colour.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? '#000' : '#fff';
}

// The strip of colours and its two ends, in `place`; `largest` says in words what the last colour stands for.
function drawLegend(place, diverging, largest) {
  const image = new ImageData(COLOURS, 1);
  view.ramps[diverging ? 'diverging' : 'plain'].forEach((colour, step) => image.data.set([...colour, 255], 4 * step));
  place.querySelector('.ramp').getContext('2d').putImageData(image, 0, 0);
  const part = largest === '1' ? (10 ** -DECADES).toString() : 'a thousandth';
  place.querySelector('.ramp-low').textContent = diverging ? `−${largest}` : view.log ? part : '0';
  place.querySelector('.ramp-high').textContent = diverging ? `+${largest}` : largest;
}

// --- Numbers and words ---

function inWords(weight) {
  const value = Math.abs(weight) > 0 && Math.abs(weight) < 0.0005 ? 'under 0.001' : Math.abs(weight).toFixed(3);
  return weight < -0.0005 ? '−' + value : value;
}

function signed(weight) { return weight >= 0.0005 ? '+' + inWords(weight) : inWords(weight); }

// A number of the table, with the decimals of its column; no zero has a sign.
function figure(value, column, sign = column.signed) {
  if (value === null || value === undefined) return '–';
  const text = Math.abs(value).toLocaleString('en-US',
    { minimumFractionDigits: column.decimals, maximumFractionDigits: column.decimals });
  const zero = !/[1-9]/.test(text);
  return (zero || (value > 0 && !sign) ? '' : value > 0 ? '+' : '−') + text;
}

function intervalIn(value, column) {
  if (!value) return 'not defined here';
  if (!value[3]) return 'none';
  if (value[1] === null || value[2] === null) return 'one document';
  if (value[3] === 1) return 'exact';
  return `${figure(value[1], column)} to ${figure(value[2], column)}`;
}

// First strong isolates keep a right-to-left token from turning the words and numbers around it.
function quoted(token) { return '‘\u2068' + token + '\u2069’'; }

// At most twelve characters of a token; whole code points, so that an emoji is not cut in half.
function cut(token) {
  const characters = [...token];
  return characters.length > 12 ? characters.slice(0, 11).join('') + '…' : characters.join('');
}
