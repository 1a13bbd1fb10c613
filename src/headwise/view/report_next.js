// --- What the model expects next, as it is and with the changed heads, side by side ---

import { byId, element, say } from './page/base.js';
import { probabilities } from './page/model.js';
import { changedNames } from './report_factor.js';
import { visible, vocabulary } from './report_model.js';
import { lastPlace, typed } from './report_own.js';
import { shown } from './report_shown.js';
import { ranking, showRanking } from './report_silence.js';
import { bar, distinct, moved, percent, points, quoted, scoped, setText, view } from './report_state.js';

const LISTED = 5, LEAST_LISTED = 0.001; // likeliest tokens of each that are listed, and the least chance of one
export const next = { chosen: -1 }; // the token whose probability is followed; -1: the one that the text goes on with

// The position that predicts, its probabilities, and the token that is followed there.
export function prediction() {
  const place = view.at < 0 ? lastPlace() : view.at;
  const before = chancesOf(typed.whole, place), after = typed.less === typed.whole ? before : chancesOf(typed.less, place);
  const truth = place + 1 < typed.ids.length ? typed.ids[place + 1] : -1;
  const chosen = next.chosen >= 0 ? next.chosen : truth >= 0 ? truth : ordered(before)[0];
  return { place, before, after, truth, chosen };
}

export function chancesOf(run, place) { return probabilities(run.logits[place]); }

function ordered(chances) { return Array.from(chances.keys()).sort((a, b) => chances[b] - chances[a]); }

export function showNext() {
  const panel = byId('next-panel');
  panel.hidden = byId('verdict').hidden = !typed.whole || !shown.typed;
  if (panel.hidden) return;
  const { place, before, after, truth, chosen } = prediction(), changed = view.changes.size > 0;
  setText('next-title', 'report.next_after', { token: quoted(shown.tokens[place]) });
  const rows = distinct([...ordered(before).slice(0, LISTED), ...(changed ? ordered(after).slice(0, LISTED) : []), chosen]);
  const most = (id) => Math.max(before[id], after[id]);
  rows.sort((a, b) => most(b) - most(a));
  const shownRows = rows.filter((id) => id === chosen || most(id) >= LEAST_LISTED);
  byId('next').classList.toggle('both', changed);
  const head = element('tr');
  head.append(scoped('col', say('report.next_token')), scoped('col', say('report.as_it_is')));
  if (changed) head.append(scoped('col', say('report.as_changed')), scoped('col', say('report.change')));
  byId('next').replaceChildren(head, ...shownRows.map((id) => nextRow(id, before[id], after[id], changed, id === chosen, id === truth)));
  showVerdict(before, after, chosen, shown.tokens[place]);
  showRanking();
}

function nextRow(id, before, after, changed, chosen, truth) {
  const row = element('tr', chosen ? 'chosen' : ''), button = element('button', 'token');
  button.type = 'button';
  button.setAttribute('aria-pressed', String(chosen));
  button.append(element('bdi', '', visible(vocabulary()[id])));
  if (truth) button.title = say('report.in_text');
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

// What the changed heads have changed, in a sentence.
function showVerdict(before, after, chosen, place) {
  const name = (id) => quoted(visible(vocabulary()[id])), changed = view.changes.size > 0;
  const [first, now] = [ordered(before)[0], ordered(after)[0]];
  const key = !changed ? 'report.expects_after' : first === now ? 'report.still' : 'report.now_says';
  const asItIs = { place: quoted(place), token: name(first), part: percent(before[first]) };
  const asChanged = { heads: changedNames(view.changes), first: name(first), now: name(now), part: percent(after[now]),
    token: name(chosen), before: percent(before[chosen]), after: percent(after[chosen]) };
  for (const id of ['verdict', 'verdict-below', 'large-verdict']) {
    setText(id, key, changed ? asChanged : asItIs);
    byId(id).classList.toggle('turned', changed && first !== now);
  }
  byId('verdict-below').hidden = !changed;
  byId('large-verdict').hidden = false;
}
