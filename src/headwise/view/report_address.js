// --- The address: #L0.H3/5 is a head, enlarged, and a token; a sentence of the reader's own comes third ---

import { byId } from './page/base.js';
import { beginHead, openHead } from './report_head.js';
import { hasModel } from './report_model.js';
import { opening, setOwn, typed } from './report_own.js';
import { showPoint } from './report_sentence.js';
import { shown } from './report_shown.js';
import { heads, numberOf, view } from './report_state.js';

let opened = false; // was the head opened from this page, so that going back closes it?

function addressNow() {
  const isOpen = view.open >= 0, hasPlace = view.pinned || isOpen;
  const parts = [isOpen ? heads[view.open].name : '', hasPlace ? String(Math.max(0, view.at)) : ''];
  if (typed.whole && typed.text !== opening) parts.push(typed.text);
  while (parts.length && parts[parts.length - 1] === '') parts.pop();
  return parts.length ? '#' + parts.map(encodeURIComponent).join('/') : '';
}

// Opening a head is a step that Back takes again; everything else changes the address in place.
export function changeAddress(step = false) {
  const address = addressNow();
  if (address === location.hash) return;
  if (step) opened = true;
  history[step ? 'pushState' : 'replaceState'](null, '', address || location.href.split('#')[0]);
}

export function leaveAddress() {
  if (!opened) {
    changeAddress();
    return;
  }
  opened = false;
  if (location.hash !== addressNow()) history.back();
}

export function readAddress() {
  let parts = [];
  try {
    parts = location.hash.slice(1).split('/').map(decodeURIComponent);
  } catch { /* an address that nobody made here */ }
  const [name, token, text] = parts;
  if (text && hasModel() && text !== typed.text) setOwn(text);
  const number = numberOf.get(name) ?? -1;
  if (token !== undefined && token !== '' && Number(token) >= 0 && Number(token) < shown.tokens.length) {
    view.at = Number(token);
    view.pinned = true;
    showPoint();
  }
  if (number < 0 && view.open >= 0) {
    opened = false;
    byId('large').close();
  } else if (number >= 0 && view.open < 0) {
    openHead(number);
    opened = false;
  } else if (number >= 0 && number !== view.open) {
    view.open = number;
    beginHead();
  }
  changeAddress();
}
