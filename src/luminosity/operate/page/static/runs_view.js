// The list of runs: live ones first and up to date, past ones below, two of them to compare; or the jobs and their past.

import { load, runsAddress } from "./api.js";
import { h, replaceAll, setAttributes, setText } from "./dom.js";
import { jobTable } from "./job_table.js";
import { go, repeat, setTitle, showConnection, showProblem } from "./shell.js";
import { pill } from "./status.js";
import { Table } from "./table.js";
import { count, counted, duration, moment, money, rate } from "./words.js";

const LIVE_EVERY_MS = 1500;
const QUIET_EVERY_MS = 5000;
const READING_EVERY_MS = 100; // while the server still reads older runs
const GROUPS = [["all", "All"], ["running", "Running"], ["done", "Done"], ["failed", "Failed"], ["other", "Other"]];

const PAGE = 200; // lines that are shown first, and with each "Show more"
const MOST = 1000;
const TYPING_MS = 200;

const rateOf = (run) => run.rate || (run.state !== "running" && run.elements && run.seconds ? run.elements / run.seconds : null);

/** Show the list. Returns a function that ends it. */
export function runsView(view) {
  setTitle("Runs");
  const chosen = new Set();
  const asked = new URLSearchParams(location.search);
  let answer = { runs: [], jobs: [], groups: {}, total: 0, matches: 0, live: 0, unread: 0, folder: "" };
  let wanted = "all";
  let words = "";
  let job = asked.has("job") ? { name: asked.get("job"), folder: asked.get("folder") ?? "" } : null;
  let limit = PAGE;
  let isByJob = false;
  let typing = 0;

  const summary = h("p", { class: "muted", role: "status" });
  const search = h("input", { type: "search", placeholder: "Filter by name, id, user or argument", "aria-label": "Filter by name, id, user or argument", on: { input: () => { words = search.value.trim(); clearTimeout(typing); typing = setTimeout(refresh, TYPING_MS); } } });
  const buttons = GROUPS.map(([key, title]) => h("button", { type: "button", class: "chip", "aria-pressed": String(key === wanted), on: { click: () => { wanted = key; refresh(); } } }, title));
  const views = [["runs", "Runs"], ["jobs", "By job"]].map(([key, title]) => h("button", { type: "button", class: "chip", "data-view": key, on: { click: () => { isByJob = key === "jobs"; show(); } } }, title));
  const ofJob = h("p", { class: "of-job" });
  const more = h("button", { type: "button", class: "quiet more", on: { click: () => { limit = Math.min(MOST, limit + PAGE); refresh(); } } }, "Show more");
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

  const jobs = jobTable({ onChoose: (chosenJob) => { job = chosenJob; isByJob = false; refresh(); } });

  function show() {
    const { runs, total, live, matches, unread, folder } = answer;
    views.forEach((button) => setAttributes(button, { "aria-pressed": String((button.dataset.view === "jobs") === isByJob) }));
    buttons.forEach((button, index) => setAttributes(button, { "aria-pressed": String(GROUPS[index][0] === wanted) }));
    buttons.forEach((button, index) => setText(button, `${GROUPS[index][1]}${index && answer.groups[GROUPS[index][0]] ? ` ${count(answer.groups[GROUPS[index][0]])}` : ""}`));
    table.update(runs);
    jobs.update(answer.jobs);
    table.element.hidden = isByJob || !runs.length;
    jobs.element.hidden = !isByJob || !answer.jobs.length;
    more.hidden = isByJob || matches <= runs.length || limit >= MOST;
    const chosenJob = JSON.stringify(job);
    if (ofJob.dataset.said !== chosenJob) replaceAll(ofJob, job && h("span", {}, "Runs of ", h("strong", {}, job.name), job.folder && ` in ${job.folder} `), job && h("button", { type: "button", class: "quiet", on: { click: () => { job = null; refresh(); } } }, "Show all jobs"));
    ofJob.dataset.said = chosenJob; // the focus stays where it is
    ofJob.hidden = !job;
    const shown = runs.length < matches ? `; ${count(runs.length)} of ${count(matches)} are shown` : "";
    const rest = unread ? `; ${counted(unread, "older run")} ${unread === 1 ? "is" : "are"} still being read` : "";
    setText(summary, total ? `${counted(total, "run")}, ${live} running${shown}${rest}` : "");
    setText(nothing, matches || unread ? "" : total ? "No run matches the filter." : folder && `No run is recorded in ${folder} yet. Start one with lum run PIPELINE.py: it appears here.`);
    compare.disabled = chosen.size !== 2;
    setText(compare, chosen.size === 2 ? "Compare the two runs" : `Compare: choose ${chosen.size ? "one more run" : "two runs"}`);
  }

  let isStopped = false;
  let asking = 0;

  async function refresh() {
    const mine = (asking += 1);
    try {
      const found = await load(runsAddress({ words, group: wanted === "all" ? "" : wanted, job: job?.name, folder: job?.folder, limit }));
      if (isStopped || mine !== asking) return; // the reader has asked for something else meanwhile
      answer = found;
      showConnection(answer.live ? "live" : "");
      setAttributes(summary, { title: answer.folder });
      showDamaged(damaged, answer.damaged ?? []);
      show();
    } catch (error) {
      if (isStopped) return;
      if (error.status === 401) showProblem(view, "Signed out", error.message);
      else showConnection("reconnecting");
    }
  }

  const tools = h("div", { class: "toolbar" }, search, h("div", { class: "chips", role: "group", "aria-label": "Show runs" }, buttons), h("div", { class: "chips", role: "group", "aria-label": "How to list" }, views), compare);
  view.append(h("div", { class: "title" }, h("h1", {}, "Runs"), summary), tools, ofJob, table.element, jobs.element, more, nothing, damaged);
  const stop = repeat(refresh, () => (answer.unread ? READING_EVERY_MS : answer.live ? LIVE_EVERY_MS : QUIET_EVERY_MS));
  return () => {
    isStopped = true;
    clearTimeout(typing);
    stop();
  };
}

function nameCell(choose, chosen) {
  return (run, cell) => {
    if (!cell.firstChild) {
      const box = h("input", { type: "checkbox", "aria-label": `Choose ${run.name} ${run.id} to compare`, on: { change: () => choose(run.id, box.checked) } });
      cell.append(h("div", { class: "run-name" }, box, h("div", {}, h("a", { href: `/runs/${encodeURIComponent(run.id)}`, title: run.name.length > 60 ? run.name : null }, run.name), h("small", {}, run.id, run.user && h("span", { class: "user" }, ` by ${run.user}`)), run.folder && h("small", { class: "folder", title: run.folder }, run.folder), run.arguments && h("small", { class: "arguments", title: run.arguments }, run.arguments))));
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
