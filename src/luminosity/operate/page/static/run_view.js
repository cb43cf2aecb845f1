// The page of one run: loads it, follows it while it is live, and keeps its sections up to date.

import { load, runAddress } from "./api.js";
import { countersSection } from "./counters.js";
import { h, replaceAll } from "./dom.js";
import { failuresSection } from "./failures.js";
import { graphSection } from "./graph_section.js";
import { follow } from "./live.js";
import { logsSection } from "./logs.js";
import { modelsSection } from "./models.js";
import { nodesSection } from "./nodes.js";
import { drawer } from "./redraw.js";
import { runActions } from "./run_actions.js";
import { RunHeader } from "./run_header.js";
import { RunState } from "./run_state.js";
import { setTitle, showConnection, showProblem } from "./shell.js";
import { stagesSection } from "./stages.js";
import { stepsSection } from "./steps.js";
import { StepTree } from "./step_tree.js";
import { streamSection } from "./stream.js";
import { stuckSection } from "./stuck.js";
import { timelineSection } from "./timeline.js";
import { percent } from "./words.js";
import { workersSection } from "./workers.js";

const CLOCK_MS = 1000;
const AGAIN_MS = 1000; // between two attempts to load the whole run

/** Show a run. Returns a function that ends it. */
export function runView(view, id) {
  let stopFollowing = () => {};
  let isStopped = false;
  let run = null;
  let sections = null;
  let timer = 0;
  const actions = runActions(id);
  const places = placesIn(view);
  const request = drawer(draw);
  const clock = setInterval(() => run?.isLive && request(), CLOCK_MS); // the time goes on between two events

  function build() {
    const stages = stagesSection(run);
    const tree = new StepTree(run);
    const steps = stepsSection(run, { steps: tree, onStage: (stage) => stages.show(stage) });
    const graph = graphSection(run, { steps: tree, onStep: (id) => steps.show(id), onStage: (stage) => stages.show(stage) });
    const workers = workersSection(run);
    const nodes = nodesSection({ onNode: (node) => workers.show(node) });
    const logs = logsSection(id, { onKept: request });
    const [header, failures] = [new RunHeader(actions), failuresSection(logs)];
    const stuck = stuckSection({ onStep: (step) => (tree.find(step) >= 0 ? steps.show(tree.find(step)) : stages.element.scrollIntoView()) });
    sections = { header, stuck, graph, steps, stages, stream: streamSection(), timeline: timelineSection(), models: modelsSection(run), counters: countersSection(), failures, logs, nodes, workers };
    const [head, ...others] = Object.values(sections).map((section) => section.element);
    replaceAll(view, head, places.element, ...others);
  }

  function draw() {
    for (const section of Object.values(sections)) section.update(run);
    actions.update(run);
    places.update();
    const { failures, stuck } = sections;
    // The page of a failed run begins with its failure.
    if (run.state === "failed" && failures.element.nextSibling !== stuck.element) stuck.element.before(failures.element);
    const share = run.isLive ? sections.header.share : null;
    setTitle(`${share === null ? "" : `${percent(share)} `}${run.title}`);
  }

  async function reload() {
    const data = await load(runAddress(id));
    if (isStopped) return;
    if (run === null) run = new RunState(data);
    else run.replace(data);
    if (sections === null) build();
    draw();
    if (run.isLive) listen();
    else showConnection("");
  }

  function listen() {
    stopFollowing = follow(id, run.number, {
      onEvent: (event, number) => {
        run.apply(event, number);
        request();
        if (run.ended) again();
      },
      onState: (state) => {
        if (state !== "running") again();
      },
      onCost: (bill) => {
        run.cost = bill;
        request();
      },
      onReload: () => again(AGAIN_MS),
      onConnection: showConnection,
    });
  }

  /** Load the whole run again: at its end, since the last words count, or because the server lost its numbers. */
  function again(afterMs = 0) {
    stopFollowing();
    clearTimeout(timer);
    timer = setTimeout(() => reload().catch(() => {
      if (isStopped) return;
      showConnection("reconnecting");
      again(AGAIN_MS);
    }), afterMs);
  }

  replaceAll(view, h("p", { class: "muted loading", role: "status" }, "Loading the run …"));
  reload().catch((error) => !isStopped && showProblem(view, "This run can't be shown", error.message));
  return () => {
    isStopped = true;
    clearInterval(clock);
    clearTimeout(timer);
    stopFollowing();
    request.stop();
  };
}

/** Links to the sections that have something to show: the page of a large run is long. */
function placesIn(view) {
  const element = h("nav", { class: "places", "aria-label": "Sections of this page" });
  let shown = "";
  return {
    element,
    update: () => {
      const sections = [...view.querySelectorAll(":scope > section:not([hidden])")];
      const now = sections.map((section) => section.id).join();
      if (now === shown) return;
      shown = now;
      replaceAll(element, ...sections.map((section) => h("a", { href: `#${section.id}` }, section.querySelector("h2").textContent)));
    },
  };
}
