// The log lines of a run, newest first, in pages: searched and filtered by the server. Records of older versions, which
// have no lines, show the warnings and errors among their events.

import { load, logsAddress, logTextAddress } from "./api.js";
import { h, keyed, replaceAll, section, setAttributes, setText } from "./dom.js";
import { glyph } from "./status.js";
import { traceback } from "./traceback.js";
import { bytes, clock, count, counted, duration } from "./words.js";

const MOST_SHOWN = 200; // of events
const LEVELS = [["", "All"], ["info", "Info"], ["warning", "Warnings"], ["error", "Errors"]];
const EVERY_MS = 3000; // between two looks at the lines of a live run
const TYPING_MS = 250;
const KINDS = { warning: ["warned", "needs"], error: ["failed", "failed"], critical: ["failed", "failed"] };

/**
 * Return the section; absent if nothing was logged. `show(asked)` shows the lines of a step or worker up to a moment.
 * `onKept()` is called when the first lines of the run have come.
 */
export function logsSection(id, { onKept }) {
  let run = null;
  let page = null; // what the server has said last
  let asked = { level: "", words: "", step: "", worker: "", until: "" };
  let places = []; // the numbers before which the pages begin, but for the newest one
  let askedAt = -Infinity;
  let turn = 0; // of requests: only the answer to the newest one counts
  let wasLive = null;
  let timer = 0;
  let shown = new Map();
  let isOfEvents = true;

  const list = h("ul", { class: "entries logs" });
  const note = h("p", { class: "muted", role: "status" });
  const search = h("input", { type: "search", placeholder: "Search messages", "aria-label": "Search messages", on: { input: () => { clearTimeout(timer); timer = setTimeout(() => choose({ words: search.value.trim() }), TYPING_MS); } } });
  const chips = LEVELS.map(([level, title]) => h("button", { type: "button", class: "chip", on: { click: () => choose({ level }) } }, title));
  const step = select("Step", "All steps", (value) => choose({ step: value }));
  const worker = select("Worker", "All workers", (value) => choose({ worker: value }));
  const until = h("button", { type: "button", class: "chip", "aria-pressed": "true", on: { click: () => choose({ until: "" }) } });
  const download = h("a", { class: "quiet", download: true }, "Download");
  const newer = h("button", { type: "button", class: "quiet", on: { click: () => turnTo(places.slice(0, -1)) } }, "Newer");
  const older = h("button", { type: "button", class: "quiet", on: { click: () => turnTo([...places, page.lines.at(-1).number]) } }, "Older");
  const pages = h("div", { class: "toolbar pages" }, newer, older, note);
  const element = section("logs", "Logs", h("div", { class: "toolbar" }, search, h("div", { class: "chips", role: "group", "aria-label": "Level" }, chips), step.element, worker.element, until, download), list, pages);

  function choose(change) {
    asked = { ...asked, ...change };
    if (run) turnTo([]);
  }

  function turnTo(there) {
    places = there;
    ask();
  }

  async function ask() {
    const mine = ++turn;
    askedAt = performance.now();
    const answer = await load(logsAddress(id, { ...asked, before: places.at(-1) ?? "" })).catch(() => null);
    if (mine !== turn || answer === null) return; // the head of the page says if the server is gone
    const isFirst = page === null && answer.is_kept;
    page = answer.is_kept ? answer : null;
    draw();
    if (isFirst) onKept();
  }

  function draw() {
    chips.forEach((chip, index) => setAttributes(chip, { "aria-pressed": String(LEVELS[index][0] === asked.level) }));
    if (search.value.trim() !== asked.words && document.activeElement !== search) search.value = asked.words;
    if (isOfEvents !== (page === null)) {
      [isOfEvents, shown] = [page === null, new Map()];
      replaceAll(list);
    }
    chips[1].hidden = step.element.hidden = worker.element.hidden = download.hidden = page === null;
    until.hidden = page === null || asked.until === "";
    setText(until, `Up to ${duration(Number(asked.until))} ✕`);
    if (page === null) drawEvents();
    else drawLines();
    note.hidden = !note.textContent;
  }

  function drawLines() {
    element.hidden = false;
    step.update(page.steps, asked.step);
    worker.update(page.workers, asked.worker);
    setAttributes(download, { href: logTextAddress(id, asked) });
    keyed(list, shown, page.lines, (line) => line.number, (line) => entry(line, clock(run.started.started_at + line.seconds)));
    list.hidden = !page.lines.length;
    newer.hidden = !places.length;
    older.hidden = !page.has_older;
    const first = page.newer + 1;
    const range = page.found > page.lines.length && page.lines.length ? `${count(first)} to ${count(first + page.lines.length - 1)} of ${counted(page.found, "line")}, the newest first.` : page.found ? `${counted(page.found, "line")}, the newest first.` : "No line matches.";
    setText(note, page.dropped ? `${range} ${counted(page.dropped, "older line")} ${page.dropped === 1 ? "has" : "have"} gone: a run keeps ${bytes(page.most_bytes)}.` : range);
  }

  /** Show the warnings and errors that are events. */
  function drawEvents() {
    const all = withKeys(run.of("LogMessage")).reverse();
    element.hidden = !all.length;
    newer.hidden = older.hidden = true;
    const words = asked.words.toLowerCase();
    const found = all.filter(({ event }) => (!asked.level || asked.level === "info" || (asked.level === "warning") === (event.level === "warning")) && (!words || `${event.message} ${event.logger ?? ""} ${event.step ?? ""}`.toLowerCase().includes(words)));
    keyed(list, shown, found.slice(0, MOST_SHOWN), ({ key }) => key, ({ event }) => entry(event, duration(event.seconds)));
    list.hidden = !found.length;
    setText(note, !found.length && all.length ? "No message matches the filter." : found.length > MOST_SHOWN ? `The newest ${MOST_SHOWN} of ${count(found.length)}; filter to see others.` : "");
  }

  function update(now) {
    run = now;
    const hasEnded = wasLive === true && !run.isLive;
    const isDue = run.isLive && !places.length && performance.now() - askedAt > EVERY_MS;
    if (wasLive === null || hasEnded || isDue) ask();
    wasLive = run.isLive;
    if (page === null) draw();
  }

  return {
    element,
    update,
    hasLines: () => page !== null,
    show: ({ step: wanted = "", worker: of = "", seconds }) => {
      const isKnown = page?.steps.includes(wanted);
      asked = { level: "", words: "", step: isKnown ? wanted : "", worker: !isKnown && page?.workers.includes(of) ? of : "", until: seconds === undefined ? "" : String(Math.ceil(seconds)) };
      search.value = "";
      turnTo([]);
      element.scrollIntoView();
    },
  };
}

/** Return a choice of names; hidden while there is none. */
function select(label, all, onChange) {
  const element = h("select", { "aria-label": label, on: { change: () => onChange(element.value) } });
  let said = "";
  return {
    element,
    update: (names, chosen) => {
      const known = chosen && !names.includes(chosen) ? [chosen, ...names] : names;
      element.hidden = !known.length;
      if (said !== known.join("\n")) replaceAll(element, h("option", { value: "" }, all), known.map((name) => h("option", { value: name }, name)));
      said = known.join("\n");
      element.value = chosen;
    },
  };
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

/** Return a line, or a message among the events, with the moment in words. */
function entry(line, at) {
  const [kind, shape] = KINDS[line.level] ?? ["told", "starved"];
  const about = [line.level, at, line.step && `step ${line.step}`, line.worker, line.logger].filter(Boolean).join(" · ");
  const times = line.count > 1 ? h("span", { class: "times" }, `× ${count(line.count)}`) : null;
  const body = h("div", {}, h("p", { class: "entry-title" }, line.message, times), h("p", { class: "muted" }, about), line.traceback ? traceback(line.traceback) : null);
  return { element: h("li", { class: `entry ${kind}` }, glyph(shape, 14), body), update: () => {} };
}
