// --- The story of a prediction: choose a head, and the words that it looks at are tinted ---

const story = readData('story');
let chosen = story.told[0];

function draw() {
  const opening = byId('opening'), group = byId('heads');
  opening.replaceChildren(...story.opening[language()].map((line) => strong('p', line)));
  group.replaceChildren(...story.told.map((name, place) => {
    const button = strong('button', story.sentences[language()][place]);
    button.type = 'button';
    button.setAttribute('aria-pressed', String(name === chosen));
    button.addEventListener('click', () => choose(name));
    return button;
  }));
  byId('numbers').replaceChildren(table());
  tint();
}

// Text whose *words* stand out; the words are the model's, and stay text.
function strong(tag, text) {
  const made = element(tag);
  text.split('*').forEach((piece, place) => made.append(place % 2 ? element('b', '', piece) : piece));
  return made;
}

function choose(name) {
  chosen = name;
  for (const button of byId('heads').children) {
    button.setAttribute('aria-pressed', String(story.told[[...byId('heads').children].indexOf(button)] === chosen));
  }
  tint();
}

function tint() {
  const looks = new Map(story.heads.find((part) => part.head === chosen).looks);
  for (const token of document.querySelectorAll('.token')) {
    const weight = looks.get(Number(token.dataset.token)) || 0;
    token.style.setProperty('--look', `${Math.round(100 * weight)}%`);
    token.title = weight ? `${chosen}: ${weight.toFixed(2)}` : '';
  }
  for (const node of document.querySelectorAll('.node')) node.classList.toggle('chosen', node.dataset.head === chosen);
}

function table() {
  const made = element('table'), head = made.createTHead().insertRow();
  for (const name of ['head', 'adds', 'carries', 'looks', 'without']) {
    const cell = worded('th', '', `why.column_${name}`);
    cell.scope = 'col';
    head.append(cell);
  }
  const signed = (x) => (x === null ? '-' : (x > 0 ? '+' : '') + x.toFixed(2));
  const body = made.createTBody();
  for (const part of story.heads) {
    const row = body.insertRow(), looks = part.looks.map(([t, weight]) => `${story.tokens[t]} ${weight.toFixed(2)}`);
    for (const text of [part.head, signed(part.adds), signed(part.brings), looks.join(', '), signed(part.without)]) {
      row.insertCell().textContent = text;
    }
  }
  return made;
}

document.addEventListener('language', draw);
draw();
