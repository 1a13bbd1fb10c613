// --- The links to the walk through one head, a page that lies beside this one ---
//
// Its address is like the one of the report: #L0.H3/5/a text, a head, a token, and the sentence.

import { language, say } from './page/base.js';
import { typed } from './report_own.js';
import { data, heads, view } from './report_state.js';

// The links lead to the enlarged head, else to the one through which the sentence was seen last. They are hidden
// where there is no such page, or no sentence of the reader's to take along.
export function showWalk() {
  const { name } = heads[view.open >= 0 ? view.open : view.latest], place = [name, Math.max(0, view.at), typed.text];
  for (const link of document.querySelectorAll('.to-walk')) {
    link.hidden = !data.walk || !typed.whole;
    link.textContent = say('report.to_walk', { name });
    link.href = `${data.walk}?lang=${language()}#${place.map(encodeURIComponent).join('/')}`;
  }
}
