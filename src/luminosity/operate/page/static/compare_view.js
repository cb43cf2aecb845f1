// Two runs side by side, what differs most first.

import { changesAddress, load, runAddress, runsAddress } from "./api.js";
import { metricKey } from "./counters.js";
import { h, named, replaceAll, s, section, setAttributes } from "./dom.js";
import { modelRows } from "./models.js";
import { elementsOf, RunState } from "./run_state.js";
import { go, setTitle, showProblem } from "./shell.js";
import { pill } from "./status.js";
import { bytes, count, counted, duration, moment, money, percent, rate, shortened } from "./words.js";

const MOST_CHOICES = 1000; // the newest runs
const LEAST_ELEMENTS = 10; // of a step: the time for one of fewer says little
const ALIKE = 0.02; // a ratio within 2% is no difference
const BAR_WIDTH = 150;
const BAR_MOST = 1.6; // doublings at which a bar is full

/** Show two runs, or a choice of runs. Returns a function that ends it. */
export function compareView(view, a, b) {
  let isStopped = false;
  setTitle("Compare");
  view.append(h("p", { class: "muted loading", role: "status" }, "Loading the runs …"));
  (async () => {
    const { runs } = await load(runsAddress({ limit: MOST_CHOICES }));
    const loaded = await Promise.all([a, b].map(async (id) => (id ? new RunState(await load(runAddress(id))) : null)));
    const changes = loaded.every(Boolean) ? await load(changesAddress(a, b)) : null;
    if (isStopped) return;
    const swap = h("button", { type: "button", class: "quiet", on: { click: () => go(`/compare?${new URLSearchParams({ a: b, b: a })}`) } }, "Swap A and B");
    replaceAll(view, h("div", { class: "title" }, h("h1", {}, "Compare two runs"), loaded.every(Boolean) && swap), sides(runs, [a, b], loaded));
    if (loaded.every(Boolean)) view.append(...comparison(...loaded, changes));
    else view.append(h("p", { class: "empty" }, runs.length < 2 ? "There are fewer than two runs to compare." : "Choose two runs. Runs of the same pipeline have the most in common."));
  })().catch((error) => !isStopped && showProblem(view, "These runs can't be compared", error.message));
  return () => {
    isStopped = true;
  };
}

/** Two cards: a choice of runs, and what is known of the chosen one. */
function sides(runs, ids, loaded) {
  const selects = ["a", "b"].map((name, index) => h("select", { "aria-label": `Run ${name.toUpperCase()}`, on: { change: choose } }, h("option", { value: "" }, "choose a run"), runs.map((run) => option(run, ids[index]))));
  function choose() {
    const asked = new URLSearchParams();
    selects.forEach((select, index) => select.value && asked.set("ab"[index], select.value));
    go(`/compare?${asked}`);
  }
  return h("div", { class: "sides" }, loaded.map((run, index) => {
    const name = "ab"[index];
    const about = run && [h("p", {}, pill(run.state), h("a", { href: `/runs/${encodeURIComponent(run.id)}` }, `open ${run.title}`), h("span", { class: "muted" }, run.id)), run.ended?.failure ? h("p", { class: "failure" }, run.ended.failure) : null];
    return h("div", { class: `side ${name}` }, h("div", { class: "side-head" }, h("span", { class: "side-name" }, name.toUpperCase()), selects[index]), about);
  }));
}

const option = (run, chosen) => h("option", { value: run.id, selected: run.id === chosen }, `${run.name}${run.folder ? ` in ${run.folder}` : ""} · ${moment(run.started_at)} · ${run.state} · ${run.id.slice(-6)}`);

function verdict(one, two) {
  const unfinished = [["A", one], ["B", two]].filter(([, run]) => !["done", "drained"].includes(run.state));
  if (unfinished.length) return `${unfinished.map(([name, run]) => soFar(name, run)).join(" ")} Their times can't be compared.`;
  const [first, second] = [one, two].map(speedOf);
  if (first === null || second === null) return "";
  const [a, b] = [one, two].map((run) => elementsOf(run).done);
  const ratio = second / first;
  const isAlike = Math.abs(ratio - 1) <= ALIKE;
  const pace = isAlike ? "Both process elements at the same rate, within 2%." : `B processed ${rate(second)}, A ${rate(first)}: B is ${times(ratio > 1 ? ratio : 1 / ratio)} ${ratio > 1 ? "faster" : "slower"}.`;
  if (Math.abs(b / a - 1) <= ALIKE) return `${pace} B took ${duration(two.seconds)}, A ${duration(one.seconds)}.`;
  return `${pace} Their inputs differ: B had ${count(b)} elements, A ${count(a)}, so their times and costs can't be compared.`;
}

