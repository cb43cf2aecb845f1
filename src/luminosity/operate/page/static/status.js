// The states of runs and stages: a colour, a shape and a word for each, so that no reader depends on colour.

import { h, s } from "./dom.js";
import { duration } from "./words.js";

// Paths in a square of 12 by 12.
const SHAPES = {
  busy: "M6 1.2a4.8 4.8 0 1 0 0 9.600a4.8 4.8 0 1 0 0-9.600z",
  done: "M1.600 6.400 4.600 9.400 10.400 2.800",
  held: "M3.700 2v8M8.300 2v8",
  starved: "M6 2a4 4 0 1 0 0 8a4 4 0 1 0 0-8z",
  needs: "M6 1.500 11 10.500H1z",
  waiting: "M6 6V2.600M6 6h2.600M6 1.200a4.800 4.800 0 1 0 0 9.600a4.800 4.800 0 1 0 0-9.600z",
  failed: "M2.200 2.200 9.800 9.800M9.800 2.200 2.200 9.800",
  lost: "M4 4.200a2.100 2.100 0 1 1 2.900 1.900c-.7.300-.9.700-.9 1.500M6 10.100v.2",
  stalled: "M6 1.500v5.500M6 9.800v.400",
  stopped: "M2.500 2.500h7v7h-7z",
  moves: "M1 6h9.500M7.500 3l3 3-3 3",
};
const FILLED = new Set(["busy", "needs", "stopped"]);

const STAGES = {
  busy: "busy",
  done: "done",
  "held back": "held",
  starved: "starved",
  "needs worker": "needs",
  waiting: "waiting",
  failed: "failed",
};
const RUNS = {
  running: "busy",
  done: "done",
  failed: "failed",
  lost: "lost",
  cancelled: "stopped",
  stopped: "stopped",
  drained: "done",
};
const WHY = {
  running: "The run goes on.",
  done: "All of its work is done.",
  failed: "The run ended with an error.",
  lost: "The process of the run ended without a word: it was killed, or the machine stopped. This is what was known until then.",
  cancelled: "The run was cancelled.",
  stopped: "The run was stopped and keeps a checkpoint: the next start continues.",
  drained: "The stream finished what it had read, and ended.",
};

/** Return the bundle of a stage that has done nothing for longest, or null if none is stalled. */
export const stalledOf = (view) => (view?.stalls ?? []).find((stall) => stall.is_stalled !== false) ?? null;

/** Return the class of a stage's status: busy, done, held, starved, needs, waiting, stalled or failed. */
export const stageKind = (view) => (stalledOf(view) ? "stalled" : STAGES[view.status] ?? "waiting");
export const runKind = (state) => RUNS[state] ?? "waiting";
export const runWhy = (state) => WHY[state] ?? "";

/** Return the shape of a kind as SVG, decorative: the word stands beside it. */
export function glyph(kind, size = 12) {
  const path = s("path", { d: SHAPES[kind], class: FILLED.has(kind) ? "solid" : "drawn" });
  return s("svg", { viewBox: "0 0 12 12", width: size, height: size, class: `glyph ${kind}`, "aria-hidden": "true" }, path);
}

/** Return the shape as a part of a larger drawing. */
export function glyphAt(kind, x, y) {
  const path = s("path", { d: SHAPES[kind], class: FILLED.has(kind) ? "solid" : "drawn" });
  return s("g", { class: `glyph ${kind}`, transform: `translate(${x} ${y})`, "aria-hidden": "true" }, path);
}

/** Return the state of a run as a pill. */
export function pill(state) {
  const kind = runKind(state);
  return h("span", { class: `pill ${kind}`, title: runWhy(state) }, glyph(kind, 11), state);
}

/** Return what a stage does or waits for, in words. */
export function stageWords(view) {
  const [stall] = view.stalls ?? [];
  if (stall) return `${stalledOf(view) ? "stalled" : stall.doing === "loading" ? "loads a model" : "sets up"} for ${duration(stall.seconds)}`;
  const by = view.by ?? [];
  const named = by.length > 1 ? `${by[0]} and ${by.length - 1} more` : by[0];
  if (view.status === "starved" && view.stream && !view.queued) return "idle";
  if (view.status === "needs worker") return named ? `needs a worker of ${named}` : "needs a worker";
  if (view.status === "waiting") return named ? `waits for ${named}` : "waits for its time";
  return named && view.status !== "busy" && view.status !== "done" ? `${view.status} by ${named}` : view.status;
}
