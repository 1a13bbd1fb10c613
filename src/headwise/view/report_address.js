// --- The address, so that a link shows what its sender saw ---
//
// #L0.H3/5 is a head, enlarged, and the token that is looked at; a sentence of the reader's own comes third. Parts
// may be empty: #/5 is a token alone.

import { byId } from './page/base.js';
import { beginHead, openHead } from './report_head.js';
import { hasModel } from './report_model.js';
import { opening, setOwn, typed } from './report_own.js';
import { showPoint } from './report_sentence.js';
import { shown } from './report_shown.js';
import { heads, numberOf, view } from './report_state.js';

let opened = false; // was the enlarged head opened by a click here, so that Back closes it? Not, if a link led to it

// The address of what is shown now; '' where nothing is chosen.
function addressNow() {
  const isOpen = view.open >= 0, hasPlace = view.pinned || isOpen; // a token at which the pointer rests is not kept
  const parts = [isOpen ? heads[view.open].name : '', hasPlace ? String(Math.max(0, view.at)) : ''];
  if (typed.whole && typed.text !== opening) parts.push(typed.text);
  while (parts.length && parts[parts.length - 1] === '') parts.pop(); // empty parts at the end
  return parts.length ? '#' + parts.map(encodeURIComponent).join('/') : '';
}

// Opening a head is a step that Back takes again; everything else changes the address in place.
export function changeAddress(step = false) {
  const address = addressNow();
  if (address === location.hash) return;
  if (step) opened = true;
  // Without a part, the address of the page; '' would leave the old part there.
  history[step ? 'pushState' : 'replaceState'](null, '', address || location.href.split('#')[0]);
}

// The enlarged head was closed. If it was opened by a click, its step in the history is taken back, unless Back
// itself has closed it.
export function leaveAddress() {
  if (!opened) {
    changeAddress();
    return;
  }
  opened = false;
  if (location.hash !== addressNow()) history.back();
}

// Shows what the address says: when the page opens, and after Back and Forward.
// What it cannot show it takes out of the address.
export function readAddress() {
  let parts = [];
  try {
    parts = location.hash.slice(1).split('/').map(decodeURIComponent);
  } catch { /* an address that nobody made here */ }
  const [name, token, text] = parts;
  if (text && hasModel() && text !== typed.text) setOwn(text);
  const number = numberOf.get(name) ?? -1; // the head to be enlarged, -1: none
  if (token !== undefined && token !== '' && Number(token) >= 0 && Number(token) < shown.tokens.length) {
    view.at = Number(token);
    view.pinned = true;
    showPoint();
  }
  if (number < 0 && view.open >= 0) { // Back from an enlarged head; closing goes no step further back
    opened = false;
    byId('large').close();
  } else if (number >= 0 && view.open < 0) {
    openHead(number); // which takes it for a click
    opened = false;
  } else if (number >= 0 && number !== view.open) {
    view.open = number;
    beginHead();
  }
  changeAddress();
}
