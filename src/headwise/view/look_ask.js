// --- Asking the process that runs the model: the server that this page came from, and nobody else ---

import { byId, told } from './page/base.js';
import { look } from './look_state.js';

const address = new URL('ask', location.href);
let trouble = ''; // what Python refused, or a phrase
let lost = false; // is it that nobody answers?

// An answer, or nothing in it where the question was refused: what is to be said then stands below the text.
export async function ask(question) {
  let answer = {};
  try {
    const body = JSON.stringify({ turn: look.number, ...question });
    const response = await fetch(address, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body });
    if (!response.ok) throw new Error(response.statusText);
    answer = await response.json();
    // Maps that come later say nothing of a text that was refused: only a text that was read does.
    if (answer.refused) trouble = answer.refused;
    else if (lost || (question.do === 'read' && !answer.stale)) trouble = '';
    lost = false;
  } catch {
    lost = true;
    trouble = ['look.lost', {}];
  }
  sayTrouble();
  return answer;
}

export function sayTrouble() { byId('trouble').textContent = trouble ? told(trouble) : ''; }
