// The list of runs: live ones first and up to date, past ones below, two of them to compare.

import { load } from "./api.js";
import { h, replaceAll, setAttributes, setText } from "./dom.js";
import { go, repeat, setTitle, showConnection, showProblem } from "./shell.js";
import { pill } from "./status.js";
import { Table } from "./table.js";
import { count, counted, duration, moment, money, rate } from "./words.js";

const LIVE_EVERY_MS = 1500;
const QUIET_EVERY_MS = 5000;
const GROUPS = [["all", "All"], ["running", "Running"], ["done", "Done"], ["failed", "Failed"], ["other", "Other"]];

const groupOf = (run) => (["running", "failed"].includes(run.state) ? run.state : ["done", "drained"].includes(run.state) ? "done" : "other");

const rateOf = (run) => run.rate || (run.state !== "running" && run.elements && run.seconds ? run.elements / run.seconds : null);

/** Show the list. Returns a function that ends it. */
export function runsView(view) {
  setTitle("Runs");
  const chosen = new Set();
  let runs = [];
  let wanted = "all";
  let words = "";
  let folder = "";

  const summary = h("p", { class: "muted", role: "status" });
  const search = h("input", { type: "search", placeholder: "Filter by name or id", "aria-label": "Filter by name or id", on: { input: () => { words = search.value.trim().toLowerCase(); show(); } } });
  const buttons = GROUPS.map(([key, title]) => h("button", { type: "button", class: "chip", "aria-pressed": String(key === wanted), on: { click: () => { wanted = key; show(); } } }, title));
  const compare = h("button", { type: "button", class: "action", disabled: true, on: { click: () => { const [a, b] = [...chosen]; go(`/compare?a=${encodeURIComponent(a)}&b=${encodeURIComponent(b)}`); } } }, "Compare");
  const damaged = h("div");
  const nothing = h("p", { class: "empty" });

  function choose(id, isChosen) {
    if (isChosen) chosen.add(id);
    else chosen.delete(id);
    if (chosen.size > 2) chosen.delete([...chosen][0]);
    show();
  }

  const table = new Table({
    label: "Runs",
    kind: "runs",
    keyOf: (run) => run.id,
    columns: [
      { key: "name", title: "Run", isText: true, value: (run) => run.name, cell: nameCell(choose, chosen) },
      { key: "state", title: "State", isText: true, value: (run) => run.state, cell: stateCell },
      { key: "started", title: "Started", value: (run) => run.started_at, text: (run) => moment(run.started_at) },
      { key: "seconds", title: "Duration", value: (run) => run.seconds, text: (run) => duration(run.seconds) },
      { key: "elements", title: "Elements", hint: "Elements of the stage with the most; of a run that is not done, those of the stage that has most before it", value: (run) => run.elements, text: (run) => (run.elements_total && run.elements_total !== run.elements ? `${count(run.elements)} of about ${count(run.elements_total)}` : count(run.elements)), why_: "the run has not committed anything yet" },
      { key: "rate", title: "Rate", hint: "Elements per second: recently, or over the whole run if it has ended", value: rateOf, text: (run) => rate(rateOf(run)), why_: "no elements were counted" },
      { key: "cost", title: "Cost", value: (run) => run.cost?.total ?? null, text: (run) => (run.cost ? money(run.cost.total ?? null, run.cost.currency) : "–"), why_: "the bill of this run can't be computed: its record does not say what its workers had" },
      { key: "problems", title: "Problems", isText: true, value: (run) => (run.failure ? 1e6 : 0) + (run.retries ?? 0) + (run.warnings ?? 0), cell: problemsCell },
    ],
    onRow: (row, run) => setAttributes(row, { class: run.state === "running" ? "live" : null, "data-run": run.id }),
  });

  function show() {
    buttons.forEach((button, index) => setAttributes(button, { "aria-pressed": String(GROUPS[index][0] === wanted) }));
    const found = runs.filter((run) => (wanted === "all" || groupOf(run) === wanted) && (!words || `${run.name} ${run.folder} ${run.id}`.toLowerCase().includes(words)));
    const ordered = [...found.filter((run) => run.state === "running"), ...found.filter((run) => run.state !== "running")];
    table.update(ordered);
    table.element.hidden = !ordered.length;
    const live = runs.filter((run) => run.state === "running").length;
    setText(summary, runs.length ? `${counted(runs.length, "run")}, ${live} running` : "");
    setText(nothing, ordered.length ? "" : runs.length ? "No run matches the filter." : folder && `No run is recorded in ${folder} yet. Start one with lum run PIPELINE.py: it appears here.`);
    compare.disabled = chosen.size !== 2;
    setText(compare, chosen.size === 2 ? "Compare the two runs" : `Compare: choose ${chosen.size ? "one more run" : "two runs"}`);
  }

  async function refresh() {
    try {
      const answer = await load("/api/runs");
      ({ runs, folder } = answer);
      showConnection(runs.some((run) => run.state === "running") ? "live" : "");
      setAttributes(summary, { title: answer.folder });
      showDamaged(damaged, answer.damaged ?? []);
      show();
    } catch (error) {
      if (error.status === 401) showProblem(view, "Signed out", error.message);
      else showConnection("reconnecting");
    }
  }

  const tools = h("div", { class: "toolbar" }, search, h("div", { class: "chips", role: "group", "aria-label": "Show runs" }, buttons), compare);
  view.append(h("div", { class: "title" }, h("h1", {}, "Runs"), summary), tools, table.element, nothing, damaged);
  return repeat(refresh, () => (runs.some((run) => run.state === "running") ? LIVE_EVERY_MS : QUIET_EVERY_MS));
}

function nameCell(choose, chosen) {
  return (run, cell) => {
    if (!cell.firstChild) {
      const box = h("input", { type: "checkbox", "aria-label": `Choose ${run.name} ${run.id} to compare`, on: { change: () => choose(run.id, box.checked) } });
      cell.append(h("div", { class: "run-name" }, box, h("div", {}, h("a", { href: `/runs/${encodeURIComponent(run.id)}`, title: run.name.length > 60 ? run.name : null }, run.name), h("small", {}, run.id), run.folder && h("small", { class: "folder", title: run.folder }, run.folder))));
    }
    cell.querySelector("input").checked = chosen.has(run.id);
  };
}

function stateCell(run, cell) {
  const left = run.state === "running" && run.seconds_left ? `about ${duration(run.seconds_left)} left` : run.is_stream ? "stream" : "";
  const said = `${run.state} ${left}`;
  if (cell.dataset.said === said) return;
  cell.dataset.said = said;
  replaceAll(cell, pill(run.state), left && h("small", {}, left));
}

function problemsCell(run, cell) {
  const counts = [run.retries && counted(run.retries, "failed attempt"), run.warnings && counted(run.warnings, "warning")].filter(Boolean).join(", ");
  const said = `${run.failure ?? ""}|${counts}`;
  if (cell.dataset.said === said) return;
  cell.dataset.said = said;
  setAttributes(cell, { class: "problems" });
  replaceAll(cell, run.failure && h("span", { class: "failure", title: run.failure }, run.failure), counts && h("small", {}, counts));
}

function showDamaged(place, files) {
  const said = JSON.stringify(files);
  if ((place.dataset.said ?? "[]") === said) return; // what the reader has opened stays open
  place.dataset.said = said;
  if (!files.length) return replaceAll(place);
  const rows = files.map((each) => h("li", {}, h("code", {}, each.file), `: ${each.reason}`));
  replaceAll(place, h("details", { class: "damaged" }, h("summary", {}, `${counted(files.length, "record")} can't be read`), h("ul", {}, rows)));
}
