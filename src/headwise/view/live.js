// --- The page of a training that goes on: it asks the server that it came from for what is new ---
//
// News are a list of {KIND: content}, in order, and are numbered:
// ?after=N gives those from number N on (view/look.py).

import { byId, element, setWord, worded } from './page/base.js';
import { started } from './film.js';

// Round choices. A longer break shows what is new later; more patience hides for longer that the training has gone.
const BREAK = 700; // milliseconds between two questions
const PATIENCE = 3; // questions in vain, one after the other, after which the page says that the training is lost
let over = false; // has the training ended?

function shownNumber(number) { return number.toLocaleString('en-US'); } // 12,000 in every language

// What the page does with each kind of news.
const take = {
  header: (header) => Object.assign(started.film, header),
  frame: (frame) => started.film.frames.push(frame),
  loss: ({ step, loss }) => setWord(byId('live-state'), 'film.live',
    { step: shownNumber(step), steps: shownNumber(started.film.steps), loss: loss.toFixed(3) }),
  sample: ({ step, text }) => {
    const item = element('li'), written = element('pre', '', text);
    written.dir = 'auto'; // the text may be written from right to left
    item.append(worded('span', 'caption', 'film.sample', { step: shownNumber(step) }), written);
    byId('live-samples').hidden = false;
    byId('live-samples').querySelector('ol').prepend(item); // the latest on top
  },
  state: (state) => {
    over = true; // finished, or stopped
    if (state === 'finished') location.reload(); // the same address has the report now
    else setWord(byId('live-state'), 'film.stopped');
  },
};

// Asks for the news behind the first `seen`, and after a break again, until the training is over or lost.
async function ask(address, seen = 0, failures = 0) {
  let news = [];
  try {
    news = await (await fetch(`${address}?after=${seen}`)).json();
    failures = 0;
  } catch {
    failures += 1;
  }
  // A kind that this page does not know is left out.
  for (const item of news) for (const [kind, content] of Object.entries(item)) take[kind]?.(content);
  if (news.length) started.update();
  if (failures >= PATIENCE) setWord(byId('live-state'), 'film.lost');
  else if (!over) setTimeout(ask, BREAK, address, seen + news.length, failures);
}

ask(byId('main').dataset.live);
