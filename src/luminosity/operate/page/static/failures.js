// What went wrong: the failure that ended the run, retried and stalled bundles and lost workers, with whole tracebacks.

import { h, keyed, section, setText } from "./dom.js";
import { glyph } from "./status.js";
import { traceback } from "./traceback.js";
import { counted, duration } from "./words.js";

const KINDS = ["", "BundleStalled", "BundleRetried", "WorkerLost"];
const MOST_SHOWN = 100;
const AFTER_S = 1; // what is logged about a failure may come a moment later

/** Return one entry for equal failures: how many, the newest of them, and when. */
function grouped(run) {
  const found = new Map();
  const ended = run.ended;
  if (ended?.failure) {
    found.set("end", { key: "end", title: ended.failure, step: ended.step, place: ended.place, trace: ended.traceback, input: ended.element, times: 1, at: ended.seconds, isEnd: true });
  }
  for (const event of run.of("BundleStalled")) {
    const { step, worker, place = "", seconds } = event.stall;
    const key = `stall ${step} ${worker}`;
    const times = (found.get(key)?.times ?? 0) + 1;
    const title = `Step ${step} did nothing for ${duration(seconds)}`;
    found.set(key, { key, title, step, worker, place, trace: event.traceback ?? "", times, at: event.seconds, note: event.message });
  }
  for (const event of run.of("BundleRetried", "WorkerLost")) {
    const isLost = event.event === "WorkerLost";
    const key = isLost ? `lost ${event.pool} ${event.reason}` : `retry ${event.step} ${event.exception}`;
    const before = found.get(key);
    found.set(key, {
      key,
      title: isLost ? `A worker of the pool ${event.pool} ${event.reason}` : event.exception,
      step: event.step ?? "",
      worker: event.worker ?? "",
      place: event.place ?? "",
      trace: event.traceback || before?.trace || "",
      times: (before?.times ?? 0) + 1,
      at: event.seconds,
      note: isLost ? `${event.worker}${event.node ? ` on ${run.hostOf(event.node)}` : ""}, with ${counted(event.bundles, "bundle")}` : `${counted(event.elements, "element")} in the bundle, ${counted(event.tries, "attempt")} so far`,
    });
  }
  return [...found.values()];
}

/** Return the section; absent if nothing went wrong. `logs` is the section to which failures lead. */
export function failuresSection(logs) {
  const known = new Map();
  const list = h("ul", { class: "entries" });
  const more = h("p", { class: "muted" });
  const element = section("failures", "Failures", list, more);

  function entry(first) {
    const note = h("p", { class: "muted" });
    const title = h("p", { class: "entry-title" }, first.title);
    let now = first;
    const lines = h("button", { type: "button", class: "link-like", on: { click: () => logs.show({ step: now.step, worker: now.worker, seconds: now.at + AFTER_S }) } }, "Log lines up to it");
    const body = h("div", {}, title, first.input && h("p", { class: "at-element" }, "Element: ", h("code", {}, first.input)), note, h("p", {}, lines));
    let shown = "";
    const update = (failure) => {
      now = failure;
      lines.hidden = !logs.hasLines();
      const parts = [
        failure.step && `step ${failure.step}`, failure.place && `at ${failure.place}`, failure.note,
        failure.times > 1 ? `${failure.times} times, last after ${duration(failure.at)}` : `after ${duration(failure.at)}`,
      ];
      setText(title, failure.title); // a stall gets longer
      setText(note, parts.filter(Boolean).join(" · "));
      if (failure.trace && failure.trace !== shown) {
        const wasOpen = body.querySelector("details")?.open ?? failure.isEnd === true;
        body.querySelector("details")?.remove();
        body.append(traceback(failure.trace, wasOpen));
        shown = failure.trace;
      }
    };
    return { element: h("li", { class: first.isEnd ? "entry failed" : "entry retried" }, glyph(first.isEnd ? "failed" : "needs", 14), body), update };
  }

  return {
    element,
    update: (run) => {
      const all = grouped(run);
      element.hidden = !all.length;
      keyed(list, known, all.slice(0, MOST_SHOWN), (failure) => failure.key, entry);
      const hidden = all.length - MOST_SHOWN;
      const leftOut = KINDS.reduce((sum, kind) => sum + (run.leftOutOf[kind] ?? 0), 0);
      setText(more, hidden > 0 ? `and ${counted(hidden, "other failure")}` : leftOut ? `${counted(leftOut, run.leftOutOf[""] ? "further event" : "further failure")} did not fit into the record.` : "");
      more.hidden = !more.textContent;
    },
  };
}
