// Which stage sets the pace of a run, and whom it holds back.

import { stalledOf } from "./status.js";
import { stuckOf } from "./stuck.js";
import { computes, count, counted, duration, listed, percent } from "./words.js";

const YEAR_S = 365 * 86_400; // a lag beyond it says that the times of elements are not those of today

/**
 * Return {culprit, heldBack, starved, sentence}: the label of the stage that sets the pace or null, and the ids of the
 * stages that wait for it.
 */
export function bottleneck(run) {
  const infos = run.started.stages ?? [];
  const views = run.views();
  const nothing = { culprit: null, heldBack: new Set(), starved: new Set(), parts: [] };
  if (!views.size) return { ...nothing, parts: run.isLive ? ["The first figures arrive within a second."] : [] };
  if (!run.isLive) return { ...nothing, ...pastBottleneck(run, infos, views) };

  const stuck = stalled(infos, views);
  if (stuck) return { ...nothing, ...stuck };
  const found = follow(infos, views);
  if (!found || (run.isStream && !found.heldBack.size)) return { ...nothing, parts: quiet(run, infos, views) };
  const { culprit, heldBack, starved } = found;
  const view = views.get(culprit.id);
  const parts = [{ strong: culprit.label }, " sets the pace"];
  const held = infos.filter((info) => heldBack.has(info.id)).map((info) => info.label);
  const hungry = infos.filter((info) => starved.has(info.id)).map((info) => info.label);
  if (held.length && hungry.length) parts.push(`: it holds back ${listed(held)}, and ${listed(hungry)} ${hungry.length > 1 ? "wait" : "waits"} for its output.`);
  else if (held.length) parts.push(`: it holds back ${listed(held)}.`);
  else if (hungry.length) parts.push(`: ${listed(hungry)} ${hungry.length > 1 ? "wait" : "waits"} for its output.`);
  else parts.push(".");
  parts.push(...slowestStep(culprit, view), ...reason(run, culprit, view));
  return { culprit: culprit.id, heldBack, starved, parts };
}

/** Return the stage whose bundle has done nothing for longest, and where that bundle is. */
function stalled(infos, views) {
  const all = infos.map((info) => [info, stalledOf(views.get(info.id))]).filter(([, stall]) => stall);
  if (!all.length) return null;
  const [info, stall] = all.reduce((most, each) => (each[1].seconds > most[1].seconds ? each : most));
  const process = stall.pid ? ` (pid ${stall.pid})` : "";
  const state = stall.state === "stopped" ? ", which is stopped" : stall.state ? ", which does not answer" : "";
  const waits = stall.waits_for ? ` It waits for ${stall.waits_for}.` : "";
  const others = all.length > 1 ? ` ${counted(all.length - 1, "other stage")} ${all.length > 2 ? "are" : "is"} stalled, too.` : "";
  return { culprit: info.id, parts: [
    { strong: stall.step }, ` is stalled: it has done nothing for ${duration(stall.seconds)}`,
    ` in worker ${stall.worker}${process}${state}${stall.place ? `, at ${stall.place}` : ""}.${waits}${others}`,
  ] };
}

/** Return the step that takes the most of a stage's time and its share of it, if the record tells it and there are several. */
function slowest(info, view) {
  const times = view?.step_seconds ?? [];
  const total = times.reduce((sum, each) => sum + each, 0);
  const most = Math.max(0, ...times);
  return total && (info.steps ?? []).length > 1 ? { step: info.steps[times.indexOf(most)], share: most / total } : null;
}

function slowestStep(info, view) {
  const found = slowest(info, view);
  return found ? [" ", { strong: found.step }, ` takes ${percent(found.share)} of its steps' time.`] : [];
}

