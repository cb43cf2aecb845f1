// The section with the graph, which readers can fold away.

import { bottleneck } from "./bottleneck.js";
import { h, section, setAttributes, setText } from "./dom.js";
import { Graph } from "./graph.js";

const KEPT = "luminosity.graph"; // in the browser: whether the reader folded the graph away

/** Return the section. `onChoose(stageId)` is called for a stage that the reader chooses. */
export function graphSection(run, { onChoose }) {
  const stages = run.started.stages ?? [];
  const graph = new Graph(stages, run.layouts, { onChoose });
  const toggle = h("button", { type: "button", class: "quiet", "aria-expanded": "true", "aria-controls": "graph-body", on: { click: () => fold(!graph.element.hidden) } });
  graph.element.id = "graph-body";
  const element = section("graph", "Stages", toggle, graph.element);
  element.hidden = !stages.length;

  function fold(isFolded) {
    graph.element.hidden = isFolded;
    setAttributes(toggle, { "aria-expanded": String(!isFolded) });
    setText(toggle, isFolded ? "Show the graph" : "Hide the graph");
    localStorage.setItem(KEPT, isFolded ? "folded" : "shown");
  }

  fold(localStorage.getItem(KEPT) === "folded");
  return { element, update: (now) => graph.update(now.views(), bottleneck(now), now) };
}
