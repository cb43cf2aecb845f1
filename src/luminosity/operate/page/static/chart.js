// A chart of lines over the time of a run, with a readout under the pointer or the arrow keys.

import { h, keyed, replaceAll, s, setText } from "./dom.js";
import { linear, roundUp, ticks, timeLabel, timeTicks } from "./scales.js";
import { duration } from "./words.js";

const HEIGHT = 190;
const TOP = 14;
const BOTTOM = 26;
const RIGHT = 14;
const KEY_STEPS = 60; // presses of an arrow key across a chart

/** The moment that all charts of a page point at. */
export class Cursor {
  #charts = new Set();
  seconds = null;

  add(chart) {
    this.#charts.add(chart);
  }

  set(seconds) {
    this.seconds = seconds;
    for (const chart of this.#charts) chart.point();
  }
}

/** A chart. `format` turns a value into text with its unit; `unit` is the title of the axis. */
export class Chart {
  #series = [];
  #marks = [];
  #range = [0, 1];
  #hidden = new Set();
  #scales = null;
  #legendItems = new Map();
  #width = 0;

  constructor({ title, unit, format, cursor, whole = false, most = null }) {
    Object.assign(this, { title, unit, format, cursor, whole, most });
    this.plot = s("svg", {
      class: "plot", height: HEIGHT, tabindex: 0, role: "slider", "aria-label": `${title} over time, ${unit}`,
      "aria-valuemin": 0, "aria-valuemax": 0, "aria-valuenow": 0, "aria-valuetext": "no moment chosen",
      on: {
        pointermove: (event) => this.#toPointer(event),
        pointerleave: () => cursor.set(null),
        keydown: (event) => this.#key(event),
        blur: () => cursor.set(null),
      },
    });
    this.lines = s("g");
    this.marker = s("g", { class: "marker" });
    this.axes = s("g");
    this.plot.append(this.axes, this.lines, this.marker);
    this.readout = h("span", { class: "readout" });
    this.legend = h("ul", { class: "legend" });
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, h("h3", {}, title), h("span", { class: "muted" }, unit), this.readout), this.plot, this.legend);
    cursor.add(this);
    this.observer = new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (width !== this.#width) {
        this.#width = width;
        this.draw();
      }
    });
    this.observer.observe(this.element);
  }

  /**
   * Show these series: [{name, key, points: [[seconds, value]], look, isBound}], from `range[0]` to `range[1]` seconds,
   * and what happened meanwhile: [{at, kind: "came" | "went", words}].
   */
  update(series, range, marks = []) {
    this.#marks = marks;
    this.#series = series.map((each, index) => ({ look: index % 6, key: each.name, ...each }));
    this.#range = range;
    this.#drawLegend();
    this.draw();
  }

  #drawLegend() {
    keyed(this.legend, this.#legendItems, this.#series, (each) => each.key, (each) => {
      const swatch = s("svg", { width: 22, height: 10, "aria-hidden": "true" }, s("path", { d: "M1 5H21", class: `line look${each.look}${each.isBound ? " bound" : ""}` }));
      const button = h("button", { type: "button", class: "key", "aria-pressed": "true", title: "Show or hide this line" }, swatch, each.name, h("output"));
      button.addEventListener("click", () => {
        if (!this.#hidden.delete(each.key)) this.#hidden.add(each.key);
        button.setAttribute("aria-pressed", String(!this.#hidden.has(each.key)));
        this.draw();
      });
      return { element: h("li", {}, button), value: button.querySelector("output"), update: () => {} };
    });
  }

  draw() {
    if (!this.#width) return;
    const shown = this.#series.filter((each) => !this.#hidden.has(each.key));
    const highest = shown.reduce((most, each) => each.points.reduce((high, [, value]) => Math.max(high, value), most), 0);
    const top = this.most ?? roundUp(highest, 4, this.whole);
    const labels = ticks(0, top, 4, this.whole).map((value) => [value, this.format(value)]);
    const left = Math.max(36, 12 + 7.1 * Math.max(...labels.map(([, label]) => label.length)));
    const x = linear(...this.#range, left, this.#width - RIGHT);
    const y = linear(0, top, HEIGHT - BOTTOM, TOP);
    this.#scales = { x, y, left, shown };
    this.plot.setAttribute("width", this.#width);
    this.plot.setAttribute("aria-valuemax", Math.round(this.#range[1]));
    replaceAll(this.axes, ...this.#axes(x, y, labels, left), ...this.#marks.map((mark) => markAt(x(mark.at), mark)));
    replaceAll(this.lines, ...shown.map((each) => s("path", { class: `line look${each.look}${each.isBound ? " bound" : ""}`, d: path(each.points, x, y) })));
    this.point();
  }

  #axes(x, y, labels, left) {
    const parts = [];
    for (const [value, label] of labels) {
      const at = y(value);
      parts.push(s("line", { class: "grid", x1: left, x2: this.#width - RIGHT, y1: at, y2: at }));
      parts.push(s("text", { x: left - 7, y: at + 4, "text-anchor": "end" }, label));
    }
    const span = this.#range[1] - this.#range[0];
    const moments = timeTicks(...this.#range, Math.max(2, Math.floor(this.#width / 90)));
    for (const seconds of moments) {
      const at = x(seconds);
      const anchor = at > this.#width - 34 ? "end" : seconds === 0 ? "start" : "middle";
      parts.push(s("line", { class: "tick", x1: at, x2: at, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 }));
      parts.push(s("text", { x: anchor === "end" ? this.#width - RIGHT + 6 : at, y: HEIGHT - 7, "text-anchor": anchor }, timeLabel(seconds, span)));
    }
    return parts;
  }

  /** Draw the cursor and say the values at its moment. */
  point() {
    const seconds = this.cursor.seconds;
    if (seconds === null || !this.#scales) {
      replaceAll(this.marker);
      setText(this.readout, "");
      for (const item of this.#legendItems.values()) setText(item.value, "");
      return;
    }
    const { x, y, shown } = this.#scales;
    const at = Math.min(Math.max(seconds, this.#range[0]), this.#range[1]);
    const dots = [s("line", { class: "cursor", x1: x(at), x2: x(at), y1: TOP - 6, y2: HEIGHT - BOTTOM })];
    const said = [];
    for (const each of shown) {
      const nearest = nearestTo(each.points, at);
      if (!nearest || nearest[1] === null) continue;
      if (!each.isBound) dots.push(s("circle", { class: `dot look${each.look}`, cx: x(nearest[0]), cy: y(nearest[1]), r: 3.5 }));
      const value = this.format(nearest[1]);
      said.push(`${each.name} ${value}`);
      setText(this.#legendItems.get(each.key).value, value);
    }
    replaceAll(this.marker, ...dots);
    setText(this.readout, duration(at));
    this.plot.setAttribute("aria-valuenow", Math.round(at));
    this.plot.setAttribute("aria-valuetext", `${duration(at)}: ${said.join(", ") || "no data"}`);
  }

  #toPointer(event) {
    if (!this.#scales) return;
    const { x, left } = this.#scales;
    const at = event.clientX - this.plot.getBoundingClientRect().left;
    this.cursor.set(at < left - 6 ? null : x.invert(at));
  }

  #key(event) {
    const [first, last] = this.#range;
    const step = (last - first) / KEY_STEPS;
    const from = this.cursor.seconds ?? last;
    const wanted = { ArrowLeft: from - step, ArrowRight: from + step, Home: first, End: last, Escape: null }[event.key];
    if (wanted === undefined) return;
    event.preventDefault();
    this.cursor.set(wanted === null ? null : Math.min(last, Math.max(first, wanted)));
  }
}

/** A line through the points, with a gap where a value is not known. */
function path(points, x, y) {
  let isOn = false;
  return points.map(([seconds, value]) => {
    if (value === null) return (isOn = false) || "";
    const part = `${isOn ? "L" : "M"}${x(seconds).toFixed(1)} ${y(value).toFixed(1)}`;
    isOn = true;
    return part;
  }).join("");
}

/** Return the point nearest to a moment, by halving: charts have thousands. */
function nearestTo(points, seconds) {
  let [low, high] = [0, points.length - 1];
  if (high < 0) return null;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < seconds) low = middle;
    else high = middle;
  }
  return seconds - points[low][0] < points[high][0] - seconds ? points[low] : points[high];
}

/** Return a triangle above the plot: up for what came, down for what went, with the words for a pointer. */
function markAt(x, { at, kind, words }) {
  const [tip, base] = kind === "came" ? [1, 9] : [9, 1];
  return s("path", { class: `mark ${kind}`, d: `M${(x - 5).toFixed(1)} ${base}h10L${x.toFixed(1)} ${tip}z` }, s("title", {}, `${duration(at)}: ${words}`));
}
