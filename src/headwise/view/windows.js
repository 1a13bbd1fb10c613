// --- How far each head looks: choose how many first tokens stay, and touch a cell ---

import { byId, element, language, readData, setWord, shadeEdge, told, worded } from './page/base.js';

const reach = readData('reach');
let sinks = Math.max(0, reach.sinks.indexOf(4)), chosen = null; // places: of 4 first tokens, where that was tried; [head, window]

const RAMP = ['--ramp-0', '--ramp-1', '--ramp-2', '--ramp-3'];

// A mass of 0 to 1 on the four colours of weights; the root tells small ones apart.
function tint(cell, mass) {
  const place = Math.min(1, Math.sqrt(mass)) * 3, low = Math.min(2, Math.floor(place));
  const share = Math.round(100 * (place - low)); // of the upper of two neighbours, in percent
  cell.style.background = `color-mix(in srgb, var(${RAMP[low + 1]}) ${share}%, var(${RAMP[low]}))`;
  cell.style.color = place > 1.25 ? 'var(--paper)' : 'var(--ink)'; // from a quarter behind the second colour on it is dark
}

function draw() {
  const values = { documents: reach.n_documents, tokens: reach.n_tokens.toLocaleString(language()) };
  values.longest = reach.longest.toLocaleString(language());
  setWord(byId('facts'), 'windows.facts', values);
  byId('sinks').replaceChildren(...reach.sinks.map((count, place) => {
    const button = element('button', '', String(count));
    button.type = 'button';
    button.setAttribute('aria-pressed', String(place === sinks));
    button.addEventListener('click', () => { sinks = place; draw(); byId('sinks').children[place].focus(); });
    return button;
  }));
  byId('map').replaceChildren(heading(), body());
  byId('notes').replaceChildren(...reach.notes.map((note) => element('li', '', told(note))));
  tell();
}

function heading() {
  const head = element('thead'), row = head.insertRow();
  const add = (made) => { made.scope = 'col'; row.append(made); };
  add(worded('th', '', 'windows.head'));
  for (const size of reach.windows) add(element('th', '', size.toLocaleString(language())));
  for (const share of reach.shares) add(worded('th', '', 'windows.within', { share: Math.round(100 * share) }));
  add(worded('th', '', 'windows.needle'));
  return head;
}

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
    const plain = [...head.reached.map((x) => Math.round(x.mean).toLocaleString(language())),
      head.needle.mean === null ? '–' : head.needle.mean.toFixed(2)
        + (head.retrieves ? ` × ${Math.exp(head.lift.mean).toPrecision(2)}` : '')];
    for (const text of plain) {
      const cell = row.insertCell();
      cell.className = 'plain';
      cell.textContent = text;
    }
  });
  return made;
}

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