/** Follow each "held back by" and "starved by" to its end, and return the stage where most of them meet. */
function follow(infos, views) {
  const byLabel = new Map(infos.map((info) => [info.label, info]));
  const votes = new Map();
  const waits = (view) => ["held back", "starved"].includes(view?.status) && (view.by ?? []).some((name) => byLabel.has(name));
  for (const info of infos) {
    const first = views.get(info.id);
    if (!waits(first)) continue;
    let [at, view] = [info, first];
    for (const seen = new Set(); waits(view) && !seen.has(at.id); view = views.get(at.id)) {
      seen.add(at.id);
      at = byLabel.get(view.by.find((name) => byLabel.has(name)));
    }
    if (at === info || view?.status === "done") continue;
    const vote = votes.get(at.id) ?? { culprit: at, heldBack: new Set(), starved: new Set() };
    (first.status === "held back" ? vote.heldBack : vote.starved).add(info.id);
    votes.set(at.id, vote);
  }
  // A stage that holds others back matters more than one whose readers are just faster.
  const weight = (vote) => 10 * vote.heldBack.size + vote.starved.size;
  return [...votes.values()].sort((a, b) => weight(b) - weight(a))[0] ?? null;
}

function reason(run, info, view) {
  const pool = (run.last.pools ?? []).find((each) => each.name === info.pool);
  const model = (view.inference ?? [])[0];
  const said = [];
  if (view.status === "needs worker") said.push(` No worker of the pool ${info.pool} is free.`);
  if (pool && pool.slots && (pool.busy ?? 0) >= pool.slots) {
    said.push(` All ${counted(pool.workers ?? 0, "worker")} of its pool ${info.pool} are busy.`.replace("All 1 worker of its pool", "The only worker of its pool").replace(" are busy", pool.workers === 1 ? " is busy" : " are busy"));
  }
  if (view.queued) said.push(` ${count(view.queued)} elements wait in front of it.`);
  if (computes(model)) said.push(computes(model));
  if (model?.retries) said.push(` ${count(model.retries)} of ${count(model.requests)} requests to its server were sent again.`);
  return said;
}

function quiet(run, infos, views) {
  const needs = infos.filter((info) => views.get(info.id)?.status === "needs worker");
  if (needs.length) {
    return [{ strong: listed(needs.map((info) => info.label)) }, ` ${needs.length > 1 ? "have" : "has"} input, but no worker of the pool ${needs[0].pool} is free.`];
  }
  const busy = infos.filter((info) => views.get(info.id)?.status === "busy");
  if (run.isStream) {
    const lags = infos.map((info) => [info.label, views.get(info.id)?.stream?.behind_seconds ?? 0]).sort((a, b) => b[1] - a[1]);
    const [label, seconds] = lags[0];
    const isToday = seconds > 0 && seconds < YEAR_S;
    return ["No stage holds another back.", ...(isToday ? [" The farthest behind the clock is ", { strong: label }, `: ${duration(seconds)}.`] : [])];
  }
  if (busy.length) return [{ strong: listed(busy.map((info) => info.label)) }, ` ${busy.length > 1 ? "are" : "is"} busy; no stage holds another back.`];
  return ["No stage holds another back."];
}

function pastBottleneck(run, infos, views) {
  const [stuck] = stuckOf(run);
  if (stuck) return { culprit: null, parts: [{ strong: stuck.step }, ` was stalled when the run ended: it had done nothing for ${duration(stuck.seconds)} in worker ${stuck.worker}${stuck.place ? `, at ${stuck.place}` : ""}.`] };
  const times = infos.map((info) => [info, views.get(info.id)?.busy_seconds ?? 0]).sort((a, b) => b[1] - a[1]);
  const total = times.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!total) return { parts: [] };
  const [[info, seconds]] = times;
  const step = slowest(info, views.get(info.id));
  const took = `${duration(seconds)} of ${duration(total)} of the workers' time (${percent(seconds / total)})`;
  const first = seconds / total < 0.2 ? "The work is spread over the steps; the most was in " : "Most of the work was in ";
  const parts = step?.share > 0.5
    ? [first, { strong: step.step }, `: ${percent(step.share)} of the steps' time of the stage ${info.label}, which took ${took}.`]
    : [first, { strong: info.label }, `: ${took}.`, ...slowestStep(info, views.get(info.id))];
  if (run.isStream) return { culprit: null, parts }; // its sources, which mostly wait, do not count as busy
  const pool = (run.last.pools ?? []).filter((each) => each.busy_fraction > 0).sort((a, b) => b.busy_fraction - a.busy_fraction)[0];
  if (pool) parts.push(` The pool ${pool.name} was busy ${percent(pool.busy_fraction)} of the time.`);
  return { culprit: null, parts };
}
