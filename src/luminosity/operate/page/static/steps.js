// The table of the author's steps, with composites folded or open: where the time of workers goes.

import { bottleneck } from "./bottleneck.js";
import { h, named, replaceAll, s, section, setAttributes, setText } from "./dom.js";
import { glyph } from "./status.js";
import { StepFigures } from "./step_figures.js";
import { Table } from "./table.js";
import { count, duration, percent, shortened } from "./words.js";

const OLD = "this run's record does not have it, or the step took less than a millisecond";

/** Return the section, absent for records that have no steps. `onStage(stageId)` is called for a stage that is chosen. */
export function stepsSection(run, { steps, onStage }) {
  const labels = new Map((run.started.stages ?? []).map((stage) => [stage.id, stage.label]));
  let now = run;
  const table = new Table({
    label: "Steps",
    kind: "of-steps",
    keyOf: (row) => row.id,
    columns: [
      { key: "label", title: "Step", isText: true, value: (row) => row.name, cell: nameCell(steps) },
      { key: "status", title: "Status", isText: true, class: "status", value: (row) => row.state.words, cell: statusCell },
      { key: "elements", title: "Elements", hint: "Elements that the step has put out; of a composite, those of the part with the most", value: (row) => row.elements, text: (row) => count(row.elements), why_: "the step puts nothing out, or the record does not say" },
      { key: "seconds", title: "Time", hint: "Time of workers in the step. Beam takes samples, so that very short steps are too low", value: (row) => row.seconds, text: (row) => (row.seconds ? duration(row.seconds) : "–"), why_: OLD },
      { key: "share", title: "Share", hint: "Part of the time of all steps", value: (row) => row.share, cell: shareCell },
      { key: "each", title: "For an element", hint: "Time for an element that the step has put out", value: (row) => row.each, text: (row) => (row.each ? duration(row.each) : "–"), why_: OLD },
      { key: "stages", title: "Runs in stage", isText: true, class: "in-stages", value: (row) => row.stages.join(), cell: stagesCell },
    ],
    isPinned: (row) => row.state.isCulprit || row.state.kind === "failed" || row.state.kind === "stalled",
    onRow: (element, row) => setAttributes(element, { class: row.state.isCulprit ? "culprit" : null, "data-step": row.name }),
  });
  const element = section("steps", "Steps", table.element);

  function stagesCell(row, cell) {
    const said = row.stages.join();
    if (cell.dataset.said === said) return;
    cell.dataset.said = said;
    const links = row.stages.slice(0, 2).map((stage) => h("button", { type: "button", class: "link-like", title: labels.get(stage), on: { click: () => onStage(stage) } }, shortened(labels.get(stage) ?? stage, 28)));
    replaceAll(cell, ...links.map((link) => h("div", {}, link)), row.stages.length > 2 && h("small", {}, `and ${row.stages.length - 2} more`), !row.stages.length && h("span", { class: "muted" }, "between stages"));
  }

  function update(newest) {
    now = newest;
    const figures = new StepFigures(now, steps, bottleneck(now));
    const rows = steps.shown().map(({ id, depth }) => {
      const found = figures.of(id);
      return { id, depth, ...steps.transforms[id], ...found, share: found.seconds === null ? null : figures.shareOf(id), each: found.seconds && found.elements ? found.seconds / found.elements : null };
    });
    element.hidden = !rows.length;
    table.update(rows);
  }

  async function show(id) {
    await steps.reveal(id);
    table.reveal(id);
    const row = [...table.body.children].find((each) => each.dataset.step === steps.transforms[id].name);
    row?.scrollIntoView({ block: "center" });
    row?.querySelector("button, .plain-name")?.focus({ preventScroll: true });
  }

  steps.onChange(() => update(now));
  return { element, update, show };
}

function nameCell(steps) {
  return (row, cell) => {
    if (!cell.firstChild) {
      const name = h("span", { title: row.name }, named(row.label));
      const button = steps.canOpen(row.id)
        ? h("button", { type: "button", class: "open", on: { click: () => steps.toggle(row.id) } }, h("span", { class: "chevron", "aria-hidden": "true" }), name)
        : h("span", { class: "plain-name", tabindex: -1 }, name);
      cell.append(button);
    }
    setAttributes(cell.firstChild, { "aria-expanded": steps.canOpen(row.id) ? String(steps.isOpen(row.id)) : null, class: `${steps.canOpen(row.id) ? "open" : "plain-name"} depth${Math.min(row.depth, 6)}` });
  };
}

function statusCell(row, cell) {
  const said = `${row.state.kind} ${row.state.words}`;
  if (cell.dataset.said === said) return;
  cell.dataset.said = said;
  replaceAll(cell, h("span", { class: `state ${row.state.kind}` }, glyph(row.state.kind), h("span", {}, row.state.words)));
}

/** The share as a number and a bar. */
function shareCell(row, cell) {
  if (!cell.firstChild) {
    cell.append(h("span"), s("svg", { class: "share", viewBox: "0 0 60 6", width: 60, height: 6, "aria-hidden": "true" }, s("rect", { class: "rail", width: 60, height: 6, rx: 3 }), s("rect", { class: "filled", height: 6, rx: 3 })));
  }
  setText(cell.firstChild, row.share === null ? "–" : percent(row.share));
  setAttributes(cell, { title: row.share === null ? OLD : null });
  setAttributes(cell.querySelector(".filled"), { width: (60 * (row.share ?? 0)).toFixed(1) });
}
