// --- What the model expects next, as it is and with the changed heads, side by side ---
//
// `typed` is the reader's sentence: typed.whole is the model's run as it is, typed.less with the changed heads. A
// "chance" is a probability; an id is a token's number.

import { byId, element, say } from './page/base.js';
import { probabilities } from './page/model.js';
import { changedNames } from './report_factor.js';
import { visible, vocabulary } from './report_model.js';
import { lastPlace, typed } from './report_own.js';
import { shown } from './report_shown.js';
import { ranking, showRanking } from './report_silence.js';
import { bar, distinct, moved, percent, points, quoted, scoped, setText, view } from './report_state.js';

const LISTED = 5, LEAST_LISTED = 0.001; // likeliest tokens of each run that are listed, and the least chance of one
export const next = { chosen: -1 }; // the token whose probability is followed; -1: the one that the text goes on with

// The position that predicts: the token that is looked at, else the last one. Its chances of all tokens in both runs,
// `before` and `after` the change; the id that the text goes on with (`truth`, -1 at its end); and the id that is
// followed: the one that the reader chose, else the truth, else the likeliest.
export function prediction() {
  const place = view.at < 0 ? lastPlace() : view.at;
  const before = chancesOf(typed.whole, place);
  const after = typed.less === typed.whole ? before : chancesOf(typed.less, place);
  const truth = place + 1 < typed.ids.length ? typed.ids[place + 1] : -1;
  const chosen = next.chosen >= 0 ? next.chosen : truth >= 0 ? truth : ordered(before)[0];
  return { place, before, after, truth, chosen };
}

export function chancesOf(run, place) { return probabilities(run.logits[place]); }

// All ids, the likeliest first.
function ordered(chances) { return Array.from(chances.keys()).sort((a, b) => chances[b] - chances[a]); }

export function showNext() {
  const panel = byId('next-panel');
  panel.hidden = byId('verdict').hidden = !typed.whole || !shown.typed; // another text than the reader's may be shown
  if (panel.hidden) return;
  const { place, before, after, truth, chosen } = prediction(), changed = view.changes.size > 0;
  setText('next-title', 'report.next_after', { token: quoted(shown.tokens[place]) });
  // The likeliest of both runs and the followed one, by the larger of their two chances.
  const rows = distinct([
    ...ordered(before).slice(0, LISTED), ...(changed ? ordered(after).slice(0, LISTED) : []), chosen,
  ]);
  const most = (id) => Math.max(before[id], after[id]);
  rows.sort((a, b) => most(b) - most(a));
  const shownRows = rows.filter((id) => id === chosen || most(id) >= LEAST_LISTED);
  byId('next').classList.toggle('both', changed);
  const head = element('tr');
  head.append(scoped('col', say('report.next_token')), scoped('col', say('report.as_it_is')));
  if (changed) head.append(scoped('col', say('report.as_changed')), scoped('col', say('report.change')));
  byId('next').replaceChildren(head, ...shownRows.map((id) =>
    nextRow(id, before[id], after[id], changed, id === chosen, id === truth)));
  showVerdict(before, after, chosen, shown.tokens[place]);
  showRanking();
}

// A token, whose button makes it the one that is followed, and its chances as bars. `before` and `after` are numbers
// here, and `changed`, `chosen` and `truth` say whether any head is changed, and whether this is the followed token,
// and the one that the text goes on with.
function nextRow(id, before, after, changed, chosen, truth) {
  const row = element('tr', chosen ? 'chosen' : ''), button = element('button', 'token');
  button.type = 'button';
  button.setAttribute('aria-pressed', String(chosen));
  button.append(element('bdi', '', visible(vocabulary()[id])));
  if (truth) button.title = say('report.in_text');
  // The ranking was of another token; the rows are made anew, and the focus would be lost.
  button.addEventListener('click', () => { next.chosen = id; ranking.clear(); showNext(); focusToken(id); });
  button.dataset.id = id;
  const name = scoped('row', '');
  name.append(button);
  row.append(name, bar(before, 'ours'));
  if (changed) {
    const change = after - before, cell = element('td', moved(change));
    cell.textContent = points(change);
    row.append(bar(after, 'theirs'), cell);
  }
  return row;
}

function focusToken(id) { byId('next').querySelector(`[data-id="${id}"]`)?.focus(); }

// What the changed heads have changed, in a sentence; without any, what the model expects.
// `place` is the token there.
function showVerdict(before, after, chosen, place) {
  const name = (id) => quoted(visible(vocabulary()[id])), changed = view.changes.size > 0;
  const [first, now] = [ordered(before)[0], ordered(after)[0]]; // the likeliest ids
  // Nothing is changed; the likeliest token is the same as without the change; it is another one.
  const key = !changed ? 'report.expects_after' : first === now ? 'report.still' : 'report.now_says';
  const asItIs = { place: quoted(place), token: name(first), part: percent(before[first]) };
  const asChanged = { heads: changedNames(view.changes), first: name(first), now: name(now), part: percent(after[now]),
    token: name(chosen), before: percent(before[chosen]), after: percent(after[chosen]) };
  // It stands under the sentence, below the grid, and in the large view.
  for (const id of ['verdict', 'verdict-below', 'large-verdict']) {
    setText(id, key, changed ? asChanged : asItIs);
    byId(id).classList.toggle('turned', changed && first !== now); // another answer stands out
  }
  byId('verdict-below').hidden = !changed;
  byId('large-verdict').hidden = false;
}
