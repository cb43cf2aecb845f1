// Streams: how far they are behind, what waits, what came too late, Kafka, and checkpoints.

import { h, section, setText } from "./dom.js";
import { Table } from "./table.js";
import { ChartGroup, largestStages } from "./timeline.js";
import { bytes, count, counted, duration, moment, rate, short } from "./words.js";

const YEAR_S = 365 * 86_400;

/** Return how far a watermark is behind the clock, in words. */
function behind(stream) {
  if (stream.has_ended) return "done";
  if (stream.watermark === undefined || stream.behind_seconds === undefined) return "no data yet";
  if (Math.abs(stream.behind_seconds) > YEAR_S) return `at ${moment(stream.watermark)}`; // its times are not those of today
  return stream.behind_seconds < -1 ? `${duration(-stream.behind_seconds)} ahead` : duration(Math.max(0, stream.behind_seconds));
}

/** Return the lines of the stages with the largest values of a field. */
function linesOf(run, field, shown = (value) => value) {
  const most = run.largest(field);
  return largestStages(run, (index) => most[index], (index) => run.series(field, index).map(([at, value]) => [at, shown(value)]));
}

const CHARTS = [
  { title: "Watermark lag", unit: "time from the watermark to the clock", format: duration, lines: (run) => linesOf(run, "lag", (value) => Math.max(0, value)) },
  { title: "Backlog", unit: "what waits at the source, in its own unit", format: short, lines: (run) => linesOf(run, "backlog") },
  { title: "Latency", unit: "from a record's time to its reading, the median", format: duration, lines: (run) => linesOf(run, "latency", (value) => value / 1000) },
];

/** Return the section; absent for batches. */
export function streamSection() {
  const stages = new Table({
    label: "Stages of the stream",
    keyOf: (row) => row.info.id,
    columns: [
      { key: "label", title: "Step", isText: true, value: (row) => row.info.label, text: (row) => row.info.label },
      { key: "behind", title: "Behind", hint: "From the watermark to the clock: everything before it is processed", value: (row) => row.stream.behind_seconds ?? null, text: (row) => behind(row.stream) },
      { key: "backlog", title: "Backlog", hint: "What waits at the source, in its own unit", value: (row) => row.stream.backlog ?? null, text: (row) => (row.stream.backlog === undefined ? "–" : count(Math.round(row.stream.backlog))), why_: "the step is no source, or its source does not know" },
      { key: "late", title: "Late", hint: "Elements that came later than allowed, and were dropped", value: (row) => row.stream.dropped_late ?? 0, text: (row) => count(row.stream.dropped_late ?? 0) },
    ],
  });
  const kafka = new Table({
    label: "Kafka",
    keyOf: (view) => `${view.step} ${view.kind}`,
    columns: [
      { key: "step", title: "Kafka", isText: true, value: (view) => view.step, text: (view) => `${view.step} (${view.kind}s)` },
      { key: "rate", title: "Rate", value: (view) => view.records_per_second ?? 0, text: (view) => rate(view.records_per_second ?? 0) },
      { key: "records", title: "Records", value: (view) => view.records ?? 0, text: (view) => count(view.records ?? 0) },
      { key: "lag", title: "Lag", hint: "Records before the end of the partitions", value: (view) => (view.kind === "read" ? view.lag ?? 0 : null), text: (view) => (view.kind === "read" ? count(view.lag ?? 0) : "") },
      { key: "p50", title: "Latency p50", value: (view) => view.p50_ms ?? null, text: (view) => (view.p50_ms === undefined ? "–" : duration(view.p50_ms / 1000)), why_: "no record had a time" },
      { key: "p99", title: "Latency p99", value: (view) => view.p99_ms ?? null, text: (view) => (view.p99_ms === undefined ? "–" : duration(view.p99_ms / 1000)), why_: "no record had a time" },
      { key: "dead", title: "Dead letters", value: (view) => view.dead_letters ?? 0, text: (view) => count(view.dead_letters ?? 0) },
      { key: "lost", title: "Lost", hint: "Offsets that retention removed before they were read", value: (view) => view.lost ?? 0, text: (view) => count(view.lost ?? 0) },
    ],
  });
  const charts = new ChartGroup(CHARTS);
  const checkpoints = h("p", { class: "pace" });
  const element = section("stream", "Stream", checkpoints, stages.element, kafka.element, charts.element);

  function update(run) {
    const infos = new Map((run.started.stages ?? []).map((info) => [info.id, info]));
    const rows = (run.last?.stages ?? []).filter((view) => view.stream).map((view) => ({ info: infos.get(view.id) ?? view, stream: view.stream }));
    const brokers = (run.last?.stages ?? []).flatMap((view) => view.kafka ?? []);
    const said = checkpointWords(run);
    element.hidden = !rows.length && !brokers.length && !said;
    stages.element.hidden = !rows.length;
    kafka.element.hidden = !brokers.length;
    stages.update(rows);
    kafka.update(brokers);
    setText(checkpoints, said);
    checkpoints.hidden = !said;
    charts.element.hidden = !rows.length || !charts.update(run);
  }
  return { element, update };
}

function checkpointWords(run) {
  const view = run.last?.checkpoint;
  const slowest = Math.max(0, ...run.of("CheckpointDone").map((event) => event.checkpoint_seconds ?? 0));
  if (!view) return "";
  if (!view.count) return "No checkpoint is complete yet.";
  const ago = view.last_at === undefined ? "" : run.isLive ? `, the last one ${duration(Math.max(0, run.now - view.last_at))} ago` : `, the last one after ${duration(view.last_at)}`;
  const longest = slowest ? `, the slowest ${duration(slowest)}` : "";
  const lag = view.copy_lag_seconds;
  const copy = lag === undefined || lag === null ? "" : lag ? `; the copy is ${duration(lag)} behind` : "; the copy is complete";
  return `${counted(view.count, "checkpoint")}${ago}. The last one took ${duration(view.last_seconds ?? 0)}${longest}; the folder holds ${bytes(view.folder_bytes ?? 0)}${copy}.`;
}
