// The steps that run models: what is loaded, how full batches are, and how long they take.

import { h, replaceAll, s, section, setAttributes, setText } from "./dom.js";
import { numberColumns, Table } from "./table.js";
import { bytes, count, duration, percent, rate, short } from "./words.js";

const OLD = "the step does not count it, or the record is of an older version";

/** Return one row for each step that runs a model. */
export function modelRows(run) {
  const loads = run.of("ModelLoaded");
  const versions = run.started.models ?? [];
  return (run.last?.stages ?? []).flatMap((stage) => stage.inference ?? []).map((view) => {
    const own = loads.filter((event) => event.step === view.step);
    const placed = own.filter((event) => event.worker || event.device);
    const resident = new Map(placed.map((event) => [`${event.worker} ${event.device} ${event.model}`, event]));
    const version = versions.find((each) => each.step === view.step || view.step.startsWith(`${each.step}/`));
    return {
      step: view.step,
      view,
      model: [...new Set(own.map((event) => event.model).filter(Boolean))].join(", ") || version?.name || "",
      version: version ? `version ${version.version}` : "",
      places: [...new Set([...resident.values()].map((event) => event.device || event.worker).filter(Boolean))],
      copies: resident.size,
      size: view.model_bytes || Math.max(0, ...own.map((event) => event.model_bytes ?? 0)) || null,
      padding: view.padded_cost ? Math.max(0, 1 - (view.useful_cost ?? 0) / view.padded_cost) : null,
      full: view.budget_cost ? Math.min(1, (view.padded_cost ?? 0) / view.budget_cost) : null,
      computes: view.worker_seconds && view.device_busy_seconds ? Math.min(1, view.device_busy_seconds / view.worker_seconds) : null,
      meanBatch: view.batches ? view.inferences / view.batches : null,
    };
  });
}

/** Return the parts of a batch's time: [[name, seconds]], a mean over batches. */
function batchParts(view) {
  const names = [["prepare", "prepare_seconds"], ["collate", "collate_seconds"], ["transfer", "transfer_seconds"], ["compute", "compute_seconds"], ["return", "return_seconds"]];
  return names.map(([name, field]) => [name, (view[field] ?? 0) / Math.max(1, view.batches ?? 0)]).filter(([, seconds]) => seconds > 0);
}

function lineOf(view) {
  if (!view.fixed_seconds && !view.seconds_per_cost) return null;
  return `${duration(view.fixed_seconds ?? 0)} + ${duration((view.seconds_per_cost ?? 0) * 1000)} for 1,000 of cost`;
}

/** Say what the model's server refused, and which texts are cut. */
function troubleOf(view) {
  const said = [];
  if (view.retries) {
    const wait = duration((view.retry_wait_seconds ?? 0) / view.retries);
    said.push(`${count(view.retries)} of ${count(view.requests)} requests were sent again, after ${wait} on average; the server asked ${count(view.throttled ?? 0)} times to send less.`);
  }
  if (view.hedges) said.push(`${count(view.hedges)} of ${count(view.requests)} requests were sent a second time, because their answer took long.`);
  if (view.cut_texts) said.push(`${count(view.cut_texts)} of ${count(view.inferences)} texts are cut at max_new_tokens.`);
  return said.join(" ");
}

/** Say how many tokens a model read and wrote, what they cost, and which answers it did not have to give. */
function tokensOf(view) {
  const said = [];
  const [asked, written] = [view.prompt_tokens ?? 0, view.new_tokens ?? 0];
  if (asked || written) {
    const speed = view.device_busy_seconds ? `, ${rate(written / view.device_busy_seconds)}` : "";
    const known = view.cached_prompt_tokens ? `, ${count(view.cached_prompt_tokens)} of them in the server's cache` : "";
    said.push(`The model read ${count(asked)} tokens${known}, and wrote ${count(written)}${speed}.`);
    const isKnown = view.first_token_p50_ms !== undefined && view.first_token_p50_ms !== null;
    if (written) said.push(isKnown ? `The first token of an answer came after ${duration(view.first_token_p50_ms / 1000)}, for 99% within ${duration(view.first_token_p99_ms / 1000)}.` : "The time to the first token is unknown.");
  }
  if (view.cost) said.push(`They cost ${short(view.cost)}${view.inferences ? `, ${short(view.cost / view.inferences)} a row` : ""}.`);
  if (view.cached_answers) said.push(`${count(view.cached_answers)} answers came from the cache.`);
  if (view.repeated_prompts) said.push(`${count(view.repeated_prompts)} prompts had the answer of an equal one.`);
  if (view.limit_wait_seconds && view.requests) said.push(`Requests waited ${duration(view.limit_wait_seconds / view.requests)} for limits, on average.`);
  return said.join(" ");
}

