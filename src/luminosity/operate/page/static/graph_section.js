// The section with the graph: of the author's steps, whose composites open, or of the stages that they run in.

import { bottleneck } from "./bottleneck.js";
import { h, section, setAttributes, setText } from "./dom.js";
import { Graph } from "./graph.js";
import { stageState, StepFigures } from "./step_figures.js";
import { duration, rate } from "./words.js";

const KEPT = "luminosity.graph"; // in the browser: whether the reader folded the graph away
const KEPT_KIND = "luminosity.graph.kind"; // and which of the two graphs was chosen
const TITLES = { steps: "Steps", stages: "Stages" };

/** Return the section. `steps` holds what is open (step_tree.js); the others are called for a box that is chosen. */
export function graphSection(run, { steps, onStep, onStage }) {
  let kind = steps.isKnown && localStorage.getItem(KEPT_KIND) !== "stages" ? "steps" : "stages";
  let now = run;
  const stages = run.started.stages ?? [];
  const graph = new Graph({ onChoose: choose });
  const toggle = h("button", { type: "button", class: "quiet", "aria-expanded": "true", "aria-controls": "graph-body", on: { click: () => fold(!graph.element.hidden) } });
  const chips = Object.entries(TITLES).map(([key, title]) => h("button", { type: "button", class: "chip", "data-kind": key, on: { click: () => chooseKind(key) } }, title));
  graph.element.id = "graph-body";
  if (steps.isKnown) graph.head.prepend(h("div", { class: "chips", role: "group", "aria-label": "What the graph shows" }, chips));
  const element = section("graph", "Graph", toggle, graph.element);
  element.hidden = !stages.length;

  function fold(isFolded) {
    graph.element.hidden = isFolded;
    setAttributes(toggle, { "aria-expanded": String(!isFolded) });
    setText(toggle, isFolded ? "Show the graph" : "Hide the graph");
    localStorage.setItem(KEPT, isFolded ? "folded" : "shown");
  }

  function chooseKind(chosen) {
    kind = chosen;
    localStorage.setItem(KEPT_KIND, kind);
    draw();
  }

  function choose(id) {
    if (kind === "stages") onStage(stages[id].id);
    else if (steps.canOpen(id)) steps.toggle(id).then(() => graph.focus(id));
    else onStep(id);
  }

  function draw() {
    for (const chip of chips) setAttributes(chip, { "aria-pressed": String(chip.dataset.kind === kind) });
    if (kind === "stages") graph.draw({ ...now.graph.stages, frames: new Map() }, "stages");
    else {
      const { nodes, open, layouts } = steps.drawing;
      const frames = new Map(open.map((id) => [id, steps.transforms[id].label]));
      graph.draw({ nodes: nodes.map((node) => ({ ...node, canOpen: steps.canOpen(node.id) })), frames, layouts }, "steps");
    }
    update(now);
  }

  function update(newest) {
    now = newest;
    const views = now.views();
    const found = bottleneck(now);
    const isOf = kind === "stages" ? () => null : stagesOfNodes(steps);
    const shown = kind === "stages" ? stageViews(now, views, found) : stepViews(now, found, steps);
    const label = new Map(stages.map((stage) => [stage.id, stage.label]));
    graph.update(shown, ({ from, to }) => {
      if (!now.isLive) return "";
      const [sources, targets] = kind === "stages" ? [[stages[from].id], [stages[to].id]] : [isOf(from), isOf(to)];
      const holds = sources.some((id) => views.get(id)?.status === "held back" && targets.some((other) => (views.get(id).by ?? []).includes(label.get(other))));
      if (holds) return "holds";
      return targets.some((id) => views.get(id)?.status === "starved" && found.starved.has(id)) && !sources.some((id) => targets.includes(id)) ? "starves" : "";
    }, !now.isLive);
  }

  steps.onChange(draw);
  draw();
  fold(localStorage.getItem(KEPT) === "folded");
  return { element, update };
}

const stagesOfNodes = (steps) => (id) => [...steps.stagesOf(id)];

function stageViews(run, views, found) {
  return new Map((run.started.stages ?? []).map((info, place) => {
    const view = views.get(info.id) ?? { status: "waiting" };
    const state = stageState(run, info, view, found);
    const speed = run.isLive && (view.rate || state.kind === "stalled") ? rate(view.rate ?? 0) : "";
    const share = state.kind === "done" ? 0 : view.fraction ?? 0;
    return [place, { ...state, figure: speed, share, title: [info.label, state.words, ...(info.steps ?? [])].join("\n") }];
  }));
}

function stepViews(run, found, steps) {
  const figures = new StepFigures(run, steps, found);
  return new Map(steps.drawing.nodes.map(({ id }) => {
    const { state, seconds, elements } = figures.of(id);
    const figure = seconds && state.kind !== "stalled" ? duration(seconds) : "";
    const said = [steps.transforms[id].name, state.words, seconds ? `${duration(seconds)} of workers' time` : "", elements ? `${elements.toLocaleString("en")} elements put out` : ""];
    return [id, { ...state, figure, share: figures.shareOf(id), title: said.filter(Boolean).join("\n") }];
  }));
}
