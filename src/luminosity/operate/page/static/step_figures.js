// The state of stages and of the author's steps: a step has that of the stages in which it runs, and its own time.

import { isStepOf } from "./run_state.js";
import { stageKind, stageWords, stalledOf } from "./status.js";

const MOVES = { reshuffle: "reshuffles", group: "groups by key", flatten: "joins its inputs" };
const FIRST = ["failed", "stalled", "busy", "held", "needs", "starved", "waiting", "done"]; // the one that is shown for several stages

/** Return {kind, words, brief, isCulprit} of a stage; `found` is what bottleneck() returned. */
export function stageState(run, info, view, found) {
  const hasFailed = run.failedStep !== "" && isStepOf(run.failedStep, info);
  const isPast = !run.isLive && view.status !== "done";
  const isCulprit = found.culprit === info.id;
  const kind = hasFailed ? "failed" : isPast ? "starved" : stageKind(view);
  const words = hasFailed ? "failed" : isPast ? "not finished" : isCulprit && !stalledOf(view) ? "sets the pace" : stageWords(view);
  return { kind, words, brief: brief(kind, words, view), isCulprit };
}

/** Return the status in one or two words. */
function brief(kind, words, view) {
  return kind === "starved" && view.by?.length && !["not finished", "idle"].includes(words) ? "starved" : kind === "held" ? "held back" : kind === "needs" ? "needs a worker" : kind === "waiting" ? "waits" : words;
}

/** The figures of all steps at one moment. */
export class StepFigures {
  #known = new Map();

  constructor(run, steps, found) {
    Object.assign(this, { run, steps, found });
    this.infos = new Map((run.started.stages ?? []).map((info) => [info.id, info]));
    this.views = run.views();
    this.all = [...this.views.values()].reduce((sum, view) => sum + (view.step_seconds ?? []).reduce((a, b) => a + b, 0), 0);
  }

  /** Return {state, seconds, elements, stages} of a transform; what is not known is null. */
  of(id) {
    if (!this.#known.has(id)) this.#known.set(id, this.#figures(id));
    return this.#known.get(id);
  }

  /** Return which part of the time of all steps a transform took. */
  shareOf(id) {
    return this.all ? Math.min(1, (this.of(id).seconds ?? 0) / this.all) : 0;
  }

  #figures(id) {
    const steps = this.steps.stepsOf(id);
    const of = (field) => steps.map(([stage, index]) => this.views.get(stage)?.[field]?.[index]).filter((value) => value !== undefined);
    const [times, counts] = [of("step_seconds"), of("step_elements")];
    const stages = [...this.steps.stagesOf(id)];
    return {
      stages, steps,
      seconds: times.length ? times.reduce((sum, each) => sum + each, 0) : null,
      elements: counts.length ? Math.max(...counts) || null : null,
      state: this.#state(id, stages),
    };
  }

  #state(id, stages) {
    const { run, steps } = this;
    const { name, moves } = steps.transforms[id];
    const isMine = (step) => step !== "" && (step === name || step.startsWith(`${name}/`) || name.endsWith(`/${step}`));
    if (isMine(run.failedStep)) return { kind: "failed", words: "failed", brief: "failed", isCulprit: false };
    if (!stages.length) return { kind: "moves", words: MOVES[moves] ?? "takes no time", brief: MOVES[moves] ?? "", isCulprit: false };
    const states = stages.map((stage) => {
      const view = this.views.get(stage) ?? { status: "waiting" };
      const state = stageState({ isLive: run.isLive, failedStep: "" }, this.infos.get(stage), view, this.found);
      const stall = stalledOf(view);
      // The steps of a stage stand still together; the one that hangs is the one to look at.
      if (stall && !isMine(stall.step)) return { ...state, kind: "waiting", words: `waits for ${stall.step}, which is stalled`, brief: "waits", isCulprit: false };
      return { ...state, isCulprit: state.isCulprit && (Boolean(stall) || this.#isSlowest(id, stage)) };
    });
    const first = states.toSorted((a, b) => b.isCulprit - a.isCulprit || FIRST.indexOf(a.kind) - FIRST.indexOf(b.kind))[0];
    return first.words === "sets the pace" && !first.isCulprit ? { ...first, words: "busy", brief: "busy" } : first;
  }

  /** Return whether a transform has most of the time of a stage among those that are shown. */
  #isSlowest(id, stage) {
    const times = this.views.get(stage)?.step_seconds;
    if (!times) return true;
    const timeOf = (other) => this.steps.stepsOf(other).reduce((sum, [of, index]) => sum + (of === stage ? times[index] ?? 0 : 0), 0);
    const mine = timeOf(id);
    return this.steps.shown().every(({ id: other }) => other === id || this.steps.isOpen(other) || timeOf(other) <= mine);
  }
}
