// --- How far each key/value head looks: choose how many first tokens stay, and touch a cell ---
//
// A cell is the part of the attention that a window leaves out, where the head keeps the latest tokens and some first
// ones: head.outside[place of the first tokens in reach.sinks][place of the window in reach.windows] is its mean,
// with an interval. `Windows` and `KVReach` in plan.py have the other fields.

import { byId, element, language, readData, setWord, shadeEdge, told, worded } from './page/base.js';

const reach = readData('reach');
let sinks = Math.max(0, reach.sinks.indexOf(4)); // place in reach.sinks: that of 4 first tokens, where that was tried
let chosen = null; // the cell that is told of: [place of the head, place of the window]

const RAMP = ['--ramp-0', '--ramp-1', '--ramp-2', '--ramp-3']; // the four colours of weights, from 0 to 1

// Colours a cell by a mass of 0 to 1; its root, since most are small, and it tells small ones apart.
function tint(cell, mass) {
  // From 0 at the first colour to 3 at the last: it lies between RAMP[low] and the next.
  const place = Math.min(1, Math.sqrt(mass)) * 3, low = Math.min(2, Math.floor(place));
  const upper = Math.round(100 * (place - low)); // how much of the upper of the two, in percent
  cell.style.background = `color-mix(in srgb, var(${RAMP[low + 1]}) ${upper}%, var(${RAMP[low]}))`;
  // From a quarter behind the second colour on the cell is too dark for dark letters.
  cell.style.color = place > 1.25 ? 'var(--paper)' : 'var(--ink)';
}

// Everything, in the page's language.
function draw() {
  const values = { documents: reach.n_documents, tokens: reach.n_tokens.toLocaleString(language()) };
  values.longest = reach.longest.toLocaleString(language());
  setWord(byId('facts'), 'windows.facts', values);
  byId('sinks').replaceChildren(...reach.sinks.map((count, place) => {
    const button = element('button', '', String(count));
    button.type = 'button';
    button.setAttribute('aria-pressed', String(place === sinks));
    // The buttons are made anew, and the one that was clicked keeps the focus.
    button.addEventListener('click', () => { sinks = place; draw(); byId('sinks').children[place].focus(); });
    return button;
  }));
  byId('map').replaceChildren(heading(), body());
  byId('notes').replaceChildren(...reach.notes.map((note) => element('li', '', told(note))));
  tell();
}

// The columns: the head, a window each, how far back certain parts of the attention lie, and the needle.
function heading() {
  const head = element('thead'), row = head.insertRow();
  const add = (made) => { made.scope = 'col'; row.append(made); };
  add(worded('th', '', 'windows.head'));
  for (const size of reach.windows) add(element('th', '', size.toLocaleString(language())));
  for (const share of reach.shares) add(worded('th', '', 'windows.within', { share: Math.round(100 * share) }));
  add(worded('th', '', 'windows.needle'));
  return head;
}

// A row for each key/value head; one that retrieves stands out.
function body() {
  const made = element('tbody');
  reach.heads.forEach((head, at) => {
    const row = made.insertRow();
    row.classList.toggle('retrieves', head.retrieves);
    const name = element('th', '', head.name);
    name.scope = 'row';
    row.append(name);
    reach.windows.forEach((size, place) => {
      const button = element('button', '', head.outside[sinks][place].mean.toFixed(3));
      button.type = 'button';
      button.addEventListener('click', () => { chosen = [at, place]; tell(); });
      tint(button, head.outside[sinks][place].mean);
      row.insertCell().append(button);
    });
    // Cells without a colour: tokens back, and the mass on the token that continues a needle. Of a head that
    // retrieves stands behind it how many times the mass of the needle's other tokens that is;
    // `lift` is its logarithm.
    const plain = [
      ...head.reached.map((x) => Math.round(x.mean).toLocaleString(language())),
      head.needle.mean === null ? '–' : head.needle.mean.toFixed(2)
        + (head.retrieves ? ` × ${Math.exp(head.lift.mean).toPrecision(2)}` : ''),
    ];
    for (const text of plain) {
      const cell = row.insertCell();
      cell.className = 'plain';
      cell.textContent = text;
    }
  });
  return made;
}

// The chosen cell in a sentence, with the interval where it is known: low is null of a single document.
function tell() {
  if (!chosen) return setWord(byId('told'), 'windows.touch');
  const head = reach.heads[chosen[0]], mass = head.outside[sinks][chosen[1]];
  const values = { head: head.name, window: reach.windows[chosen[1]], sinks: reach.sinks[sinks] };
  values.mass = (100 * mass.mean).toFixed(2);
  if (mass.low === null) return setWord(byId('told'), 'windows.told', values);
  setWord(byId('told'), 'windows.told_interval',
    { ...values, low: (100 * mass.low).toFixed(2), high: (100 * mass.high).toFixed(2) });
}

document.addEventListener('language', draw);
draw();
shadeEdge(byId('map').parentElement);
