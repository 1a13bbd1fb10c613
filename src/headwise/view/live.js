// --- The page of a training that goes on: it asks the server that it came from for what is new ---

import { byId, element, setWord, worded } from './page/base.js';
import { started } from './film.js';

const BREAK = 700; // milliseconds between two questions
const PATIENCE = 3; // questions in vain
let steps = 0, over = false;

function shownNumber(number) { return number.toLocaleString('en-US'); }

const take = {
  header: (header) => {
    steps = header.steps;
    Object.assign(started.film, { header, frames: [], losses: [] });
    byId('film').hidden = true;
  },
  frame: (frame) => started.film.frames.push(frame),
  loss: (row) => {
    started.film.losses.push(row);
    setWord(byId('live-state'), 'film.live',
      { step: shownNumber(row.step), steps: shownNumber(steps), loss: row.loss.toFixed(3) });
  },
  sample: ({ step, text }) => {
    const item = element('li'), written = element('pre', '', text);
    written.dir = 'auto';
    item.append(worded('span', 'caption', 'film.sample', { step: shownNumber(step) }), written);
    byId('live-samples').hidden = false;
    byId('live-samples').querySelector('ol').prepend(item);
  },
  state: (state) => {
    over = true;
    if (state === 'finished') location.reload(); // the same address has the report now
    else setWord(byId('live-state'), 'film.stopped');
  },
};

async function ask(address, seen = 0, failures = 0) {
  let news = [];
  try {
    news = await (await fetch(`${address}?after=${seen}`)).json();
    failures = 0;
  } catch {
    failures += 1;
  }
  for (const item of news) for (const [kind, content] of Object.entries(item)) take[kind]?.(content);
  if (news.length) started.update();
  if (failures >= PATIENCE) setWord(byId('live-state'), 'film.lost');
  else if (!over) setTimeout(ask, BREAK, address, seen + news.length, failures);
}

ask(byId('main').dataset.live);
