// The nodes of a cluster: what runs on each, how busy it is, and when it came and went.

import { h, replaceAll, section, setAttributes } from "./dom.js";
import { byId } from "./run_state.js";
import { Table } from "./table.js";
import { bytes, count, counted, duration, percent } from "./words.js";

const ID_CHARACTERS = 8; // of a node's id, as everywhere
const UNTOLD = "the node has not said it yet, or the run does not use it";

const infosOf = (run) => byId(run.started.machine?.nodes);

/** Return when nodes came and went, as marks of charts. */
export function nodeMarks(run) {
  return run.of("NodeChanged").map((event) => ({ at: event.seconds, kind: event.change, words: `${run.hostOf(event.node)} ${event.change}` }));
}

/** Say for each node from when to when the run used it: "1 s to 2 min 0 s, from 3 min 20 s". */
function spansOf(run) {
  const spans = new Map();
  for (const event of run.of("NodeChanged")) {
    const own = spans.get(event.node) ?? spans.set(event.node, []).get(event.node);
    if (event.change === "came") own.push([event.seconds, null]);
    else if (own.length) own.at(-1)[1] = event.seconds;
    else own.push([null, event.seconds]); // its beginning did not fit into the record
  }
  return spans;
}

const MOST_SPANS = 3; // in a line
const spanWords = ([from, until]) => (until === null ? `from ${duration(from)}` : `${from === null ? "until" : `${duration(from)} to`} ${duration(until)}`);

function whenOf(spans) {
  const left = spans.length - MOST_SPANS;
  return [...(left > 0 ? [`${left} times before`] : []), ...spans.slice(-MOST_SPANS).map(spanWords)].join(", ");
}

function rowsOf(run) {
  const [infos, spans] = [infosOf(run), spansOf(run)];
  const lost = new Map();
  for (const event of run.of("WorkerLost")) lost.set(event.node, (lost.get(event.node) ?? 0) + 1);
  const now = byId(run.last?.nodes);
  return [...new Set([...infos.keys(), ...spans.keys(), ...run.nodes.keys()])].map((id) => {
    const [view, info, own] = [now.get(id), infos.get(id) ?? {}, spans.get(id) ?? []];
    const isGone = own.length > 0 && own.at(-1)[1] !== null;
    const devices = view?.devices ?? [];
    const told = devices.map((device) => device.utilization).filter((each) => each !== null && each !== undefined);
    return {
      id, info, view, host: run.hostOf(id),
      state: isGone ? "gone" : view || own.length ? (run.isLive ? "in use" : "until the end") : "not used",
      workers: run.isLive ? view?.workers ?? 0 : run.nodes.get(id)?.most ?? 0,
      lost: lost.get(id) ?? 0,
      cpu: view?.utilization ?? null,
      ram: view?.ram_used || null,
      ramTotal: view?.ram_total || info.ram || 0,
      device: told.length ? told.reduce((a, b) => a + b, 0) / told.length : null,
      deviceWords: devices.length || info.accelerators ? `${count(devices.length || info.accelerators)} × ${info.accelerator_type || "device"}` : "",
      deviceMemory: devices.reduce((sum, each) => sum + (each.memory_used ?? 0), 0),
      blocks: view ? view.blocks ?? 0 : null,
      when: whenOf(own),
      since: own.at(-1)?.[0] ?? null,
    };
  });
}

/** Return the section; absent on a single machine. `onNode(id)` is called for a node whose workers the reader wants. */
export function nodesSection({ onNode }) {
  const table = new Table({
    label: "Nodes",
    kind: "of-nodes",
    keyOf: (row) => row.id,
    columns: [
      { key: "host", title: "Node", isText: true, value: (row) => row.host, cell: nodeCell },
      { key: "state", title: "State", isText: true, class: "nowrap", value: (row) => row.state, text: (row) => row.state },
      { key: "workers", title: "Workers", hint: "That are up, or the most at once if the run has ended. Choose the number to see them", value: (row) => row.workers, cell: workersCell(onNode) },
      { key: "lost", title: "Lost", hint: "Workers that were lost there", value: (row) => row.lost, text: (row) => count(row.lost) },
      { key: "cpu", title: "CPU", hint: "Load of all its cores, of all that runs there", value: (row) => row.cpu, text: (row) => percent(row.cpu), why_: UNTOLD },
      { key: "ram", title: "Memory", hint: "In use by all that runs there, and in all", value: (row) => row.ram, text: (row) => (row.ram ? `${bytes(row.ram)} of ${bytes(row.ramTotal)}` : "–"), why_: UNTOLD },
      { key: "device", title: "Devices", hint: "Its accelerators, their mean load and the memory in use, as their driver reports them", value: (row) => row.device, text: (row) => [row.deviceWords, row.device !== null && percent(row.device), row.deviceMemory && bytes(row.deviceMemory)].filter(Boolean).join(", ") || "none" },
      { key: "blocks", title: "Blocks", hint: "Of the run in the cluster's store there, second copies included", value: (row) => row.blocks, text: (row) => bytes(row.blocks), why_: UNTOLD },
      { key: "when", title: "When", isText: true, class: "nowrap", hint: "From when to when the run used it", value: (row) => row.since, text: (row) => row.when || "–", why_: "the run has not used it" },
    ],
    isPinned: (row) => row.state === "gone",
    onRow: (element, row) => setAttributes(element, { "data-node-id": row.id, class: row.state === "gone" ? "gone" : null }),
  });
  const about = h("p", { class: "muted" });
  const element = section("nodes", "Nodes", about, table.element);
  return {
    element,
    update: (run) => {
      const rows = rowsOf(run);
      element.hidden = !rows.length;
      if (!rows.length) return;
      const of = (...states) => rows.filter((row) => states.includes(row.state)).length;
      replaceAll(about, [`${counted(of("in use", "until the end"), "node")} in use`, of("gone") && `${count(of("gone"))} gone`, of("not used") && `${count(of("not used"))} not used`].filter(Boolean).join(", "));
      table.update(rows);
    },
  };
}

function nodeCell(row, cell) {
  const said = `${row.host} ${row.info.is_driver}`;
  if (cell.dataset.said === said) return;
  cell.dataset.said = said;
  const about = [row.id.slice(0, ID_CHARACTERS), row.info.cores && counted(row.info.cores, "core"), row.info.is_driver && "driver"].filter(Boolean).join(" · ");
  replaceAll(cell, h("strong", { title: row.id }, row.host), h("small", {}, about));
}

function workersCell(onNode) {
  return (row, cell) => {
    const said = `${row.workers}`;
    if (cell.dataset.said === said) return;
    cell.dataset.said = said;
    replaceAll(cell, h("button", { type: "button", class: "link-like", "aria-label": `Show the workers of ${row.host}`, on: { click: () => onNode(row.id) } }, count(row.workers)));
  };
}
