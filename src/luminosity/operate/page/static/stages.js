// The table of stages, each of which runs fused steps, with what it needs, and more of a stage in the row below it.

import { bottleneck } from "./bottleneck.js";
import { h, named, replaceAll, section, setAttributes, setText } from "./dom.js";
import { isStepOf } from "./run_state.js";
import { glyph, stalledOf } from "./status.js";
import { stageState } from "./step_figures.js";
import { numberColumns, Table } from "./table.js";
import { bytes, count, counted, duration, percent, rate } from "./words.js";

/** Return the share of a stage's model work that was padding, or null. */
export function paddingOf(view) {
  const costs = (view?.inference ?? []).reduce((sum, each) => [sum[0] + (each.useful_cost ?? 0), sum[1] + (each.padded_cost ?? 0)], [0, 0]);
  return costs[1] ? Math.max(0, 1 - costs[0] / costs[1]) : null;
}

/** Return how often a stage's bundles failed, as its view or the run's events say. */
function failuresOf(retried, info, view) {
  if (view?.retries) return view.retries;
  return retried.filter((event) => isStepOf(event.step, info)).length;
}

/** Return the section. `show(stageId)` opens the row of a stage. */
export function stagesSection(run) {
  const [elements, ...others] = numberColumns(run.numbers.stages, (row) => row.view);
  const table = new Table({
    label: "Stages",
    kind: "of-stages",
    keyOf: (row) => row.info.id,
    columns: [
      { key: "label", title: "Stage", isText: true, value: (row) => row.info.label, cell: nameCell },
      { key: "status", title: "Status", isText: true, class: "status", value: (row) => row.words, cell: statusCell },
      elements,
      { key: "rate", title: "Rate", hint: "Elements per second: recently, or over the whole run if it has ended", value: (row) => row.rate, text: (row) => (row.rate || stalledOf(row.view) ? rate(row.rate) : "–"), why_: "no elements recently" },
      ...others,
      { key: "padding", title: "Padding", hint: "Share of a model's work that was padding", value: (row) => row.padding, text: (row) => percent(row.padding), why_: "the step runs no model that counts its padding" },
      { key: "failures", title: "Failures", hint: "Failed attempts of bundles", value: (row) => row.failures, text: (row) => count(row.failures) },
    ],
    isPinned: (row) => row.isCulprit || row.kind === "failed" || row.kind === "stalled",
    detail: (row) => new Detail(row),
    onRow: (element, row) => setAttributes(element, { class: row.isCulprit ? "culprit" : null, "data-stage": row.info.id }),
  });
  const element = section("stages", "Stages", table.element);

  function update(now) {
    run = now;
    const views = run.views();
    const found = bottleneck(run);
    const retried = run.of("BundleRetried");
    const rows = (run.started.stages ?? []).map((info) => {
      const view = views.get(info.id) ?? { status: "waiting" };
      const mean = run.seconds ? (view.elements ?? 0) / run.seconds : null;
      return {
        info, view, ...stageState(run, info, view, found),
        rate: run.isLive ? view.rate ?? 0 : mean,
        padding: paddingOf(view),
        failures: failuresOf(retried, info, view),
      };
    });
    element.hidden = !rows.length;
    table.update(rows);
  }

  function show(stage) {
    if (!table.isOpen(stage)) table.toggleDetail(stage);
    const row = [...table.body.children].find((each) => each.dataset.stage === stage);
    row?.scrollIntoView({ block: "center" });
    row?.querySelector("button")?.focus({ preventScroll: true });
  }

  return { element, update, show };
}

function nameCell(row, cell, table) {
  if (!cell.firstChild) {
    cell.append(h("button", { type: "button", class: "open", on: { click: () => table.toggleDetail(row.info.id) } }, h("span", { class: "chevron", "aria-hidden": "true" }), named(row.info.label)));
  }
  setAttributes(cell.firstChild, { "aria-expanded": String(table.isOpen(row.info.id)) });
}

function statusCell(row, cell) {
  const said = `${row.kind} ${row.words}`;
  if (cell.dataset.said === said) return;
  cell.dataset.said = said;
  replaceAll(cell, h("span", { class: `state ${row.kind}` }, glyph(row.kind), h("span", {}, row.words)));
}

/** What is known of a stage beyond its row. */
class Detail {
  #values = new Map();

  constructor(row) {
    this.list = h("dl", { class: "details" });
    const steps = row.info.steps ?? [];
    this.times = steps.map(() => h("span", { class: "muted" }));
    this.element = h("div", {}, this.list, steps.length > 0 && h("p", { class: "muted" }, "Steps of the pipeline in it, in order:"), steps.length > 0 && h("ol", { class: "step-names" }, steps.map((step, index) => h("li", {}, step, this.times[index]))));
  }

  update(row) {
    const { info, view } = row;
    this.times.forEach((place, index) => setText(place, view.step_seconds?.[index] ? ` ${duration(view.step_seconds[index])}` : ""));
    const asked = info.asked ?? {};
    const asks = [asked.ram && `${bytes(asked.ram)} RAM`, asked.cores && `${asked.cores} cores`, asked.accelerator].filter(Boolean).join(", ");
    const facts = [
      ["Pool", info.pool],
      ["Resource hints", asks || "none"],
      ["Bundles", count(view.bundles ?? 0)],
      ["Running now", `${counted(view.running ?? 0, "bundle")} on ${counted(view.workers ?? 0, "worker")}`],
      ["In its queue", `${count(view.queued ?? 0)} elements, ${bytes(view.queued_bytes ?? 0)}`],
      ["Output", view.output_bytes ? `about ${bytes(view.output_bytes)}` : "–"],
      ["CPU in its time", view.cpu_seconds && view.busy_seconds ? `${(view.cpu_seconds / view.busy_seconds).toFixed(2)} cores` : "–"],
      ["Time for an element", view.busy_seconds && view.elements ? duration(view.busy_seconds / view.elements) : "–"],
    ];
    for (const [term, value] of facts) {
      if (!this.#values.has(term)) {
        const place = h("dd");
        this.#values.set(term, place);
        this.list.append(h("div", {}, h("dt", {}, term), place));
      }
      setText(this.#values.get(term), value);
    }
  }
}
