// What hangs now, on top of a live run's page: the step, the age of its element, the worker, and the worker's stack.

import { h, keyed, section, setText } from "./dom.js";
import { glyph } from "./status.js";
import { traceback } from "./traceback.js";
import { counted, duration } from "./words.js";

const MOST_SHOWN = 20;
const DOING = { element: "worked on one element", start: "been in start_bundle", finish: "been in finish_bundle", setup: "been in its setup", loading: "waited for its model", nothing: "not answered" };

const keyOf = (stall) => `${stall.step} ${stall.worker}`;

/** Return the bundles that hang, or that hung when the run was ended, the one that hangs for longest first, with stacks. */
export function stuckOf(run) {
  if (["done", "drained"].includes(run.state)) return [];
  const stacks = new Map(run.of("BundleStalled").map((event) => [keyOf(event.stall), event.traceback]));
  const stalls = (run.newest?.stages ?? []).flatMap((stage) => stage.stalls ?? []).filter((stall) => stall.is_stalled !== false);
  return stalls.sort((a, b) => b.seconds - a.seconds).map((stall) => ({ ...stall, isOver: !run.isLive, host: stall.node && run.hostOf(stall.node), stack: stacks.get(keyOf(stall)) ?? "" }));
}

/** Return the section; absent if nothing hangs. `onStep(step)` is called for a step that the reader chooses. */
export function stuckSection({ onStep }) {
  const known = new Map();
  const list = h("ul", { class: "entries" });
  const more = h("p", { class: "muted" });
  const element = section("stuck", "Stuck", list, more);

  function entry(first) {
    const [age, has] = [h("strong"), h("span")];
    const where = h("p", { class: "muted" });
    const step = h("button", { type: "button", class: "link-like", title: first.step, on: { click: () => onStep(first.step) } }, first.step);
    const body = h("div", {}, h("p", { class: "entry-title" }, step, has, ` ${DOING[first.doing] ?? DOING.element} for `, age), where);
    let shown = "";
    const update = (stall) => {
      setText(age, `${duration(stall.seconds)}${stall.isOver ? " when the run ended" : ""}`);
      setText(has, stall.isOver ? " had" : " has");
      const process = stall.pid ? ` (pid ${stall.pid})` : "";
      const state = stall.state === "stopped" ? ", which is stopped" : stall.state ? ", which does not answer" : "";
      const parts = [`worker ${stall.worker}${process}${stall.host ? ` on ${stall.host}` : ""}${state}`, stall.place && `at ${stall.place}`, stall.waits_for && `waits for ${stall.waits_for}`];
      setText(where, parts.filter(Boolean).join(" · "));
      if (stall.stack === shown) return;
      shown = stall.stack;
      body.querySelector("details")?.remove();
      body.append(traceback(stall.stack, true, "Stack of the worker"));
    };
    return { element: h("li", { class: "entry failed" }, glyph("stalled", 14), body), update };
  }

  return {
    element,
    update: (run) => {
      const all = stuckOf(run);
      element.hidden = !all.length;
      keyed(list, known, all.slice(0, MOST_SHOWN), keyOf, entry);
      setText(more, all.length > MOST_SHOWN ? `and ${counted(all.length - MOST_SHOWN, "other bundle")}` : "");
      more.hidden = !more.textContent;
    },
  };
}
