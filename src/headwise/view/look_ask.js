// --- Asking the process that runs the model: the server that this page came from, and nobody else ---
//
// A question is a JSON object that names under `do` what it asks, as heads/look.py has it; it answers in JSON.

import { byId, told } from './page/base.js';
import { look } from './look_state.js';

const address = new URL('ask', location.href); // beside the page, below the same secret path
let trouble = ''; // what stands below the text, as `told` takes it; '' where all is well
let lost = false; // is the trouble that nobody answers?

// The answer to a question. Where nobody answers it is an empty object, and where the question was refused it has
// none of the fields that were asked for; then the trouble stands below the text.
export async function ask(question) {
  let answer = {};
  try {
    const body = JSON.stringify({ turn: look.number, ...question }); // by its turn the server knows which is the latest
    const response = await fetch(address, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body });
    if (!response.ok) throw new Error(response.statusText);
    answer = await response.json();
    // Maps that come later say nothing of a text that was refused: only a text that was read does.
    if (answer.refused) trouble = answer.refused;
    // That somebody answers again ends the trouble that nobody did, whatever was asked.
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
