// The jobs and what became of their last runs: durations, elements and costs as small bars, and whether they got slower.

import { h, replaceAll, s, setAttributes } from "./dom.js";
import { pill } from "./status.js";
import { Table } from "./table.js";
import { count, counted, duration, moment, money } from "./words.js";

const HEIGHT = 26;
const BAR = 5;
const GAP = 2;

/** Return the table. `onChoose({name, folder})` is called for a job that the reader chooses. */
export function jobTable({ onChoose }) {
  return new Table({
    label: "Jobs",
    kind: "jobs",
    keyOf: (job) => `${job.name} ${job.folder}`,
    columns: [
      { key: "name", title: "Job", isText: true, value: (job) => job.name, cell: nameCell(onChoose) },
      { key: "state", title: "Last run", isText: true, value: (job) => job.newest.state, cell: lastCell },
      { key: "pace", title: "Pace", isText: true, value: (job) => job.ratio ?? 1, cell: paceCell },
      { key: "runs", title: "Runs", value: (job) => job.runs, text: (job) => count(job.runs) },
      { key: "failed", title: "Failed", value: (job) => job.states.failed ?? 0, text: (job) => count(job.states.failed ?? 0) },
      { key: "seconds", title: "Duration", isText: true, hint: "Of the last runs, the newest at the right", value: (job) => job.newest.seconds, cell: barsCell("seconds", duration) },
      { key: "elements", title: "Elements", isText: true, hint: "Of the last runs, the newest at the right", value: (job) => job.newest.elements, cell: barsCell("elements", count) },
      { key: "cost", title: "Cost", isText: true, hint: "Of the last runs, the newest at the right", value: (job) => job.newest.cost?.total ?? null, cell: barsCell("cost", (value, job) => money(value, job.newest.cost?.currency)) },
    ],
    onRow: (row, job) => setAttributes(row, { "data-job": job.name }),
  });
}

/** Say how the pace of the newest run differs from those before it. */
export function paceWords(job) {
  if (job.ratio === null) return job.compared < 2 ? "" : "as before";
  const times = job.ratio > 1 ? job.ratio : 1 / job.ratio;
  return `${Number(times.toPrecision(2))}× ${job.ratio > 1 ? "slower" : "faster"}`;
}

function nameCell(onChoose) {
  return (job, cell) => {
    if (cell.firstChild) return;
    cell.append(h("button", { type: "button", class: "link-like job-name", title: job.name, on: { click: () => onChoose({ name: job.name, folder: job.folder }) } }, job.name), job.folder && h("small", { class: "folder", title: job.folder }, job.folder));
  };
}

function once(cell, said, fill) {
  if (cell.dataset.said === said) return;
  cell.dataset.said = said;
  fill();
}

function lastCell(job, cell) {
  const { newest } = job;
  once(cell, `${newest.id} ${newest.state}`, () => replaceAll(cell, pill(newest.state), h("small", {}, h("a", { href: `/runs/${encodeURIComponent(newest.id)}` }, moment(newest.started_at)))));
}

function paceCell(job, cell) {
  const words = paceWords(job);
  once(cell, `${words} ${job.newest.id}`, () => {
    const kind = job.ratio > 1 ? "worse" : job.ratio === null ? "neutral" : "better";
    replaceAll(cell, h("span", { class: `ratio-words ${kind}` }, words || "–"), job.ratio !== null && h("small", {}, `than ${counted(job.compared, "run")} before`), job.ratio !== null && comparison(job));
    setAttributes(cell, { title: words ? "The time for an element in the newest run that is done, against the median of the runs before it" : "it takes three runs that are done" });
  });
}

/** Return a link that compares the newest run that is done with the one before it. */
function comparison({ history }) {
  const [before, newest] = history.filter((point) => point.state === "done").slice(-2).map((point) => encodeURIComponent(point.id));
  return newest ? h("small", {}, h("a", { href: `/compare?a=${before}&b=${newest}` }, "what changed")) : null;
}

/** Draw a bar for each of the last runs, and write the newest value beside them. */
function barsCell(field, format) {
  return (job, cell) => once(cell, JSON.stringify(job.history.map((point) => [point.state, point[field]])), () => {
    const most = Math.max(...job.history.map((point) => point[field] ?? 0)) || 1;
    const width = job.history.length * (BAR + GAP);
    const bars = job.history.map((point, index) => {
      const height = Math.max(1.5, (HEIGHT * (point[field] ?? 0)) / most);
      const x = index * (BAR + GAP);
      const kind = point.state === "failed" ? "failed" : point.state === "done" || point.state === "drained" ? "done" : "other";
      return s("rect", { class: `bar ${kind}`, x, y: HEIGHT - height, width: BAR, height }, s("title", {}, `${moment(point.started_at)}: ${format(point[field], job)}, ${point.state}`));
    });
    const newest = job.history.at(-1)[field];
    const picture = s("svg", { class: "bars", viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": job.history.map((point) => format(point[field], job)).join(", ") }, bars);
    replaceAll(cell, picture, h("small", {}, format(newest, job)));
  });
}
