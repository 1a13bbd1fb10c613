// --- Heads that are silenced or scaled, and what each of them means for this very prediction ---
//
// view.changes has the factor of each changed head; the ranking silences each head alone, whatever is changed.

import { byId, element, putWords, say } from './page/base.js';
import { likeliest } from './page/model.js';
import { setFactor } from './report_factor.js';
import { boxes, nameHeads } from './report_grid.js';
import { showSilence } from './report_head.js';
import { hasModel, think, visible, vocabulary } from './report_model.js';
import { chancesOf, prediction } from './report_next.js';
import { showOwn, typed } from './report_own.js';
import { bar, heads, moved, movedWords, numberOf, percent, points, quoted, setText, view } from './report_state.js';

// A head stands out in the grid if the followed token loses more than 20 percentage points without it:
// a round choice.
const STRONG = -0.2;
// Name of a head -> {part, then}: the chance of the followed token without it,
// and the id of the likeliest token then.
export const ranking = new Map();
let ranked = {}; // {place, chosen}: where the ranking was made, and the id that was followed

// Silences a head; one that is silent gets its voice back.
export function toggleSilence(number) {
  const name = heads[number].name;
  if (!hasModel()) return;
  scaleHead(name, view.changes.get(name) === 0 ? 1 : 0);
}

// Gives a head a factor: 0 silences it, 1 leaves it as it is.
export function scaleHead(name, factor) {
  setFactor(view.changes, name, factor);
  changesChanged();
}

// Takes all factors back; the button that did so and had the focus is hidden then.
export function wakeAll() {
  view.changes.clear();
  changesChanged();
  byId('own-text').focus();
}

// Runs the model with the changed heads, and shows what becomes of it.
function changesChanged() {
  byId('wake').hidden = !view.changes.size;
  nameHeads();
  typed.less = view.changes.size ? think(typed.ids, view.changes) : typed.whole;
  if (view.open >= 0) showSilence();
  showOwn();
}

// Runs the model once for each head, without that head alone.
// The page answers in between, and what has changed by then ends it.
export async function silenceEach() {
  const { place, chosen } = prediction(), { whole, ids } = typed, tried = new Map();
  for (const [number, head] of heads.entries()) {
    const chances = chancesOf(think(ids, new Map([[head.name, 0]])), place);
    tried.set(head.name, { part: chances[chosen], then: likeliest(chances) });
    setText('ranking-note', 'report.ranking_at_work', { done: number + 1, all: heads.length });
    // After every fourth head the page may answer; more heads in between would let the reader wait longer.
    if (number % 4 === 3) await new Promise((resolve) => { setTimeout(resolve, 0); });
    // Meanwhile the reader may have typed, or looks at another token.
    if (whole !== typed.whole || prediction().place !== place || prediction().chosen !== chosen) return;
  }
  ranking.clear();
  for (const entry of tried) ranking.set(...entry);
  ranked = { place, chosen };
  showRanking();
}

// The heads by what their silence takes from the token that is followed, the most first; at another place nothing.
export function showRanking() {
  const list = byId('ranking'), { place, before, chosen } = prediction();
  const whole = before[chosen]; // the chance of the followed token with all heads
  const fits = ranking.size > 0 && ranked.place === place && ranked.chosen === chosen;
  list.hidden = !fits;
  if (!fits) setText('ranking-note', 'report.ranking_offer', {});
  else setText('ranking-note', 'report.ranking', {
    token: quoted(visible(vocabulary()[chosen])), part: percent(whole),
  });
  const names = [...(fits ? ranking.keys() : [])].sort((a, b) => ranking.get(a).part - ranking.get(b).part);
  list.replaceChildren(...names.map((name) => rankingRow(name, whole)));
  for (const box of boxes) { // below each picture of the grid stands what becomes of the token without this head alone
    const alone = fits && ranking.get(heads[box.dataset.number].name), change = alone ? alone.part - whole : 0;
    const effect = box.querySelector('.effect');
    effect.textContent = moved(change) ? say('report.points', { value: points(change) }) : ''; // '' where it stays
    effect.classList.toggle('strong', change < STRONG);
  }
}

// A line of the ranking: the head as a button that silences it, the token's chance without it,
// and what is likeliest then.
function rankingRow(name, whole) {
  const { part, then } = ranking.get(name), item = element('li');
  const button = element('button', 'token', name), silent = view.changes.get(name) === 0;
  button.type = 'button';
  button.dataset.name = name;
  button.setAttribute('aria-pressed', String(silent));
  button.setAttribute('aria-label', say(silent ? 'report.wake' : 'report.silence', { name }));
  button.addEventListener('click', () => {
    toggleSilence(numberOf.get(name));
    byId('ranking').querySelector(`[data-name="${name}"]`).focus(); // the row was made anew
  });
  const words = element('span', 'then');
  putWords(words, movedWords(part - whole), { token: quoted(visible(vocabulary()[then])) });
  item.append(button, bar(part, 'theirs', 'span'), words);
  return item;
}
