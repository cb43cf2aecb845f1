// The graph of a run's stages: coloured by status, with the stage that sets the pace and whom it holds back.

import { h, replaceAll, s, setAttributes, setText } from "./dom.js";
import { isStepOf } from "./run_state.js";
import { glyph, glyphAt, stageKind, stageWords } from "./status.js";
import { percent, rate, shortened } from "./words.js";

const WIDTH = 194; // of a box, in pixels, as the server lays them out (run_data.py)
const HEIGHT = 50;
const MARGIN = 16;
const LABEL_ROOM = WIDTH - 40;
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const LEAST_SCALE = 0.85; // below it, text is too small to read: the graph scrolls instead
const PANE_HEIGHT = 640;
const ZOOMS = [0.3, 0.4, 0.5, 0.7, 0.85, 1, 1.25, 1.5];
const WORDS = { busy: "busy", done: "done", held: "held back", starved: "starved or idle", needs: "needs a worker", waiting: "waits", stalled: "stalled", failed: "failed" };

export class Graph {
  #nodes = new Map();
  #edges = [];
  #scale = null; // null: fit
  #direction = "";
  #focused = null;

  /** `onChoose(stageId)` is called for a stage that the reader clicks. */
  constructor(stages, layouts, { onChoose }) {
    Object.assign(this, { stages, layouts, onChoose });
    this.ids = new Set(stages.map((stage) => stage.id));
    this.links = stages.flatMap((stage) => [
      ...(stage.reads_from ?? []).map((from) => ({ from, to: stage.id, isSide: false })),
      ...(stage.side_inputs_from ?? []).map((from) => ({ from, to: stage.id, isSide: true })),
    ]).filter((link) => this.ids.has(link.from) && link.from !== link.to);
    this.picture = s("svg", { role: "group", "aria-label": `Graph of ${stages.length} stages` });
    this.pane = h("div", { class: "pane", on: { pointerdown: (event) => this.#drag(event) } }, this.picture);
    this.legend = h("ul", { class: "graph-legend" });
    const button = (label, text, act) => h("button", { type: "button", "aria-label": label, title: label, on: { click: act } }, text);
    this.tools = h("div", { class: "tools", role: "group", "aria-label": "Size of the graph" },
      button("Smaller", "−", () => this.#zoom(-1)), button("Fit the graph to the page", "Fit", () => this.#zoom(0)), button("Larger", "+", () => this.#zoom(1)));
    this.element = h("div", { class: "graph" }, h("div", { class: "graph-head" }, this.legend, this.tools), this.pane);
    this.observer = new ResizeObserver(() => this.#arrange());
    this.observer.observe(this.element);
  }

  #layout(direction) {
    const found = this.layouts[direction];
    const [width, height] = direction === "down" ? [found.across, found.along] : [found.along, found.across];
    return { ...found, width: width + 2 * MARGIN, height: height + 2 * MARGIN };
  }

  /** Choose the direction that leaves the boxes larger, and draw the graph again if it changed. */
  #arrange() {
    const room = this.pane.clientWidth;
    if (!room) return;
    const fit = (layout) => Math.min(1, room / layout.width, PANE_HEIGHT / layout.height);
    const right = this.#layout("right");
    const down = this.#layout("down");
    const direction = fit(right) >= fit(down) ? "right" : "down";
    const layout = direction === "right" ? right : down;
    const scale = this.#scale ?? Math.max(LEAST_SCALE, fit(layout));
    if (direction !== this.#direction) this.#build(direction, layout);
    setAttributes(this.picture, {
      viewBox: `0 0 ${layout.width} ${layout.height}`, width: Math.round(layout.width * scale), height: Math.round(layout.height * scale),
    });
    this.scale = scale;
    if (!this.isPlaced) this.#bringIntoView(this.latest?.[1].culprit ?? this.stages[0]?.id);
  }

  /** Scroll the pane, not the page, so that a stage stands in its middle. */
  #bringIntoView(id) {
    const node = this.#nodes.get(id);
    if (!node) return;
    this.isPlaced = true;
    this.pane.scrollTo((node.x + WIDTH / 2) * this.scale - this.pane.clientWidth / 2, (node.y + HEIGHT / 2) * this.scale - this.pane.clientHeight / 2);
  }

  #zoom(way) {
    if (way === 0) {
      const layout = this.#layout(this.#direction || "down");
      this.#scale = Math.max(ZOOMS[0], Math.min(1, this.pane.clientWidth / layout.width, PANE_HEIGHT / layout.height));
    } else {
      const beyond = way > 0 ? ZOOMS.find((each) => each > this.scale + 0.01) : ZOOMS.findLast((each) => each < this.scale - 0.01);
      this.#scale = beyond ?? this.scale;
    }
    this.#arrange();
  }

  #build(direction, layout) {
    this.#direction = direction;
    const toPoint = ([across, along]) => (direction === "down" ? [across + MARGIN, along + MARGIN] : [along + MARGIN, across + MARGIN]);
    const head = (name) => s("marker", { id: `head-${name}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, markerUnits: "userSpaceOnUse", orient: "auto" }, s("path", { class: `head ${name}`, d: "M0 0 8 4 0 8z" }));
    const routes = new Map(layout.routes.map((route) => [`${route.from} ${route.to}`, route.points]));
    this.#edges = this.links.filter((link) => routes.has(`${link.from} ${link.to}`)).map((link) => {
      const points = routes.get(`${link.from} ${link.to}`);
      const element = s("path", { d: curve(points.map(toPoint), direction), "marker-end": "url(#head-plain)" });
      return { link, element };
    });
    const nodes = this.stages.map((stage) => {
      const [x, y] = toPoint(layout.at[stage.id]);
      return this.#node(stage, x - WIDTH / 2, y - HEIGHT / 2);
    });
    replaceAll(this.picture, s("defs", {}, head("plain"), head("holds")), ...this.#edges.map((edge) => edge.element), ...nodes);
    this.#focus(this.stages[0]?.id, false);
    if (this.latest) this.update(...this.latest);
  }

  #node(stage, x, y) {
    const parts = {
      glyph: s("g"),
      status: s("text", { class: "small", x: 30, y: 37 }),
      rate: s("text", { class: "small", x: WIDTH - 12, y: 37, "text-anchor": "end" }),
      progress: s("rect", { class: "progress", x: 1, y: HEIGHT - 4, height: 3, width: 0, rx: 1.5 }),
      title: s("title"),
    };
    const label = s("text", { class: "label", x: 30, y: 20 }, fitted(stage.label, LABEL_ROOM));
    const group = s("g", {
      tabindex: -1, role: "button", transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`,
      on: { click: () => this.onChoose(stage.id), keydown: (event) => this.#key(event, stage), focus: () => this.#focus(stage.id, false) },
    }, parts.title, s("rect", { class: "box", width: WIDTH, height: HEIGHT, rx: 9 }), parts.progress, parts.glyph, label, parts.status, parts.rate);
    this.#nodes.set(stage.id, { group, parts, x, y, stage });
    return group;
  }

  /** Show the newest state. `found` is what bottleneck() returned; `run` has `isLive` and `failedStep`. */
  update(views, found, run) {
    this.latest = [views, found, run];
    const isLive = run.isLive;
    const kinds = new Set();
    for (const [id, { group, parts, stage }] of this.#nodes) {
      const view = views.get(id) ?? { status: "waiting" };
      const kind = kindOf(stage, view, run);
      kinds.add(kind);
      const sets = found.culprit === id;
      const words = kind === "failed" ? "failed" : !isLive && kind !== "done" ? "not finished" : sets && kind !== "stalled" ? "sets the pace" : stageWords(view);
      const speed = isLive && (view.rate || kind === "stalled") ? rate(view.rate ?? 0) : "";
      setAttributes(group, { class: `node ${kind}${sets ? " culprit" : ""}`, "aria-label": `${stage.label}: ${words}${speed ? `, ${speed}` : ""}` });
      if (parts.kind !== kind) replaceAll(parts.glyph, glyphAt(kind, 12, 10));
      parts.kind = kind;
      setText(parts.status, brief(kind, words, view)); // whom it waits for, the arrows and the table say
      setText(parts.rate, speed);
      setText(parts.title, [stage.label, words, ...(stage.steps ?? [])].join("\n"));
      const share = kind === "done" ? 0 : view.fraction ?? 0;
      setAttributes(parts.progress, { width: Math.max(0, (WIDTH - 2) * share).toFixed(1), "aria-label": share ? percent(share) : null });
    }
    for (const { link, element } of this.#edges) {
      const target = views.get(link.to);
      const source = views.get(link.from);
      const holds = isLive && source?.status === "held back" && (source.by ?? []).includes(this.#label(link.to));
      const starves = isLive && target?.status === "starved" && found.starved.has(link.to);
      setAttributes(element, {
        class: `link${link.isSide ? " side" : ""}${holds ? " holds" : starves ? " starves" : ""}`,
        "marker-end": `url(#head-${holds ? "holds" : "plain"})`,
      });
    }
    this.#drawLegend(kinds, found);
  }

  #label(id) {
    return this.#nodes.get(id)?.stage.label;
  }

  #drawLegend(kinds, found) {
    const line = (kind) => s("svg", { width: 26, height: 10, "aria-hidden": "true" }, s("path", { class: `link ${kind}`, d: "M1 5H25" }));
    const isPast = !this.latest[2].isLive;
    const items = Object.keys(WORDS).filter((kind) => kinds.has(kind)).map((kind) => h("li", {}, glyph(kind), isPast && kind === "starved" ? "not finished" : WORDS[kind]));
    if (found.heldBack.size) items.push(h("li", {}, line("holds"), "holds back its writer"));
    if (this.links.some((link) => link.isSide)) items.push(h("li", {}, line("side"), "side input"));
    const shown = items.map((item) => item.textContent).join();
    if (shown !== this.shownLegend) replaceAll(this.legend, ...items);
    this.shownLegend = shown;
  }

  #focus(id, moves) {
    if (!this.#nodes.has(id)) return;
    if (this.#nodes.has(this.#focused)) setAttributes(this.#nodes.get(this.#focused).group, { tabindex: -1 });
    this.#focused = id;
    const { group } = this.#nodes.get(id);
    setAttributes(group, { tabindex: 0 });
    if (moves) group.focus();
  }

  /** Arrow keys go to the nearest box in their direction. */
  #key(event, stage) {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.onChoose(stage.id);
      return;
    }
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!way) return;
    event.preventDefault();
    const here = this.#nodes.get(stage.id);
    let best = null;
    for (const [id, node] of this.#nodes) {
      const [dx, dy] = [node.x - here.x, node.y - here.y];
      const ahead = dx * way[0] + dy * way[1];
      const aside = Math.abs(dx * way[1]) + Math.abs(dy * way[0]);
      if (ahead > 1 && (!best || ahead + 2 * aside < best.far)) best = { id, far: ahead + 2 * aside };
    }
    if (best) this.#focus(best.id, true);
  }

