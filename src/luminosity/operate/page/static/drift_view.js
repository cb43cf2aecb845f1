// Drift over time: each reference and key as a small chart of the quantity that has the threshold.

import { load } from "./api.js";
import { h, replaceAll, section } from "./dom.js";
import { DriftCard } from "./drift_card.js";
import { repeat, setTitle, showConnection, showProblem } from "./shell.js";
import { glyph } from "./status.js";
import { counted, moment, probability } from "./words.js";

const EVERY_MS = 15_000;
const MOST_ALERTS = 4; // shown at once; older ones open
const KINDS = { drift: ["failed", "drift began"], resolved: ["done", "drift is over"], missing: ["lost", "missing"], back: ["done", "tests are back"] };

/** Show the histories. Returns a function that ends it. */
export function driftView(view) {
  setTitle("Drift");
  let shown = "";

  function show(data) {
    const text = JSON.stringify(data);
    if (text === shown) return; // what the reader points at stays as it is
    shown = text;
    const drifting = data.histories.filter((each) => stateOf(each) === "drift").length;
    const title = h("div", { class: "title" }, h("h1", {}, "Drift"), h("p", { class: "muted", role: "status" }, data.histories.length ? `${data.histories.length} series, ${drifting} with drift in the last test` : ""));
    const groups = Map.groupBy ? Map.groupBy(data.histories, (each) => each.reference) : grouped(data.histories);
    const worst = (all) => Math.min(...all.map(rank));
    const parts = [...groups].sort(([, a], [, b]) => worst(a) - worst(b)).map(([reference, all], index) => section(`reference-${index}`, `Against ${reference}`,
      h("div", { class: "cards" }, [...all].sort((a, b) => rank(a) - rank(b)).map((each) => new DriftCard(each, stateOf(each)).element))));
    const nothing = h("p", { class: "empty" }, "No history of drift tests was found. RecordDrift and lum drift --history keep one; lum drift watch looks at it.");
    replaceAll(view, title, alerts(data.alerts ?? []), damaged(data.damaged ?? []), ...(parts.length ? parts : [nothing]));
  }

  async function refresh() {
    try {
      show(await load("/api/drift"));
      showConnection("");
    } catch (error) {
      if (error.status === 401 || error.status === 404) showProblem(view, "Drift can't be shown", error.status === 404 ? "This server has no histories of drift." : error.message);
      else showConnection("reconnecting");
    }
  }
  return repeat(refresh, () => EVERY_MS);
}

function grouped(histories) {
  const found = new Map();
  for (const each of histories) found.set(each.reference, [...(found.get(each.reference) ?? []), each]);
  return found;
}

/** Return drift, missing or ok: what a watch says, or else the last test. */
function stateOf(history) {
  if (history.state) return history.state;
  return history.rows.at(-1)?.is_drift ? "drift" : "ok";
}

const rank = (history) => ({ drift: 0, missing: 1, ok: 2 })[stateOf(history)];

function alerts(all) {
  if (!all.length) return null;
  const list = (some) => h("ul", { class: "entries" }, some.map(alertRow));
  const older = all.slice(MOST_ALERTS);
  return section("alerts", "Alerts", list(all.slice(0, MOST_ALERTS)), older.length > 0 && h("details", {}, h("summary", {}, counted(older.length, "older alert")), list(older)));
}

function alertRow(alert) {
  const [kind, words] = KINDS[alert.kind] ?? ["lost", alert.kind];
  const hasP = alert.p_value !== null && alert.p_value !== undefined;
  const about = [moment(Date.parse(alert.time) / 1000), alert.reference, alert.key || "all rows", hasP && `p = ${probability(alert.p_value)}`, alert.silenced && "silenced"].filter(Boolean).join(" · ");
  const body = h("div", {}, h("p", { class: "entry-title" }, h("strong", {}, words), alert.message ? `: ${alert.message}` : ""), h("p", { class: "muted" }, about));
  return h("li", { class: `entry ${kind === "done" ? "resolved" : kind === "failed" ? "failed" : "warned"}` }, glyph(kind, 14), body);
}

function damaged(files) {
  if (!files.length) return null;
  return h("details", { class: "damaged" }, h("summary", {}, `${counted(files.length, "history file")} can't be read`), h("ul", {}, files.map((each) => h("li", {}, h("code", {}, each.file), `: ${each.reason}`))));
}
