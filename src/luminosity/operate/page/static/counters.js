// The counters, distributions and gauges that the pipeline's own code keeps.

import { h, section, setText } from "./dom.js";
import { Table } from "./table.js";
import { count, counted } from "./words.js";

const mean = (view) => (view.count ? (view.value ?? 0) / view.count : null);
const figure = (value) => (value === null ? "–" : Number.isInteger(value) ? count(value, true) : Number(value.toPrecision(4)).toLocaleString("en"));

/** Return a key that tells metrics apart. */
export const metricKey = (view) => JSON.stringify([view.kind, view.step, view.namespace, view.name]);

/** Return the section: your own metrics, and on request those of libraries. */
export function countersSection() {
  let run = null;
  const box = h("input", { type: "checkbox", on: { change: () => update(run) } });
  const more = h("label", { class: "quiet check" }, box, "also those of Beam and Luminosity");
  const distributionOnly = (text) => (view) => (view.kind === "distribution" ? text(view) : "");
  const table = new Table({
    label: "Counters and distributions",
    keyOf: metricKey,
    columns: [
      { key: "name", title: "Name", isText: true, value: (view) => view.name, cell: nameCell },
      { key: "step", title: "Step", isText: true, value: (view) => view.step, text: (view) => view.step },
      { key: "kind", title: "Kind", isText: true, value: (view) => view.kind, text: (view) => view.kind },
      { key: "value", title: "Value or sum", value: (view) => view.value ?? 0, text: (view) => count(view.value ?? 0, true) },
      { key: "count", title: "Count", value: (view) => (view.kind === "distribution" ? view.count ?? 0 : null), text: distributionOnly((view) => count(view.count ?? 0, true)) },
      { key: "min", title: "Least", value: (view) => (view.kind === "distribution" ? view.min ?? 0 : null), text: distributionOnly((view) => figure(view.min ?? 0)) },
      { key: "mean", title: "Mean", value: mean, text: distributionOnly((view) => figure(mean(view))) },
      { key: "max", title: "Most", value: (view) => (view.kind === "distribution" ? view.max ?? 0 : null), text: distributionOnly((view) => figure(view.max ?? 0)) },
    ],
  });
  const note = h("p", { class: "muted" });
  const element = section("counters", "Your counters", more, table.element, note);

  function update(now) {
    run = now;
    const own = run.metrics.filter((view) => !view.of_library);
    const hasLibrary = own.length < run.metrics.length;
    const shown = box.checked ? run.metrics : own;
    element.hidden = !run.metrics.length;
    more.hidden = !hasLibrary;
    table.element.hidden = !shown.length;
    table.update(shown);
    const hidden = run.ended?.metrics_left_out ?? 0;
    setText(note, hidden ? `${counted(hidden, "more metric")} did not fit into the record.` : shown.length ? "" : "The pipeline's own code counts nothing.");
    note.hidden = !note.textContent;
  }
  return { element, update };
}

function nameCell(view, cell) {
  if (!cell.firstChild) cell.append(h("strong", {}, view.name), h("small", {}, view.namespace));
}
