// --- The address, so that a link shows what its sender saw; and the link to the walk, which takes it along ---
//
// #L0.H3/5 is a head, enlarged, and the token that is looked at; a sentence of the reader's own comes third. Parts
// may be empty: #/5 is a token alone.

import { byId, emit, hashOf, hashParts, language, on, say } from './base.js';
import { hasModel } from './engine.js';
import { beginHead, openHead } from './head.js';
import { lastPlace, model, typed } from './local.js';
import { byWeight } from './model.js';
import { opening, setOwn } from './own.js';
import { data, heads, numberOf, view } from './state.js';

let most = {}; // {ids, at, name}: a sentence, a place in it, and the head that matters most there
let opened = false; // was the enlarged head opened by a click here, so that Back closes it? Not, if a link led to it

// The address of what is shown now; '' where nothing is chosen.
function addressNow() {
  const isOpen = view.open >= 0, hasPlace = view.pinned || isOpen; // a token at which the pointer rests is not kept
  const parts = [isOpen ? heads[view.open].name : '', hasPlace ? String(Math.max(0, view.at)) : ''];
  if (typed.whole && typed.text !== opening) parts.push(typed.text);
  while (parts.at(-1) === '') parts.pop(); // empty parts at the end
  return parts.length ? hashOf(parts) : '';
}

// Opening a head is a step that Back takes again; everything else changes the address in place.
function changeAddress(step) {
  const address = addressNow();
  if (address === location.hash) return;
  if (step) opened = true;
  // Without a part, the address of the page; '' would leave the old part there.
  history[step ? 'pushState' : 'replaceState'](null, '', address || location.href.split('#')[0]);
}

// The enlarged head was closed: the step in the history that opened it is taken back, unless Back itself did so.
function leaveAddress() {
  if (!opened) changeAddress(false);
  else if (location.hash !== addressNow()) history.back();
  opened = false;
}

// Shows what the address says; what it cannot show it takes out of the address.
export function readAddress() {
  const [name, token, text] = hashParts();
  if (text && hasModel() && text !== typed.text) setOwn(text);
  const number = numberOf.get(name) ?? -1; // the head to be enlarged, -1: none
  if (token && Number(token) >= 0 && Number(token) < view.shown.tokens.length) {
    view.at = Number(token);
    view.pinned = true;
    emit('point');
  }
  if (number < 0 && view.open >= 0) { // Back from an enlarged head; closing goes no step further back
    opened = false;
    byId('large').close();
  } else if (number >= 0 && view.open < 0) openHead(number, false);
  else if (number >= 0 && number !== view.open) {
    view.open = number;
    beginHead();
  }
  changeAddress(false);
}

// The links lead to the enlarged head, else to the answer of the last question, else to the head that matters most
// at the token that was chosen; without such a page or sentence they stay hidden.
function showWalk() {
  if (!data.walk || !typed.whole) return;
  const { ids } = typed, at = view.at < 0 ? lastPlace() : Math.min(view.at, ids.length - 1);
  if (most.ids !== ids || most.at !== at) most = { ids, at, name: byWeight(model, ids, at)[0] };
  const asked = view.answer?.at === at && view.answer.name;
  const name = view.open >= 0 ? heads[view.open].name : asked || most.name;
  const place = [name, at, typed.text];
  for (const link of document.querySelectorAll('.to-walk')) {
    link.hidden = false;
    link.textContent = say('report.to_walk', { name });
    link.href = `${data.walk}?lang=${language()}${hashOf(place)}`;
  }
}

window.addEventListener('popstate', readAddress); // Back and Forward
on('address', ({ detail: step }) => changeAddress(Boolean(step)));
on('closed', leaveAddress);
on('address large closed proofs language', showWalk);