/** Elements in a second, over the whole run; null if they are not known. */
function speedOf(run) {
  const { done } = elementsOf(run);
  return done && run.seconds ? done / run.seconds : null;
}

function soFar(name, run) {
  if (run.isLive) return `${name} still runs; this is what was known after ${duration(run.seconds)}.`;
  return `${name} did not finish (${run.state} after ${duration(run.seconds)}).`;
}

function comparison(one, two, changes) {
  const steps = section("compare-steps", hasSteps(one) && hasSteps(two) ? "Steps and stages" : "Stages");
  const measures = [
    ...(hasSteps(one) && hasSteps(two) ? [["Time of steps", "step_seconds", duration], ["Time for an element", "each", duration]] : []),
    ["Time", "busy_seconds", duration], ["CPU", "cpu_seconds", duration], ["Memory", "peak_resident", bytes], ["Elements", "elements", count], ["Failed attempts", "retries", count],
  ];
  const holder = h("div");
  const chips = measures.map(([title, field, format]) => h("button", { type: "button", class: "chip", on: { click: () => show(title, field, format) } }, title));
  function show(title, field, format) {
    chips.forEach((chip, index) => setAttributes(chip, { "aria-pressed": String(measures[index][0] === title) }));
    replaceAll(holder, differences(["step_seconds", "each"].includes(field) ? ownStepRows(one, two, field) : stepRows(one, two, field), format, ["elements"].includes(field) ? null : "less", title.includes("steps") || field === "each" ? title : `${title} of stages`));
  }
  steps.append(h("div", { class: "chips", role: "group", "aria-label": "What to compare" }, chips), holder);
  show(...measures[0]);
  const parts = [h("p", { class: "pace" }, verdict(one, two)), section("compare-run", "The whole run", table(wholeRows(one, two), "The whole run")), changesSection(changes), steps];
  const models = modelDifferences(one, two);
  if (models.length) parts.push(section("compare-models", "Models", differences(models, null, null, "Models")));
  const counters = counterRows(one, two);
  if (counters.length) parts.push(section("compare-counters", "Counters", differences(counters, count, null, "Counters")));
  return parts;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const times = (ratio) => `${ratio >= 10 ? Math.round(ratio) : Number(ratio.toPrecision(2))}×`;

function wholeRows(one, two) {
  const done = (run) => elementsOf(run).done;
  const isSame = done(one) && done(two) && Math.abs(done(two) / done(one) - 1) <= ALIKE;
  const ofWhole = isSame ? "less" : null; // a smaller input takes less: that is neither better nor worse
  const sum = (run, field) => (run.last?.stages ?? []).reduce((total, stage) => total + (stage[field] ?? 0), 0) || null;
  const both = (name, value, format, better = "less") => ({ name, a: value(one), b: value(two), format, better });
  const currency = one.cost?.currency ?? two.cost?.currency;
  return [
    both("Rate", speedOf, rate, "more"),
    both("Cost of a million elements", (run) => (done(run) && isNumber(run.cost?.total) ? (run.cost.total / done(run)) * 1e6 : null), (value) => money(value, currency)),
    both("Elements", done, count, null),
    ...([one, two].some((run) => elementsOf(run).total !== done(run)) ? [both("Elements in all, about", (run) => elementsOf(run).total, count, null)] : []),
    both("Time", (run) => run.seconds || null, duration, ofWhole),
    both("Cost", (run) => run.cost?.total ?? null, (value) => money(value, currency), ofWhole),
    both("Time of workers", (run) => sum(run, "busy_seconds"), duration, ofWhole),
    both("CPU", (run) => sum(run, "cpu_seconds"), duration, ofWhole),
    both("Peak memory, all processes", (run) => run.last?.processes?.peak || null, bytes),
    both("Peak memory between steps", (run) => run.last?.memory?.peak || null, bytes),
    both("Failed attempts", (run) => sum(run, "retries") ?? run.of("BundleRetried").length, count),
    both("Workers lost", (run) => run.of("WorkerLost").length, count),
    both("Warnings and errors", (run) => run.of("LogMessage").reduce((total, each) => total + (each.left_out || (each.count ?? 1)), 0), count),
  ].filter((row) => row.a !== null || row.b !== null).filter((row) => row.a || row.b);
}

function stepRows(one, two, field) {
  const labels = [...new Set([...(one.started.stages ?? []), ...(two.started.stages ?? [])].map((stage) => stage.label))];
  const isKnown = (run) => (run.last?.stages ?? []).some((stage) => stage[field]) || field === "retries"; // older records lack some
  const [knowsOne, knowsTwo] = [one, two].map(isKnown);
  const value = (run, label) => {
    if (!(run === one ? knowsOne : knowsTwo)) return null;
    const info = (run.started.stages ?? []).find((stage) => stage.label === label);
    return info ? run.views().get(info.id)?.[field] ?? 0 : null;
  };
  return labels.map((name) => ({ name, a: value(one, name), b: value(two, name) })).filter((row) => row.a || row.b);
}

const hasSteps = (run) => (run.last?.stages ?? []).some((stage) => stage.step_seconds);

/** Return the time of each step by its whole name, or its time for an element that it has put out. */
function ownStepRows(one, two, field) {
  const [first, second] = [one, two].map((run) => {
    const found = new Map();
    for (const info of run.started.stages ?? []) {
      const view = run.views().get(info.id);
      (info.steps ?? []).forEach((step, index) => {
        const [seconds, elements] = [view?.step_seconds?.[index] ?? 0, view?.step_elements?.[index] ?? 0];
        found.set(step, field === "each" ? (elements >= LEAST_ELEMENTS ? seconds / elements : null) : seconds);
      });
    }
    return found;
  });
  const names = [...new Set([...first.keys(), ...second.keys()])];
  return names.map((name) => ({ name, a: first.get(name) ?? null, b: second.get(name) ?? null })).filter((row) => row.a || row.b);
}

/** Show what the manifests know: what changed in code, packages, options, inputs, models and the machine. */
function changesSection({ changes, left_out: leftOut, notes }) {
  const body = changes.map((each) => h("tr", {}, h("th", { scope: "row" }, each.what), h("td", { title: each.name }, shortened(each.name, 80)), h("td", { class: "changed" }, each.before), h("td", { class: "changed" }, each.now)));
  const head = h("tr", {}, h("th", { scope: "col" }, "What"), h("th", { scope: "col" }, "Name"), h("th", { scope: "col" }, h("span", { class: "side-name a" }, "A")), h("th", { scope: "col" }, h("span", { class: "side-name b" }, "B")));
  const nothing = notes.length ? "Nothing that is known differs." : "Code, packages, options, inputs and machine are the same.";
  const shown = changes.length
    ? h("div", { class: "wide", role: "region", "aria-label": "What changed", tabindex: 0 }, h("table", { class: "changes" }, h("caption", { class: "unseen" }, "What changed"), h("thead", {}, head), h("tbody", {}, body)))
    : h("p", {}, nothing);
  return section("compare-changes", "What changed", shown, leftOut > 0 && h("p", { class: "muted" }, `and ${counted(leftOut, "other difference")}`), notes.map((note) => h("p", { class: "muted" }, note)));
}

function modelDifferences(one, two) {
  const [first, second] = [one, two].map((run) => new Map(modelRows(run).map((row) => [row.step, row])));
  const fields = [
    ["inferences", (row) => row.view.inferences ?? null, count, null],
    ["median time of a batch", (row) => (row.view.batch_p50_ms === undefined ? null : row.view.batch_p50_ms / 1000), duration, "less"],
    ["99th percentile of a batch's time", (row) => (row.view.batch_p99_ms === undefined ? null : row.view.batch_p99_ms / 1000), duration, "less"],
    ["median time to the first token", (row) => (row.view.first_token_p50_ms === undefined || row.view.first_token_p50_ms === null ? null : row.view.first_token_p50_ms / 1000), duration, "less"],
    ["examples in a batch", (row) => row.meanBatch, (value) => value.toFixed(1), null],
    ["padding", (row) => row.padding, percent, "less"],
    ["computes", (row) => row.computes, percent, "more"],
    ["requests sent again", (row) => (row.view.requests ? row.view.retries ?? 0 : null), count, "less"],
    ["time for loads", (row) => row.view.load_seconds || null, duration, "less"],
  ];
  return [...new Set([...first.keys(), ...second.keys()])].flatMap((step) =>
    fields.map(([name, value, format, better]) => ({ name: `${step}: ${name}`, a: first.has(step) ? value(first.get(step)) : null, b: second.has(step) ? value(second.get(step)) : null, format, better })),
  ).filter((row) => row.a !== null || row.b !== null);
}

function counterRows(one, two) {
  const [first, second] = [one, two].map((run) => new Map(run.metrics.filter((view) => !view.of_library).map((view) => [metricKey(view), view])));
  return [...new Set([...first.keys(), ...second.keys()])].map((key) => {
    const view = first.get(key) ?? second.get(key);
    const value = (side) => (side.has(key) ? (view.kind === "distribution" ? side.get(key).count ?? 0 : side.get(key).value ?? 0) : null);
    return { name: `${view.step}: ${view.name}${view.kind === "distribution" ? " (count)" : ""}`, a: value(first), b: value(second) };
  });
}

/** Return how far apart two values are: in their unit, or as a ratio where rows have several units. */
function apartness({ a, b }, format) {
  if (format) return Math.abs((a ?? 0) - (b ?? 0));
  return a > 0 && b > 0 ? Math.abs(Math.log(a / b)) : Infinity;
}

/** Show rows that differ, the largest difference first; the others are folded away. */
function differences(rows, format, better, label) {
  const all = rows.map((row) => ({ format, better, ...row }));
  const isAlike = (row) => row.a !== null && row.b !== null && Math.abs(row.a - row.b) <= ALIKE * Math.max(Math.abs(row.a), Math.abs(row.b));
  const apart = all.filter((row) => !isAlike(row)).sort((x, y) => apartness(y, format) - apartness(x, format));
  const alike = all.filter(isAlike);
  return h("div", {}, apart.length > 0 && table(apart, label), alike.length > 0 && h("details", {}, h("summary", {}, `${counted(alike.length, "row")} ${alike.length === 1 ? "is" : "are"} alike, within 2%`), table(alike, `${label}, alike`)));
}

function table(rows, label) {
  const value = (row, side) => {
    const known = row[side] !== null && row[side] !== undefined;
    return h("td", { class: "number", title: known ? null : "this run does not have it, or its record does not say" }, known ? row.format(row[side]) : "–");
  };
  const body = rows.map((row) => h("tr", {}, h("th", { scope: "row", title: row.name.length > 60 ? row.name : null }, named(shortened(row.name, 60))), value(row, "a"), value(row, "b"), h("td", { class: "change" }, change(row))));
  const head = h("tr", {}, h("th", { scope: "col" }, ""), h("th", { scope: "col", class: "number" }, h("span", { class: "side-name a" }, "A")), h("th", { scope: "col", class: "number" }, h("span", { class: "side-name b" }, "B")), h("th", { scope: "col" }, "B against A"));
  return h("div", { class: "wide", role: "region", "aria-label": label, tabindex: 0 }, h("table", { class: "comparison" }, h("caption", { class: "unseen" }, label), h("thead", {}, head), h("tbody", {}, body)));
}

/** Draw the ratio of B to A: to the right if there is more, to the left if there is less; the middle is equal. */
function change(row) {
  if (row.a === null || row.b === null || row.a === undefined || row.b === undefined) return h("span", { class: "muted" }, row.a === null ? "only in B" : "only in A");
  if (row.a === row.b) return h("span", { class: "muted" }, "equal");
  if (row.a <= 0 || row.b <= 0) return h("span", {}, row.b > row.a ? "more" : "less");
  const ratio = row.b / row.a;
  const isMore = ratio > 1;
  const kind = row.better === null ? "neutral" : (row.better === "more") === isMore ? "better" : "worse";
  const middle = BAR_WIDTH / 2;
  const length = Math.max(1.5, Math.min(1, Math.abs(Math.log2(ratio)) / BAR_MOST) * (middle - 2));
  const isAlike = Math.abs(ratio - 1) <= ALIKE;
  const apart = Math.abs(ratio - 1) < 0.5 ? percent(Math.abs(ratio - 1)) : times(isMore ? ratio : 1 / ratio);
  const words = isAlike ? "alike" : `${apart} ${isMore ? "more" : "less"}`;
  const bar = s("svg", { class: "ratio", width: BAR_WIDTH, height: 14, "aria-hidden": "true" },
    s("rect", { class: "rail", x: 0, y: 6, width: BAR_WIDTH, height: 2, rx: 1 }),
    s("rect", { class: `ratio-bar ${isAlike ? "neutral" : kind}`, x: isMore ? middle : middle - length, y: 2, width: length, height: 10, rx: 2 }),
    s("rect", { class: "middle", x: middle - 0.5, y: 0, width: 1, height: 14 }));
  return h("span", { class: `ratio-words ${isAlike ? "neutral" : kind}` }, bar, h("span", {}, words));
}
