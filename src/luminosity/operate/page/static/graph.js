// A graph of boxes, frames around the parts of open composites, and links. The server says where each of them stands.

import { h, replaceAll, s, setAttributes, setText } from "./dom.js";
import { glyph, glyphAt } from "./status.js";
import { percent, shortened } from "./words.js";

const WIDTH = 194; // of a box, in pixels, as the server lays them out (graph_data.py)
const HEIGHT = 50;
const MARGIN = 16;
const LABEL_ROOM = WIDTH - 40;
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const LEAST_SCALE = 0.85; // below it, text is too small to read: the graph scrolls instead
const PANE_HEIGHT = 640;
const ZOOMS = [0.3, 0.4, 0.5, 0.7, 0.85, 1, 1.25, 1.5];
const WORDS = { busy: "busy", done: "done", held: "held back", starved: "starved or idle", needs: "needs a worker", waiting: "waits", stalled: "stalled", failed: "failed", moves: "moves elements" };

export class Graph {
  #nodes = new Map();
  #edges = [];
  #scale = null; // null: fit
  #direction = "";
  #focused = null;

  /** `onChoose(id)` is called for a box or a frame that the reader clicks. */
  constructor({ onChoose }) {
    this.onChoose = onChoose;
    this.nodes = [];
    this.picture = s("svg", { role: "group" });
    this.pane = h("div", { class: "pane", on: { pointerdown: (event) => this.#drag(event) } }, this.picture);
    this.legend = h("ul", { class: "graph-legend" });
    const button = (label, text, act) => h("button", { type: "button", "aria-label": label, title: label, on: { click: act } }, text);
    this.tools = h("div", { class: "tools", role: "group", "aria-label": "Size of the graph" },
      button("Smaller", "−", () => this.#zoom(-1)), button("Fit the graph to the page", "Fit", () => this.#zoom(0)), button("Larger", "+", () => this.#zoom(1)));
    this.head = h("div", { class: "graph-head" }, this.legend, this.tools);
    this.element = h("div", { class: "graph" }, this.head, this.pane);
    this.observer = new ResizeObserver(() => this.#arrange());
    this.observer.observe(this.element);
  }

  /** Show another graph: {nodes: [{id, label, canOpen}], frames: Map of labels by id, layouts}, of this many `what`. */
  draw(drawing, what) {
    Object.assign(this, drawing);
    this.#direction = "";
    this.isPlaced = false;
    this.latest = null;
    setAttributes(this.picture, { "aria-label": `Graph of ${drawing.nodes.length} ${what}` });
    this.#arrange();
  }

  #layout(direction) {
    const found = this.layouts[direction];
    const [width, height] = direction === "down" ? [found.across, found.along] : [found.along, found.across];
    return { ...found, width: width + 2 * MARGIN, height: height + 2 * MARGIN };
  }

  /** Choose the direction that leaves the boxes larger, and draw the graph again if it changed. */
  #arrange() {
    const room = this.pane.clientWidth;
    if (!room || !this.layouts) return;
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
    if (!this.isPlaced) this.#bringIntoView(this.wanted ?? this.nodes[0]?.id);
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
    this.#edges = layout.routes.map((route) => {
      const element = s("path", { d: curve(route.points.map(toPoint), direction) });
      return { route, element };
    });
    const frames = layout.frames.map((frame) => this.#frame(frame, direction));
    const heads = frames.map((frame) => frame.head);
    this.#nodes.clear();
    const nodes = this.nodes.map((node) => {
      const [x, y] = toPoint(layout.at[node.id]);
      return this.#node(node, x - WIDTH / 2, y - HEIGHT / 2);
    });
    replaceAll(this.picture, s("defs", {}, head("plain"), head("holds")), ...frames.map((frame) => frame.around), ...this.#edges.map((edge) => edge.element), ...heads, ...nodes);
    this.#focus(this.nodes[0]?.id, false);
    if (this.latest) this.update(...this.latest);
  }

  #frame({ id, box: [across, along, width, height] }, direction) {
    const [x, y, w, hgt] = direction === "down" ? [across, along, width, height] : [along, across, height, width];
    const label = this.frames.get(id);
    const close = (event) => {
      if (event.key && event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      this.onChoose(id);
    };
    const place = `translate(${x + MARGIN} ${y + MARGIN})`;
    const head = s("g", { class: "frame-head", transform: place, tabindex: 0, role: "button", "aria-expanded": "true", "aria-label": `Fold ${label}`, on: { click: close, keydown: close } },
      s("title", {}, label), s("rect", { x: 1, y: 1, width: w - 2, height: 27, rx: 9 }), s("path", { class: "fold", d: "M13 11l4 5 4-5" }), s("text", { class: "label", x: 30, y: 19 }, fitted(label, w - 44)));
    return { head, around: s("rect", { class: "frame", transform: place, width: w, height: hgt, rx: 11 }) };
  }

  #node(node, x, y) {
    const parts = {
      glyph: s("g"),
      status: s("text", { class: "small", x: 30, y: 37 }),
      rate: s("text", { class: "small", x: WIDTH - 12, y: 37, "text-anchor": "end" }),
      progress: s("rect", { class: "progress", x: 1, y: HEIGHT - 4, height: 3, width: 0, rx: 1.5 }),
      title: s("title"),
    };
    const label = s("text", { class: "label", x: 30, y: 20 }, fitted(node.label, LABEL_ROOM - (node.canOpen ? 14 : 0)));
    const opens = node.canOpen && s("path", { class: "fold", d: `M${WIDTH - 20} 11l5 4-5 4` });
    const group = s("g", {
      tabindex: -1, role: "button", transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`, "aria-expanded": node.canOpen ? "false" : null, "data-node": node.id,
      on: { click: () => this.onChoose(node.id), keydown: (event) => this.#key(event, node), focus: () => this.#focus(node.id, false) },
    }, parts.title, node.canOpen && s("rect", { class: "behind", x: 5, y: 5, width: WIDTH, height: HEIGHT, rx: 9 }), s("rect", { class: "box", width: WIDTH, height: HEIGHT, rx: 9 }), parts.progress, parts.glyph, label, opens, parts.status, parts.rate);
    this.#nodes.set(node.id, { group, parts, x, y, node });
    return group;
  }

  /**
   * Show the newest state. `views` maps the id of a box to {kind, words, brief, figure, share, title, isCulprit};
   * `linkKind(route)` is "holds", "starves" or empty; `isPast` says that the run has ended.
   */
  update(views, linkKind, isPast) {
    this.latest = [views, linkKind, isPast];
    const kinds = new Set();
    for (const [id, { group, parts, node }] of this.#nodes) {
      const view = views.get(id);
      if (!view) continue;
      const { kind, words, figure, share } = view;
      kinds.add(kind);
      if (view.isCulprit) this.wanted = id;
      setAttributes(group, { class: `node ${kind}${view.isCulprit ? " culprit" : ""}`, "aria-label": `${node.label}: ${words}${figure ? `, ${figure}` : ""}` });
      if (parts.kind !== kind) replaceAll(parts.glyph, glyphAt(kind, 12, 10));
      parts.kind = kind;
      setText(parts.status, view.brief); // whom it waits for, the arrows and the table say
      setText(parts.rate, figure);
      setText(parts.title, view.title);
      setAttributes(parts.progress, { width: Math.max(0, (WIDTH - 2) * share).toFixed(1), "aria-label": share ? percent(share) : null });
    }
    const found = new Set();
    for (const { route, element } of this.#edges) {
      const kind = linkKind(route);
      found.add(kind);
      setAttributes(element, { class: `link${route.is_side ? " side" : ""}${kind ? ` ${kind}` : ""}`, "marker-end": route.has_head ? `url(#head-${kind === "holds" ? "holds" : "plain"})` : null });
    }
    this.#drawLegend(kinds, found.has("holds"), isPast);
  }

  #drawLegend(kinds, holds, isPast) {
    const line = (kind) => s("svg", { width: 26, height: 10, "aria-hidden": "true" }, s("path", { class: `link ${kind}`, d: "M1 5H25" }));
    const items = Object.keys(WORDS).filter((kind) => kinds.has(kind)).map((kind) => h("li", {}, glyph(kind), isPast && kind === "starved" ? "not finished" : WORDS[kind]));
    if (holds) items.push(h("li", {}, line("holds"), "holds back its writer"));
    if (this.#edges.some(({ route }) => route.is_side)) items.push(h("li", {}, line("side"), "side input"));
    const shown = items.map((item) => item.textContent).join();
    if (shown !== this.shownLegend) replaceAll(this.legend, ...items);
    this.shownLegend = shown;
  }

  /** Put the keyboard's focus on a box, if it is shown. */
  focus(id) {
    this.#focus(id, true);
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
  #key(event, node) {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.onChoose(node.id);
      return;
    }
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!way) return;
    event.preventDefault();
    const here = this.#nodes.get(node.id);
    let best = null;
    for (const [id, other] of this.#nodes) {
      const [dx, dy] = [other.x - here.x, other.y - here.y];
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

const pen = document.createElement("canvas").getContext("2d");

/** Cut a label until it fits into so many pixels. */
function fitted(label, room) {
  pen.font = `600 13px ${FONT}`;
  let most = label.length;
  while (most > 4 && pen.measureText(shortened(label, most)).width > room) most -= 1;
  return shortened(label, most);
}

/** Straight to the end of a layer, in a curve to the next one, and so on. */
function curve(points, direction) {
  let [x, y] = points[0];
  let path = `M${x.toFixed(1)} ${y.toFixed(1)}`;
  points.slice(1).forEach(([nextX, nextY], index) => {
    if (index % 2 === 0) path += `L${nextX.toFixed(1)} ${nextY.toFixed(1)}`;
    else if (direction === "down") path += `C${x.toFixed(1)} ${((y + nextY) / 2).toFixed(1)} ${nextX.toFixed(1)} ${((y + nextY) / 2).toFixed(1)} ${nextX.toFixed(1)} ${nextY.toFixed(1)}`;
    else path += `C${((x + nextX) / 2).toFixed(1)} ${y.toFixed(1)} ${((x + nextX) / 2).toFixed(1)} ${nextY.toFixed(1)} ${nextX.toFixed(1)} ${nextY.toFixed(1)}`;
    [x, y] = [nextX, nextY];
  });
  return path;
}