  /** Move the picture under the pointer. */
  #drag(event) {
    if (event.button !== 0 || event.pointerType !== "mouse" || event.target.closest(".node")) return;
    const from = { x: event.clientX + this.pane.scrollLeft, y: event.clientY + this.pane.scrollTop };
    const move = (next) => this.pane.scrollTo(from.x - next.clientX, from.y - next.clientY);
    const stop = () => {
      window.removeEventListener("pointermove", move);
      window.removeEventListener("pointerup", stop);
    };
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", stop);
  }
}

function kindOf(stage, view, run) {
  if (run.failedStep && isStepOf(run.failedStep, stage)) return "failed";
  return !run.isLive && view.status !== "done" ? "starved" : stageKind(view);
}

/** Return the status in one or two words. */
function brief(kind, words, view) {
  return kind === "starved" && view.by?.length && !["not finished", "idle"].includes(words) ? "starved" : kind === "held" ? "held back" : kind === "needs" ? "needs a worker" : kind === "waiting" ? "waits" : words;
}

const pen = document.createElement("canvas").getContext("2d");

/** Cut a label until it fits into so many pixels. */
function fitted(label, room) {
  pen.font = `600 13px ${FONT}`;
  let most = label.length;
  while (most > 4 && pen.measureText(shortened(label, most)).width > room) most -= 1;
  return shortened(label, most);
}

/** Straight through layers, in a curve between them. */
function curve(points, direction) {
  let [x, y] = points[0];
  let path = `M${x.toFixed(1)} ${y.toFixed(1)}`;
  points.slice(1).forEach(([nextX, nextY], index) => {
    if (index % 2 === 1) path += `L${nextX.toFixed(1)} ${nextY.toFixed(1)}`;
    else if (direction === "down") path += `C${x.toFixed(1)} ${((y + nextY) / 2).toFixed(1)} ${nextX.toFixed(1)} ${((y + nextY) / 2).toFixed(1)} ${nextX.toFixed(1)} ${nextY.toFixed(1)}`;
    else path += `C${((x + nextX) / 2).toFixed(1)} ${y.toFixed(1)} ${((x + nextX) / 2).toFixed(1)} ${nextY.toFixed(1)} ${nextX.toFixed(1)} ${nextY.toFixed(1)}`;
    [x, y] = [nextX, nextY];
  });
  return path;
}
