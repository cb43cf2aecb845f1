// The page of one run: loads it, follows it while it is live, and keeps its sections up to date.

import { load, runAddress } from "./api.js";
import { h, replaceAll } from "./dom.js";
import { follow } from "./live.js";
import { drawer } from "./redraw.js";
import { countersSection } from "./counters.js";
import { failuresSection } from "./failures.js";
import { graphSection } from "./graph_section.js";
import { RunHeader } from "./run_header.js";
import { logsSection } from "./logs.js";
import { modelsSection } from "./models.js";
import { RunState } from "./run_state.js";
import { setTitle, showConnection, showProblem } from "./shell.js";
import { stepsSection } from "./steps.js";
import { streamSection } from "./stream.js";
import { timelineSection } from "./timeline.js";
import { workersSection } from "./workers.js";

const CLOCK_MS = 1000;

/** Show a run. Returns a function that ends it. */
export function runView(view, id) {
  let stopFollowing = () => {};
  let isStopped = false;
  let run = null;
  let sections = [];
  const request = drawer(draw);
  const clock = setInterval(() => run?.isLive && request(), CLOCK_MS); // the time goes on between two events

  function draw() {
    for (const section of sections) section.update(run);
  }

  function build() {
    setTitle(run.started.name);
    const steps = stepsSection();
    const header = new RunHeader();
    const failures = failuresSection();
    const graph = graphSection(run, { onChoose: (stage) => steps.show(stage) });
    const parts = [header, graph, steps, streamSection(), timelineSection(), modelsSection(), countersSection(), failures, logsSection(), workersSection()];
    // A failed run begins with its failure; otherwise failures come after what the run does.
    sections = run.state === "failed" ? [header, failures, ...parts.filter((each) => each !== header && each !== failures)] : parts;
    replaceAll(view, ...sections.map((section) => section.element));
    draw();
  }

  async function reload({ rebuilds }) {
    stopFollowing();
    const data = await load(runAddress(id));
    if (isStopped) return;
    if (run === null) run = new RunState(data);
    else run.replace(data);
    if (rebuilds) build();
    else request();
    if (run.isLive) listen();
    else showConnection("");
  }

  function listen() {
    stopFollowing = follow(id, run.number, {
      onEvent: (event, number) => {
        run.apply(event, number);
        request();
        if (run.ended) again(true);
      },
      onState: (state) => {
        if (run.state === state) return;
        run.state = state;
        request();
        if (state !== "running") again(true);
      },
      onCost: (bill) => {
        run.cost = bill;
        request();
      },
      onReload: () => again(false),
      onConnection: showConnection,
    });
  }

  /** Load the whole run again: at its end, since the last words count, or because the server lost its numbers. */
  async function again(isEnd) {
    stopFollowing();
    showConnection("");
    try {
      await reload({ rebuilds: isEnd });
    } catch (error) {
      if (isStopped) return;
      showConnection("reconnecting");
      setTimeout(() => !isStopped && again(isEnd), 2000);
    }
  }

  replaceAll(view, h("p", { class: "muted loading", role: "status" }, "Loading the run …"));
  reload({ rebuilds: true }).catch((error) => !isStopped && showProblem(view, "This run can't be shown", error.message));
  return () => {
    isStopped = true;
    clearInterval(clock);
    stopFollowing();
    request.stop();
  };
}
