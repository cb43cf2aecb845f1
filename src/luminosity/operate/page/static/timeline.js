// Charts over the time of a run: throughput, queues, workers, cost, devices and memory. One cursor points into all of them.

import { Chart, Cursor } from "./chart.js";
import { h, section } from "./dom.js";
import { nodeMarks } from "./nodes.js";
import { bytes, money, percent, short, shortened } from "./words.js";

const MOST_LINES = 5; // more can't be told apart
const LABEL_CHARACTERS = 40;
const MOST_MARKS = 200; // more could not be told apart
const FAR = 4; // a limit beyond so many times the largest value would flatten the lines below it

/** Return [{name, points}] of the stages with the largest `size(index)`, in the pipeline's order. */
export function largestStages(run, size, points, most = MOST_LINES) {
  const stages = run.started.stages ?? [];
  const sized = stages.map((stage, index) => ({ stage, index, size: size(index) })).filter((each) => each.size > 0);
  const chosen = sized.sort((a, b) => b.size - a.size).slice(0, most).sort((a, b) => a.index - b.index);
  return chosen.map(({ stage, index }) => ({ key: stage.id, name: shortened(stage.label, LABEL_CHARACTERS), points: points(index) }));
}

/** Draw a group of charts that share a cursor; a chart without data is absent. */
export class ChartGroup {
  constructor(charts) {
    this.cursor = new Cursor();
    this.charts = charts.map((each) => ({ ...each, chart: new Chart({ ...each, cursor: this.cursor }) }));
    this.element = h("div", { class: "charts" }, this.charts.map((each) => each.chart.element));
  }

  /** Return whether there is anything to see. */
  update(run) {
    const range = [0, Math.max(run.points.at(-1)?.t ?? 0, 1e-3)];
    let isShown = false;
    for (const { chart, lines, marks = () => [] } of this.charts) {
      const series = run.points.length > 1 ? lines(run).filter((each) => each.points.length > 0) : [];
      const hasData = series.some((each) => !each.isBound);
      chart.element.hidden = !hasData;
      if (hasData) chart.update(series, range, marks(run).slice(-MOST_MARKS));
      isShown ||= hasData;
    }
    return isShown;
  }
}

const maximum = (points) => points.reduce((most, [, value]) => Math.max(most, value), 0);
const bound = (run, name, value) => ({ name, isBound: true, look: 0, points: run.points.length ? [[run.points[0].t, value], [run.points.at(-1).t, value]] : [] });

const CHARTS = [
  {
    title: "Throughput", unit: "elements per second, of the steps with the most work", format: short,
    lines: (run) => {
      const now = run.views();
      const views = run.plan.stageIds.map((id) => now.get(id) ?? {});
      const field = views.some((view) => view.busy_seconds) ? "busy_seconds" : "elements"; // older records lack times
      return largestStages(run, (index) => views[index][field] ?? 0, (index) => run.throughput(index));
    },
  },
  {
    title: "Queues", unit: "elements in front of a step, the longest ones", format: short, whole: true,
    lines: (run) => {
      const most = run.largest("queued");
      return largestStages(run, (index) => most[index], (index) => run.series("queued", index));
    },
  },
  {
    title: "Workers", unit: "bundles that run, by pool, and how many could; ▼ a worker was lost", format: short, whole: true,
    marks: (run) => run.of("WorkerLost").map((event) => ({ at: event.seconds, kind: "went", words: `${event.worker} ${event.reason}` })),
    lines: (run) => (run.started.pools ?? []).flatMap((pool, index) => [
      { name: `${pool.name} busy`, look: index % 6, points: run.series("busy", index) },
      { name: `${pool.name} at most`, look: index % 6, isBound: true, points: run.series("slots", index) },
    ]),
  },
  {
    title: "Workers that are up", unit: "by pool, and how many the work that is left is worth, on a cluster", format: short, whole: true,
    lines: (run) => (run.started.machine?.nodes?.length ? run.started.pools ?? [] : []).flatMap((pool, index) => [
      { name: `${pool.name} up`, look: index % 6, points: run.series("workers", index) },
      { name: `${pool.name} wanted`, look: index % 6, isBound: true, points: run.series("wanted", index) },
    ]),
  },
  {
    title: "Cost", unit: "so far, of workers, by pool", format: (value) => money(value, ""),
    lines: (run) => (run.started.pools ?? []).map((pool, index) => ({ name: pool.name, look: index % 6, points: run.costOf(index) })),
  },
  {
    title: "Nodes", unit: "of the cluster that the run uses; ▲ one came, ▼ one went", format: short, whole: true, marks: nodeMarks,
    lines: (run) => [{ name: "nodes", points: run.series("nodes") }],
  },
  {
    title: "CPU of nodes", unit: "load of all cores, of the busiest nodes", format: percent, most: 1,
    lines: (run) => {
      const means = [...run.nodes.keys()].map((id) => [id, run.series("nodeCpu", id)]).filter(([, points]) => points.length).map(([id, points]) => ({ id, mean: points.reduce((sum, [, value]) => sum + value, 0) / points.length }));
      return means.sort((a, b) => b.mean - a.mean).slice(0, MOST_LINES).map(({ id }) => ({ key: id, name: run.hostOf(id), points: run.broken("nodeCpu", id) }));
    },
  },
  {
    title: "Devices", unit: "share of time in which they compute", format: percent, most: 1,
    lines: (run) => run.plan.deviceIds.map((id, index) => ({ name: id, points: run.deviceUse(index) })),
  },
  {
    title: "Memory of devices", unit: "in use, as the driver reports it", format: bytes,
    lines: (run) => run.plan.deviceIds.flatMap((id, index) => {
      const total = (run.last?.devices ?? []).find((device) => device.id === id)?.memory_total;
      const used = { name: id, look: index % 6, points: run.series("deviceMemory", index) };
      return total ? [used, { ...bound(run, `${id} in all`, total), look: index % 6 }] : [used];
    }),
  },
  {
    title: "Memory", unit: "of all processes, and of it between steps", format: bytes,
    lines: (run) => {
      const limit = run.last?.memory?.limit;
      const most = Math.max(maximum(run.series("used")), maximum(run.series("held")));
      if (!most) return []; // an older record, or a system that does not report it
      return [
        { name: "all processes", look: 0, points: run.series("used") },
        { name: "between steps", look: 1, points: run.series("held") },
        ...(limit && limit < FAR * most ? [{ ...bound(run, "limit between steps", limit), look: 1 }] : []),
      ];
    },
  },
];

/** Return the section. */
export function timelineSection() {
  const group = new ChartGroup(CHARTS);
  const element = section("timeline", "Over time", group.element);
  return {
    element,
    update: (run) => {
      element.hidden = !group.update(run);
    },
  };
}
