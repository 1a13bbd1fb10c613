// --- The grid of small pictures ---

const FRAME_MS = 12; // time given to drawing before the page may answer again
const stale = new Set(), inSight = new Set(); // numbers of heads
let pictures = [], watcher = null, drawing = 0;

function distinct(values) { return [...new Set(values)]; }

function badge(role) {
  const sign = byRole.get(role).cloneNode(true);
  sign.removeAttribute('role');
  sign.setAttribute('aria-hidden', 'true');
  sign.title = data.roles[role];
  return sign;
}

const byRole = new Map([...document.querySelectorAll('.choose')].map(
  (button) => [Number(button.dataset.role), button.querySelector('.badge')]));

function roleWords(head) { return head.roles.map((role) => data.roles[role]).join(', '); }

function makeGrid() {
  const parts = distinct(heads.map((head) => head.part));
  for (const part of parts) {
    const name = part ? part[0].toUpperCase() + part.slice(1) : 'Attention';
    if (parts.length > 1) byId('grid').append(element('h3', '', name));
    byId('grid').append(makePart(part, name));
  }
  pictures = [...byId('grid').querySelectorAll('.head')].sort((a, b) => a.dataset.number - b.dataset.number);
  pictures[0].tabIndex = 0;
  watcher = new IntersectionObserver(sighted, { rootMargin: '200px' });
  pictures.forEach((button) => watcher.observe(button));
}

function makePart(part, name) {
  const own = heads.map((head, number) => [head, number]).filter(([head]) => head.part === part);
  const [across, down] = ['head', 'layer'].map(
    (key) => distinct(own.map(([head]) => head[key])).sort((a, b) => a - b));
  const box = element('div', 'grid');
  box.style.gridTemplateColumns = `repeat(${across.length}, minmax(4.3rem, 9.5rem))`;
  box.setAttribute('role', 'group');
  box.setAttribute('aria-label', name);
  for (const [head, number] of own) {
    const button = makePicture(head, number);
    button.style.gridArea = `${down.indexOf(head.layer) + 1} / ${across.indexOf(head.head) + 1}`;
    box.append(button);
  }
  return box;
}

// The name without its stack; behind it that of the head it is compared with, where it is another.
function bothNames(head) {
  const was = head.other?.name ?? head.name, short = (name) => name.split('.').slice(-2).join('.');
  return short(head.name) + (was === head.name ? '' : ` (${short(was)})`);
}

function makePicture(head, number) {
  const button = element('button', 'head'), signs = element('span', 'signs');
  button.type = 'button';
  button.tabIndex = -1; // one stop for Tab, the arrow keys do the rest
  button.dataset.number = number;
  button.setAttribute('aria-haspopup', 'dialog');
  button.setAttribute('aria-label', [`${head.name}, enlarge`, roleWords(head)].filter(Boolean).join('. '));
  signs.append(...head.roles.map(badge));
  button.append(element('canvas'), element('span', 'title', bothNames(head)), signs,
    element('span', 'largest'));
  button.addEventListener('click', () => openHead(number, button));
  button.addEventListener('focus', () => stopAt(pictures, button));
  return button;
}

// Tab stops once among these elements, at the one that was last used.
function stopAt(elements, chosen) {
  for (const one of elements) if (one.tabIndex === 0) one.tabIndex = -1;
  chosen.tabIndex = 0;
}

function drawPicture(number) {
  const picture = pictureOf(number), button = pictures[number], canvas = button.querySelector('canvas');
  const missing = typeof picture === 'string';
  canvas.classList.toggle('missing', missing);
  if (missing) canvas.width = canvas.height = 1;
  else paint(canvas, picture);
  const scaled = !missing && (view.hideFirst || picture.diverging);
  button.querySelector('.largest').textContent = missing ? picture : scaled ? 'max ' + inWords(picture.top) : '';
  stale.delete(number);
}

function sighted(entries) {
  for (const entry of entries) {
    const number = Number(entry.target.dataset.number);
    if (entry.isIntersecting) inSight.add(number);
    else inSight.delete(number);
    if (entry.isIntersecting && stale.has(number)) drawPicture(number);
  }
  countDrawn();
}

function countDrawn() { byId('main').dataset.drawn = String(heads.length - stale.size); }

// Those in sight at once, the others a few at a time; a later call replaces one that is still under way.
function drawGrid() {
  const turn = ++drawing;
  heads.forEach((_, number) => stale.add(number));
  inSight.forEach(drawPicture);
  sayScale();
  const some = () => {
    if (turn !== drawing) return;
    const until = performance.now() + FRAME_MS;
    for (const number of stale) {
      if (performance.now() > until) break;
      drawPicture(number);
    }
    countDrawn();
    if (stale.size) setTimeout(some, 0);
  };
  some();
}

// What the colours and the dots stand for, wherever that is not plain 0 to 1.
function sayScale() {
  const lines = [], diverging = view.which === 'difference', own = view.hideFirst || diverging;
  const hidden = view.hideFirst ? 'Without the first token. ' : '';
  if (diverging) lines.push(`This model minus the other. ${hidden}Each picture has its own scale, the “max” below it.`);
  else if (hidden) lines.push(`${hidden}Each picture is coloured up to its own largest weight left, the “max” below it.`);
  if (view.log) lines.push('On the log scale all below a thousandth of the last colour looks the same.');
  if (heads.some((head) => !head.length || head.length > head.columns)) {
    lines.push('A dot is a block of tokens: the share of its attention that the block of rows gives to the columns.');
  }
  byId('scale-note').textContent = lines.join(' ');
  drawLegend(document.querySelector('.tools .legend'), diverging, own ? 'its largest' : '1');
}

// The arrow keys walk over the grid; above and below the last row of a part lies the next part.
function walkGrid(event) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  const here = event.target.closest('.head');
  if (!step || !here || event.altKey || event.ctrlKey || event.metaKey) return;
  const row = Number(here.style.gridRowStart) + step[0], column = Number(here.style.gridColumnStart) + step[1];
  const at = (button) => Number(button.style.gridRowStart) === row && Number(button.style.gridColumnStart) === column;
  const there = [...here.parentElement.children].find(at) ?? (step[0] ? beyond(here.parentElement, step[0]) : null);
  event.preventDefault();
  if (there) there.focus();
}

function beyond(box, by) {
  const boxes = [...byId('grid').querySelectorAll('.grid')], next = boxes[boxes.indexOf(box) + by];
  return next && (by > 0 ? next.firstElementChild : next.lastElementChild);
}