/** Return the section; absent if no step runs a model. */
export function modelsSection(run) {
  const [inferences, ...others] = numberColumns(run.numbers.models, (row) => row.view);
  const table = new Table({
    label: "Models",
    kind: "of-models",
    keyOf: (row) => row.step,
    detail: () => new BatchDetail(),
    columns: [
      { key: "step", title: "Step", isText: true, value: (row) => row.step, cell: stepCell },
      { key: "resident", title: "Loaded", hint: "Copies, and where they are", isText: true, class: "nowrap", value: (row) => row.copies, text: (row) => (row.copies ? `${row.copies} on ${row.places.join(", ") || "workers"}` : "–"), why_: "the reports of loads do not say where" },
      { key: "size", title: "Size", value: (row) => row.size, text: (row) => bytes(row.size), why_: OLD },
      { key: "loads", title: "Loads", hint: "How often a model was loaded, and the time for one", value: (row) => row.view.loads || null, text: (row) => (row.view.loads ? `${row.view.loads} × ${duration(row.view.load_seconds / row.view.loads)}` : "–"), why_: OLD },
      inferences,
      { key: "batch", title: "Batch", hint: "Examples in a batch, on average", value: (row) => row.meanBatch, text: (row) => (row.meanBatch ? row.meanBatch.toFixed(row.meanBatch < 10 ? 1 : 0) : "–"), why_: "no batch yet" },
      { key: "full", title: "Full", hint: "Padded cost of batches, as a share of the most allowed", value: (row) => row.full, text: (row) => percent(row.full), why_: OLD },
      { key: "padding", title: "Padding", value: (row) => row.padding, text: (row) => percent(row.padding), why_: OLD },
      { key: "computes", title: "Computes", hint: "Share of the workers' time in which the model computes, or has requests in flight if it is on a server", value: (row) => row.computes, text: (row) => percent(row.computes), why_: OLD },
      { key: "tokens", title: "Tokens", hint: "Tokens that the model read and wrote", value: (row) => (row.view.prompt_tokens ?? 0) + (row.view.new_tokens ?? 0) || null, text: (row) => (row.view.prompt_tokens || row.view.new_tokens ? `${short(row.view.prompt_tokens ?? 0)} in, ${short(row.view.new_tokens ?? 0)} out` : "–"), why_: "the model writes no text, or its server does not say" },
      ...others,
      { key: "retries", title: "Retries", hint: "Requests that were sent again to the model's server", value: (row) => (row.view.requests ? row.view.retries ?? 0 : null), text: (row) => (row.view.requests ? count(row.view.retries ?? 0) : "–"), why_: "the model is not on a server" },
    ],
  });
  const element = section("models", "Models", table.element);
  return {
    element,
    update: (run) => {
      const rows = modelRows(run);
      element.hidden = !rows.length;
      table.update(rows);
    },
  };
}

function stepCell(row, cell, table) {
  if (!cell.firstChild) {
    const name = h("span", {}, row.step, h("small"));
    cell.append(h("button", { type: "button", class: "open", on: { click: () => table.toggleDetail(row.step) } }, h("span", { class: "chevron", "aria-hidden": "true" }), name));
  }
  setText(cell.querySelector("small"), [row.model, row.version].filter(Boolean).join(", "));
  setAttributes(cell.firstChild, { "aria-expanded": String(table.isOpen(row.step)) });
}

/** The parts of a batch's time as a bar, and the line that fits the times of batches. */
class BatchDetail {
  constructor() {
    this.bar = s("svg", { class: "parts", viewBox: "0 0 1000 18", preserveAspectRatio: "none", "aria-hidden": "true" });
    this.words = h("ul", { class: "legend" });
    this.line = h("p", { class: "muted" });
    this.element = h("div", {}, h("p", { class: "muted" }, "The time of a batch, on average"), this.bar, this.words, this.line);
  }

  update(row) {
    const parts = batchParts(row.view);
    const total = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
    let from = 0;
    const bars = parts.map(([, seconds], index) => {
      const width = (1000 * seconds) / total;
      from += width;
      return s("rect", { class: `part part${index % 6}`, x: from - width, y: 0, width, height: 18 });
    });
    replaceAll(this.bar, ...bars);
    replaceAll(this.words, ...parts.map(([name, seconds], index) => h("li", { class: "key" }, s("svg", { width: 11, height: 11, "aria-hidden": "true" }, s("rect", { class: `part part${index % 6}`, width: 11, height: 11, rx: 2 })), `${name} ${duration(seconds)} (${percent(seconds / total)})`)));
    const line = lineOf(row.view);
    const waits = row.view.inferences && row.view.queue_wait_seconds ? `An example waits ${duration(row.view.queue_wait_seconds / row.view.inferences)} for its batch. ` : "";
    setText(this.line, `${waits}${line ? `A batch takes ${line}. ` : ""}${[tokensOf(row.view), troubleOf(row.view)].filter(Boolean).join(" ")}`);
    this.bar.toggleAttribute("hidden", !parts.length);
  }
}
