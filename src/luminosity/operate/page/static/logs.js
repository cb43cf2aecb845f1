// Warnings and errors that code has logged, newest first, with a filter.

import { h, keyed, section, setAttributes, setText } from "./dom.js";
import { glyph } from "./status.js";
import { traceback } from "./failures.js";
import { count, duration } from "./words.js";

const MOST_SHOWN = 200;
const LEVELS = [["all", "All"], ["error", "Errors"], ["warning", "Warnings"]];

/** Return the section; absent if nothing was logged. */
export function logsSection() {
  let run = null;
  let wanted = "all";
  const known = new Map();
  const list = h("ul", { class: "entries logs" });
  const note = h("p", { class: "muted", role: "status" });
  const search = h("input", { type: "search", placeholder: "Filter messages", "aria-label": "Filter messages", on: { input: () => update(run) } });
  const chips = LEVELS.map(([level, title]) => h("button", { type: "button", class: "chip", on: { click: () => { wanted = level; update(run); } } }, title));
  const element = section("logs", "Logs", h("div", { class: "toolbar" }, search, h("div", { class: "chips", role: "group", "aria-label": "Level" }, chips)), list, note);

  function update(now) {
    run = now;
    const all = withKeys(run.of("LogMessage")).reverse();
    element.hidden = !all.length;
    chips.forEach((chip, index) => setAttributes(chip, { "aria-pressed": String(LEVELS[index][0] === wanted) }));
    const words = search.value.trim().toLowerCase();
    const found = all.filter(({ event }) => (wanted === "all" || (wanted === "warning") === (event.level === "warning")) && (!words || `${event.message} ${event.logger ?? ""} ${event.step ?? ""}`.toLowerCase().includes(words)));
    keyed(list, known, found.slice(0, MOST_SHOWN), ({ key }) => key, entry);
    setText(note, !found.length && all.length ? "No message matches the filter." : found.length > MOST_SHOWN ? `The newest ${MOST_SHOWN} of ${count(found.length)}; filter to see others.` : "");
    note.hidden = !note.textContent;
  }
  return { element, update };
}

/** Give each message a key that stays when older ones go, or when the run is loaded again. */
function withKeys(events) {
  const seen = new Map();
  return events.map((event) => {
    const base = `${event.seconds} ${event.worker ?? ""} ${event.logger ?? ""} ${event.message}`;
    seen.set(base, (seen.get(base) ?? 0) + 1);
    return { event, key: `${base} ${seen.get(base)}` };
  });
}

function entry({ event }) {
  const isWarning = event.level === "warning";
  const about = [event.level, duration(event.seconds), event.step && `step ${event.step}`, event.worker, event.logger].filter(Boolean).join(" · ");
  const times = event.count > 1 ? h("span", { class: "times" }, `× ${count(event.count)}`) : null;
  const body = h("div", {}, h("p", { class: "entry-title" }, event.message, times), h("p", { class: "muted" }, about), event.traceback ? traceback(event.traceback) : null);
  return { element: h("li", { class: `entry ${isWarning ? "warned" : "failed"}` }, glyph(isWarning ? "needs" : "failed", 14), body), update: () => {} };
}
