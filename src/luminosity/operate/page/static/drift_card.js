// The history of one key: p-values on a logarithmic axis with their level, and the size of the effect with its floor.

import { h, replaceAll, s, setAttributes, setText } from "./dom.js";
import { linear, logarithmic, roundUp, ticks } from "./scales.js";
import { glyph } from "./status.js";
import { moment, probability } from "./words.js";

const HEIGHTS = { p: 118, effect: 92 };
const LEFT = 52;
const RIGHT = 12;
const TOP = 8;
const LEAST_P = 1e-6; // smaller p-values stand at the lower edge
const REPORT = /^\/api\/drift\/report\?/; // the only addresses that a point may lead to
const STATES = { drift: ["failed", "drift"], missing: ["lost", "no recent test"], ok: ["done", "no drift"] };

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const size = (row) => row.effect ?? row.mmd2; // whatever the test is
const effect = (value) => (value === 0 ? "0" : Math.abs(value) < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(3))));

/** Return drift, missing or ok: what a watch says, or else the last test. */
export function stateOf(history) {
  if (history.state) return history.state;
  return history.rows.at(-1)?.is_drift ? "drift" : "ok";
}

/** The card of one series; `update` shows its newest tests. */
export class DriftCard {
  rows = [];

  constructor() {
    this.readout = h("p", { class: "readout" });
    this.body = h("div", { class: "drift-charts" });
    this.head = h("header");
    this.about = h("p", { class: "muted about" });
    this.element = h("article", {}, this.head, this.about, this.body, this.readout);
    this.observer = new ResizeObserver(([entry]) => this.#draw(Math.floor(entry.contentRect.width)));
    this.observer.observe(this.body);
  }

  update(history) {
    const state = stateOf(history);
    const said = JSON.stringify([state, history.rows]);
    if (said === this.said) return; // what the reader points at stays as it is
    this.said = said;
    this.rows = history.rows.map((row) => ({ ...row, at: Date.parse(row.time) / 1000 })).filter((row) => !Number.isNaN(row.at));
    const [kind, words] = STATES[state];
    const about = [history.columns, history.kernel].filter(Boolean).join(", ");
    setAttributes(this.element, { class: `card ${state}` });
    replaceAll(this.head, h("h3", {}, history.key || "all rows"), h("span", { class: `pill ${kind}` }, glyph(kind, 11), words));
    setText(this.about, about);
    setAttributes(this.about, { title: about, hidden: !about });
    this.say(this.rows.at(-1));
    const width = this.width;
    this.width = 0;
    this.#draw(width);
  }

  /** Say what a test found. */
  say(row) {
    if (!row) return setText(this.readout, "no test yet");
    const window = row.window ? `, rows from ${moment(Date.parse(row.window[0]) / 1000)} to ${moment(Date.parse(row.window[1]) / 1000)}` : "";
    const figures = [isNumber(row.p_value) && `p = ${probability(row.p_value)}`, isNumber(row.level) && `level ${probability(row.level)}`, isNumber(size(row)) && `${row.effect_name ?? "MMD²"} ${effect(size(row))}`].filter(Boolean).join(", ");
    setText(this.readout, `${moment(row.at)}: ${row.verdict || (row.is_drift ? "drift" : "no drift")}${figures ? `, ${figures}` : ""}${window}`);
  }

  #draw(width) {
    if (!width || width === this.width || !this.rows.length) return;
    this.width = width;
    const [first, last] = [this.rows[0].at, this.rows.at(-1).at];
    const room = (last - first) * 0.03 || 1800;
    const x = linear(first - room, last + room, LEFT, width - RIGHT);
    const tested = this.rows.filter((row) => isNumber(row.p_value));
    const sized = this.rows.filter((row) => isNumber(size(row)));
    const isLast = sized.length === 0;
    replaceAll(this.body, tested.length ? this.#pValues(tested, x, isLast) : null, sized.length ? this.#effects(sized, x) : null);
  }

  #pValues(rows, x, isLast) {
    const height = HEIGHTS.p + (isLast ? 18 : 0);
    const bottom = height - (isLast ? 26 : 10);
    const smallest = Math.min(...rows.flatMap((row) => [Math.max(row.p_value, LEAST_P), isNumber(row.level) ? row.level : 1]));
    const low = 10 ** Math.floor(Math.log10(Math.min(smallest, 0.01)) - 0.15);
    const y = logarithmic(low, 1, bottom, TOP);
    const powers = [];
    for (let power = Math.log10(low); power <= 0; power += Math.ceil(-Math.log10(low) / 3)) powers.push(10 ** Math.round(power));
    if (!powers.includes(1)) powers.push(1);
    const grid = powers.map((value) => [value, value === 1 ? "1" : value >= 0.001 ? String(value) : `10${superscript(Math.round(Math.log10(value)))}`]);
    return this.#chart("p-value", "below the level: drift", height, rows, x, y, grid, {
      value: (row) => Math.max(row.p_value, LEAST_P), bound: (row) => row.level, boundName: "level", bottom, isLast,
    });
  }

  #effects(rows, x) {
    const values = rows.flatMap((row) => [size(row), isNumber(row.floor_mmd2) ? row.floor_mmd2 : 0]);
    const height = HEIGHTS.effect + 18;
    const bottom = height - 26;
    const top = roundUp(Math.max(...values, 1e-12), 3);
    const low = Math.min(0, ...values);
    const y = linear(low, top, bottom, TOP);
    const grid = ticks(low, top, 3).map((value) => [value, effect(value)]);
    return this.#chart(`effect, ${rows.at(-1).effect_name ?? "MMD²"}`, "how far apart", height, rows, x, y, grid, {
      value: size, bound: (row) => row.floor_mmd2, boundName: "floor", bottom, isLast: true,
    });
  }

  #chart(title, hint, height, rows, x, y, grid, { value, bound, boundName, bottom, isLast }) {
    const parts = [];
    for (const [at, label] of grid) {
      parts.push(s("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y(at), y2: y(at) }));
      parts.push(s("text", { x: LEFT - 7, y: y(at) + 4, "text-anchor": "end" }, label));
    }
    const bounds = rows.filter((row) => isNumber(bound(row)));
    if (bounds.length) {
      const [from, to] = [x.low, x.high];
      const steps = bounds.map((row, index) => `L${x(row.at).toFixed(1)} ${y(bound(bounds[Math.max(0, index - 1)])).toFixed(1)}L${x(row.at).toFixed(1)} ${y(bound(row)).toFixed(1)}`).join("");
      parts.push(s("path", { class: "threshold", d: `M${x(from)} ${y(bound(bounds[0])).toFixed(1)}${steps}L${x(to)} ${y(bound(bounds.at(-1))).toFixed(1)}` }));
      parts.push(s("text", { class: "bound-name", x: this.width - RIGHT, y: y(bound(bounds.at(-1))) - 4, "text-anchor": "end" }, boundName));
    }
    parts.push(s("path", { class: "course", d: rows.map((row, index) => `${index ? "L" : "M"}${x(row.at).toFixed(1)} ${y(value(row)).toFixed(1)}`).join("") }));
    const radius = rows.length > 60 ? 2.6 : rows.length > 30 ? 3.4 : 4.2;
    parts.push(...rows.map((row) => this.#point(row, x(row.at), y(value(row)), radius)));
    if (isLast) parts.push(...dates(x, this.width, height));
    const label = `${title} of ${rows.length} tests over time, ${rows.filter((row) => row.is_drift).length} with drift`;
    return h("figure", {}, h("figcaption", {}, title, h("span", { class: "muted" }, hint)), s("svg", { class: "plot", width: this.width, height, role: "group", "aria-label": label, "data-bottom": bottom }, parts));
  }

  /** A drift is a filled diamond, no drift a hollow circle; a point with a report leads to it. */
  #point(row, x, y, radius) {
    const wide = radius * 1.45;
    const mark = row.is_drift
      ? s("path", { class: "drifted", d: `M${x} ${y - wide}L${x + wide} ${y}L${x} ${y + wide}L${x - wide} ${y}z` })
      : s("circle", { class: "steady", cx: x, cy: y, r: radius });
    const on = { pointerenter: () => this.say(row), focus: () => this.say(row) };
    const words = `${moment(row.at)}: ${row.verdict || (row.is_drift ? "drift" : "no drift")}`;
    const title = s("title", {}, row.report ? `${words}; opens the report` : words);
    if (row.report && REPORT.test(row.report)) return s("a", { href: row.report, target: "_blank", rel: "noopener", "aria-label": `${words}, open the report`, on }, title, mark);
    return s("g", { on }, title, mark);
  }
}

function superscript(power) {
  return String(power).replace(/./g, (sign) => ({ "-": "⁻" })[sign] ?? "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(sign)]);
}

function dates(x, width, height) {
  const about = Math.max(2, Math.floor(width / 110));
  const span = x.high - x.low;
  const day = (at) => new Date(at * 1000).toLocaleString("en-GB", span > 3 * 86_400 ? { day: "numeric", month: "short" } : { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
  const all = Array.from({ length: about }, (_, index) => x.low + (span * (index + 0.5)) / about);
  return all.map((at) => s("text", { x: x(at), y: height - 8, "text-anchor": "middle" }, day(at)));
}
