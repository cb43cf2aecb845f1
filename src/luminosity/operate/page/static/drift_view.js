// Drift over time: each reference and key as a small chart of the quantity that has the threshold, and alerts as they come.

import { driftAddress, load } from "./api.js";
import { h, keyed, replaceAll, section, setText } from "./dom.js";
import { DriftCard, stateOf } from "./drift_card.js";
import { repeat, setTitle, showConnection, showProblem } from "./shell.js";
import { glyph } from "./status.js";
import { counted, moment, probability } from "./words.js";

const EVERY_MS = 2_000; // an answer without news is empty
const MOST_NEWS = 20;
const MOST_ALERTS = 4; // shown at once; older ones open
const KINDS = { drift: ["failed", "drift began"], resolved: ["done", "drift is over"], missing: ["lost", "missing"], back: ["done", "tests are back"] };

/** Show the histories, and what has changed since the page was opened. Returns a function that ends it. */
export function driftView(view) {
  setTitle("Drift");
  let digest = "";
  const about = h("p", { class: "muted", role: "status" });
  const news = new News();
  const [before, groups, after] = [h("div"), h("div"), h("div")];
  const [sections, cards] = [new Map(), new Map()];

  /** A reference with its cards. Cards stay while their tests become more, so that what the reader points at stays. */
  function group({ reference }) {
    const holder = h("div", { class: "cards" });
    const known = cards.get(reference) ?? cards.set(reference, new Map()).get(reference);
    const element = section(`reference-${cards.size - 1}`, `Against ${reference}`, holder);
    const update = ({ all }) => {
      keyed(holder, known, [...all].sort((a, b) => rank(a) - rank(b)), keyOf, () => new DriftCard());
    };
    return { element, update };
  }

  function show(data) {
    const drifting = data.histories.filter((each) => stateOf(each) === "drift").length;
    setText(about, data.histories.length ? `${data.histories.length} series, ${drifting} with drift in the last test` : "");
    news.update(data.alerts ?? []);
    setTitle(news.count ? `(${news.count}) Drift` : "Drift");
    replaceAll(before, alerts(data.alerts ?? []), damaged(data.damaged ?? []));
    const worst = (all) => Math.min(...all.map(rank));
    const ordered = [...grouped(data.histories)].sort(([, a], [, b]) => worst(a) - worst(b));
    keyed(groups, sections, ordered.map(([reference, all]) => ({ reference, all })), (each) => each.reference, group);
    replaceAll(after, data.histories.length ? null : h("p", { class: "empty" }, "No history of drift tests was found. RecordDrift and lum drift --history keep one; lum drift watch looks at it."));
  }

  async function refresh() {
    try {
      const data = await load(driftAddress(digest));
      if (data !== null) {
        if (!digest) replaceAll(view, h("div", { class: "title" }, h("h1", {}, "Drift"), about), news.element, before, groups, after);
        digest = data.digest;
        show(data);
      }
      showConnection("live");
    } catch (error) {
      if (error.status === 401 || error.status === 404) {
        digest = "";
        showProblem(view, "Drift can't be shown", error.status === 404 ? "This server has no histories of drift." : error.message);
      } else showConnection("reconnecting");
    }
  }
  return repeat(refresh, () => EVERY_MS);
}

const keyOf = (each) => JSON.stringify([each.history, each.columns, each.kernel, each.key]);
const alertKeyOf = (alert) => JSON.stringify([alert.history, alert.time, alert.reference, alert.columns, alert.key, alert.kind]);

/** Says once what has begun or ended since the page was opened, until the reader has read it. */
class News {
  #known = null; // the alerts of before

  constructor() {
    this.list = h("ul", { class: "entries" });
    this.element = h("div", { class: "news", role: "alert" }, this.list, h("button", { type: "button", class: "quiet", on: { click: () => this.#clear() } }, "Read"));
    this.element.hidden = true;
  }

  get count() {
    return this.list.children.length;
  }

  update(all) {
    const fresh = this.#known === null ? [] : all.filter((alert) => !this.#known.has(alertKeyOf(alert)));
    this.#known = new Set([...(this.#known ?? []), ...all.map(alertKeyOf)]);
    this.list.prepend(...fresh.map(alertRow));
    while (this.count > MOST_NEWS) this.list.lastChild.remove();
    this.element.hidden = !this.count;
  }

  #clear() {
    replaceAll(this.list);
    this.element.hidden = true;
    setTitle("Drift");
  }
}

function grouped(histories) {
  const found = new Map();
  for (const each of histories) found.set(each.reference, [...(found.get(each.reference) ?? []), each]);
  return found;
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
  const about = [moment(Date.parse(alert.time) / 1000), alert.reference, alert.columns, alert.key || "all rows", hasP && `p = ${probability(alert.p_value)}`, alert.silenced && "silenced"].filter(Boolean).join(" · ");
  const body = h("div", {}, h("p", { class: "entry-title" }, alert.message.includes(words) ? alert.message : [h("strong", {}, words), alert.message ? `: ${alert.message}` : ""]), h("p", { class: "muted" }, about));
  return h("li", { class: `entry ${kind === "done" ? "resolved" : kind === "failed" ? "failed" : "warned"}` }, glyph(kind, 14), body);
}

function damaged(files) {
  if (!files.length) return null;
  return h("details", { class: "damaged" }, h("summary", {}, `${counted(files.length, "history file")} can't be read`), h("ul", {}, files.map((each) => h("li", {}, h("code", {}, each.file), `: ${each.reason}`))));
}
