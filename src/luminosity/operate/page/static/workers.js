// The worker processes: what each runs, and the CPU time and memory that it has used.

import { h, replaceAll, section, setText } from "./dom.js";
import { Table } from "./table.js";
import { bytes, count, counted, duration } from "./words.js";

const FILTER_FROM = 20; // workers, from which on a reader wants to search
const UNTOLD = "the system does not report it, or the record is of an older version";

/** Join what started, lives, ended and was lost, by the worker's name. */
function rowsOf(run) {
  const rows = new Map();
  const row = (event) => rows.get(event.worker) ?? rows.set(event.worker, { worker: event.worker, pool: event.pool, state: "", starts: 0 }).get(event.worker);
  for (const event of run.of("WorkerStarted", "WorkerEnded", "WorkerLost")) {
    const each = row(event);
    if (event.event === "WorkerStarted") Object.assign(each, { starts: each.starts + 1, from: event.seconds, pid: event.pid, node: event.node ?? "", devices: event.devices ?? [], state: "up", lifetime: null });
    if (event.event === "WorkerEnded") Object.assign(each, { state: "ended", lifetime: event.lifetime_seconds || null, cpu: event.cpu_seconds || each.cpu, peak: event.peak_resident || each.peak });
    if (event.event === "WorkerLost") Object.assign(each, { state: "lost", lifetime: event.seconds - (each.from ?? 0) });
  }
  const labels = new Map((run.started.stages ?? []).map((info) => [info.id, info.label]));
  for (const view of run.last?.workers ?? []) {
    const each = row(view);
    if (run.isLive && each.state !== "ended") each.state = "up";
    Object.assign(each, {
      pid: view.pid || each.pid,
      node: view.node || each.node,
      runs: (view.running ?? []).map((id) => labels.get(id) ?? id).join(", ") || "idle",
      cpu: view.cpu_seconds || each.cpu,
      resident: view.resident || null,
      own: view.own || null,
      peak: Math.max(view.peak_resident ?? 0, each.peak ?? 0) || null,
    });
  }
  return [...rows.values()];
}

/** Return the section; absent if no worker was reported. `show(node)` shows the workers of a node. */
export function workersSection(first) {
  let run = first;
  let words = "";
  let node = "";
  const isCluster = (run.started.machine?.nodes ?? []).length > 0;
  const host = (row) => (row.node ? run.hostOf(row.node) : "");
  const search = h("input", { type: "search", placeholder: "Filter by worker, host, pool or stage", "aria-label": "Filter workers by name, host, pool or stage", on: { input: () => { words = search.value.trim().toLowerCase(); draw(); } } });
  const ofNode = h("button", { type: "button", class: "chip", "aria-pressed": "true", on: { click: () => { node = ""; draw(); } } });
  const note = h("span", { class: "muted" });
  const tools = h("div", { class: "toolbar" }, search, ofNode, note);
  const lived = (row) => row.lifetime ?? (row.from === undefined ? null : (run.isLive ? run.now : run.seconds) - row.from);
  const table = new Table({
    label: "Workers",
    keyOf: (row) => row.worker,
    columns: [
      { key: "worker", title: "Worker", isText: true, value: (row) => row.worker, text: (row) => row.worker },
      { key: "pool", title: "Pool", isText: true, class: "nowrap", value: (row) => row.pool, text: (row) => row.pool },
      { key: "state", title: "State", isText: true, class: "nowrap", value: (row) => row.state, text: (row) => (row.state === "up" && row.starts > 1 ? "up again" : row.state === "up" && !run.isLive ? "until the end" : row.state || "–") },
      { key: "runs", title: "Runs", isText: true, class: "cut", value: (row) => (run.isLive ? row.runs ?? "" : ""), text: (row) => (run.isLive && row.runs) || "–", why: (row) => (!run.isLive ? "the run has ended" : row.state === "up" ? "a snapshot holds only some of many workers" : "the worker has ended") },
      { key: "lifetime", title: "Lifetime", value: lived, text: (row) => duration(lived(row)), why_: "its start is not in the record" },
      { key: "cpu", title: "CPU", value: (row) => row.cpu ?? null, text: (row) => duration(row.cpu || null), why_: UNTOLD },
      { key: "resident", title: "Memory", hint: "Resident, with pages that it shares with others", value: (row) => row.resident ?? null, text: (row) => bytes(row.resident), why_: UNTOLD },
      { key: "own", title: "Own", hint: "Its own pages and its part of shared ones", value: (row) => row.own ?? null, text: (row) => bytes(row.own), why_: UNTOLD },
      { key: "peak", title: "Peak", value: (row) => row.peak ?? null, text: (row) => bytes(row.peak), why_: UNTOLD },
      { key: "devices", title: "Devices", isText: true, value: (row) => (row.devices ?? []).join(", "), text: (row) => (row.devices ?? []).join(", ") },
      ...(isCluster ? [{ key: "host", title: "Host", isText: true, class: "nowrap", value: host, cell: hostCell(host) }] : []),
      { key: "pid", title: "Process", hint: isCluster ? "Its number on its host" : "Its number", value: (row) => row.pid || null, text: (row) => (row.pid ? String(row.pid) : "–"), why_: isCluster ? "a worker of a cluster says it with its first bundle, and the record keeps it for some of many workers" : UNTOLD },
    ],
  });
  const element = section("workers", "Workers", tools, table.element);

  function draw() {
    const rows = rowsOf(run);
    element.hidden = !rows.length;
    tools.hidden = rows.length < FILTER_FROM && !node;
    ofNode.hidden = !node;
    setText(ofNode, node ? `On ${run.hostOf(node)} ✕` : "");
    const isWanted = (row) => (!node || row.node === node) && words.split(/\s+/).every((word) => [row.worker, row.pool, host(row), row.node, row.runs, row.state].join(" ").toLowerCase().includes(word));
    const wanted = words || node ? rows.filter(isWanted) : rows;
    const told = wanted.length < rows.length ? `${count(wanted.length)} of ${counted(rows.length, "worker")}` : counted(rows.length, "worker");
    const leftOut = run.leftOutOf.WorkerStarted;
    setText(note, `${told}${leftOut ? `; ${count(leftOut)} starts of workers did not fit into the record` : ""}`);
    table.update(wanted);
  }

  return {
    element,
    show: (id) => {
      node = id;
      draw();
      element.scrollIntoView();
    },
    update: (now) => {
      run = now;
      draw();
    },
  };
}

/** The name of the host; its node's id is what the reader may point at. */
function hostCell(host) {
  return (row, cell) => {
    if (cell.dataset.said === host(row)) return;
    cell.dataset.said = host(row);
    replaceAll(cell, h("span", { title: row.node ? `node ${row.node}` : null }, host(row) || "–"));
  };
}
