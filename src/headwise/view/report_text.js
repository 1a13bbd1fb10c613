// --- The text of a head: what each token looks at, and what each receives ---

const MARKED = 0.2; // of the largest weight that a token gives: those from here on are underlined
const NAMED = 3; // tokens that are named below the text

// The tokens of the text in the large view, and for each the weights of what it looks at.
function textOf(number) {
  if (usesExact(number)) return exactText(number);
  const head = heads[number], tokens = data.tokens.slice(0, data.passage);
  if (!head.k || view.which === 'other') return { tokens: [], received: [], looks: () => [] };
  const keys = unpacked(head.keys, data.wide ? 4 : 2), top = weights(head.weights);
  const received = weights(head.received).map((part) => part * head.largest);
  const looks = (token) => Array.from({ length: head.k }, (_, place) => token * head.k + place)
    .map((at) => ({ key: keys[at], weight: top[at] })).filter((one) => one.weight > 0);
  return { tokens: tokens.slice(0, keys.length / head.k), received: head.cross ? [] : received, looks, cross: head.cross };
}

function exactText(number) {
  const map = exactOf(number), tokens = data.maps.tokens;
  const received = tokens.map((_, key) => tokens.reduce((sum, _, row) => sum + map.weights[row * map.columns + key], 0));
  const looks = (token) => tokens.map((_, key) => ({ key, weight: map.weights[token * map.columns + key] }))
    .filter((one) => one.weight > 0).sort((a, b) => b.weight - a.weight);
  return { tokens, received: received.map((sum) => sum / tokens.length), looks };
}

let words = [], text = null;

// The words are made once for a text, so that a chosen one keeps the focus while its marks change.
function makeText() {
  const old = text && text.tokens;
  text = textOf(view.open);
  if (!old || old.length !== text.tokens.length || old.some((token, at) => token !== text.tokens[at])) {
    words = text.tokens.map((token, at) => {
      const word = element('button', 'word');
      word.type = 'button';
      word.tabIndex = at ? -1 : 0;
      word.append(element('bdi', '', token));
      word.addEventListener('click', () => chooseToken(view.token === at ? -1 : at));
      word.addEventListener('focus', () => stopAt(words, word));
      return word;
    });
    byId('row-text').replaceChildren(...words);
  }
  if (view.token >= words.length) view.token = -1;
}

function showText() {
  const chosen = view.token, given = chosen < 0 ? text.received : givenBy(chosen);
  const hidden = (at) => view.hideFirst && at === 0 && !text.cross;
  const top = Math.max(...Array.from(given, (weight, at) => (hidden(at) ? 0 : weight)), 1e-9);
  words.forEach((word, at) => {
    const weight = given[at] ?? 0, colour = colourOf(hidden(at) ? 0 : weight, top, false);
    word.style.backgroundColor = `rgb(${colour})`;
    word.style.color = inkOn(colour);
    word.title = `token ${at}: ${inWords(weight)}`;
    word.setAttribute('aria-pressed', String(at === chosen));
    word.classList.toggle('looking', at === chosen);
    word.classList.toggle('left-out', hidden(at));
    word.classList.toggle('marked', chosen >= 0 && !hidden(at) && weight >= MARKED * top);
  });
  byId('row-title').textContent = textTitle(chosen);
  byId('row-most').textContent = chosen < 0 ? mostReceived(given, hidden) : mostLookedAt(chosen, hidden);
}

function givenBy(token) {
  const given = new Float32Array(words.length);
  if (text.cross) return given; // its keys are another text
  for (const { key, weight } of text.looks(token)) if (key < given.length) given[key] = weight;
  return given;
}

function textTitle(chosen) {
  if (!words.length) return '';
  if (chosen >= 0) return `Where token ${chosen} ${quoted(text.tokens[chosen])} looks`;
  return text.cross ? 'Choose a token to see where it looks in the other text' : 'What each token receives';
}

function mostReceived(given, hidden) {
  const best = [...given.keys()].filter((at) => given[at] > 0 && !hidden(at)).sort((a, b) => given[b] - given[a]);
  const most = best.slice(0, NAMED).map((at) => `${quoted(text.tokens[at])} ${inWords(given[at])}`);
  if (!most.length) return '';
  return `Most to ${most.join(', ')}, a mean over the queries. Choose a token to see where it looks.`;
}

function mostLookedAt(chosen, hidden) {
  const looks = text.looks(chosen).filter((one) => !hidden(one.key));
  const inside = text.cross ? [] : looks.filter((one) => one.key < words.length);
  const outside = looks.filter((one) => text.cross || one.key >= words.length);
  const most = inside.slice(0, NAMED).map((one) => `${quoted(text.tokens[one.key])} ${inWords(one.weight)}`);
  const far = outside.map((one) => `${text.cross ? `key ${one.key}` : named(one.key, data.tokens)} ${inWords(one.weight)}`);
  const lines = [];
  if (most.length) lines.push(`Most to ${most.join(', ')}.`);
  if (far.length) lines.push(`${text.cross ? 'In the other text' : 'Outside the passage'}: ${far.join(', ')}.`);
  return lines.join(' ') || 'This row looks at nothing shown.';
}

function chooseToken(token) {
  view.token = token;
  if (token >= 0 && usesExact(view.open)) {
    view.row = token;
    view.column = text.looks(token)[0]?.key ?? 0;
    showCell();
    revealCell();
  }
  showText();
}

// A long text scrolls inside its panel to the token that the chosen cell of the map stands for.
function revealToken(token) {
  const panel = byId('row-text'), word = words[token];
  if (word) panel.scrollTop = word.offsetTop - panel.offsetTop - panel.clientHeight / 2;
}

function walkText(event, by) {
  const next = words[words.indexOf(event.target) + by];
  if (next) next.focus();
}
