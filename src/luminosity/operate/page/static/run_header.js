// The head of a run's page: state, name, time, progress, cost, and the sentence about what holds it back.

import { bottleneck } from "./bottleneck.js";
import { h, replaceAll, s, setAttributes, setText, unknown } from "./dom.js";
import { elementsOf } from "./run_state.js";
import { pill, runWhy, stalledOf } from "./status.js";
import { bytes, count, counted, duration, moment, money, percent, rate, shortened } from "./words.js";

/** Facts: a term with a value and a small line below it. */
class Facts {
  #known = new Map();

  constructor() {
    this.element = h("dl", { class: "facts" });
  }

  /** Show [[term, value, note, why]]; an empty value is not known, because of `why`. */
  update(facts) {
    const known = facts.map(([term]) => term);
    for (const [place, [term, value, note = "", why = "not known"]] of facts.entries()) {
      if (!this.#known.has(term)) {
        const parts = { value: h("span"), note: h("small"), said: null };
        parts.element = h("div", { class: "fact" }, h("dt", {}, term), h("dd", {}, parts.value, parts.note));
        this.#known.set(term, parts);
      }
      const parts = this.#known.get(term);
      if (this.element.children[place] !== parts.element) this.element.insertBefore(parts.element, this.element.children[place] ?? null);
      if (parts.said !== `${value}`) replaceAll(parts.value, value === null ? unknown(why) : value);
      parts.said = `${value}`;
      setText(parts.note, note);
    }
    for (const [term, parts] of this.#known) {
      if (known.includes(term)) continue;
      parts.element.remove();
      this.#known.delete(term);
    }
  }
}

export class RunHeader {
  share = null; // of the work that is done, if known

  /** `actions` has what the reader may do to the run. */
  constructor(actions) {
    this.state = h("span");
    this.name = h("h1");
    this.about = h("p", { class: "muted about" });
    this.bar = s("rect", { class: "fill", height: 6, width: 0, rx: 3 });
    this.progress = h("div", { class: "progress", role: "progressbar", "aria-label": "Share of the work that is done", "aria-valuemin": 0, "aria-valuemax": 100 },
      s("svg", { viewBox: "0 0 1000 6", preserveAspectRatio: "none", "aria-hidden": "true" }, s("rect", { class: "track", width: 1000, height: 6, rx: 3 }), this.bar));
    this.facts = new Facts();
    this.pace = h("p", { class: "pace" });
    this.failure = h("p", { class: "failed-line", role: "alert" });
    this.failure.hidden = true;
    this.element = h("header", { class: "run-head" }, h("div", { class: "title" }, this.name, this.state, actions.element), this.about, actions.news, this.failure, this.pace, this.progress, this.facts.element);
  }

  update(run) {
    if (this.shownState !== run.state) replaceAll(this.state, pill(run.state));
    this.shownState = run.state;
    setText(this.name, run.title);
    setText(this.about, aboutOf(run));
    const failure = run.ended?.failure || (run.state === "lost" ? runWhy(run.state) : "");
    setText(this.failure, failure);
    this.failure.hidden = !failure;
    // A failed run begins with its failure: the pace comes below.
    this.pace.classList.toggle("muted", Boolean(run.ended?.failure));
    const { parts } = bottleneck(run);
    const said = parts.map((part) => part.strong ?? part).join("");
    if (this.saidPace !== said) replaceAll(this.pace, ...parts.map((part) => (part.strong ? h("strong", {}, part.strong) : part)));
    this.saidPace = said;
    this.pace.hidden = !parts.length;
    const share = shareDone(run);
    this.share = share;
    this.progress.hidden = share === null || !run.isLive;
    if (share !== null) {
      setAttributes(this.bar, { width: Math.round(1000 * share) });
      setAttributes(this.progress, { "aria-valuenow": Math.floor(100 * share) });
    }
    this.facts.update([...factsOf(run, share)]);
  }
}

function aboutOf(run) {
  const machine = run.started.machine ?? {};
  const devices = machine.devices ?? [];
  const nodes = machine.nodes ?? [];
  const waiting = run.isLive ? (run.last?.pools ?? []).filter((pool) => pool.waiting) : [];
  const names = [...new Set(devices.map((device) => device.name || device.id))].join(", ");
  return [
    `Started ${moment(run.started.started_at)}`,
    run.id,
    run.started.job && `script ${run.started.name}`,
    run.started.folder && `in ${run.started.folder}`,
    machine.cores && `${counted(machine.cores, "core")}, ${bytes(machine.ram)} RAM${devices.length ? `, ${devices.length} × ${names}` : ""}`,
    nodes.length && counted(nodes.length, "node"),
    ...waiting.map((pool) => `pool ${pool.name}: ${counted(pool.waiting, "worker")} without a place (${pool.waits_for} each)`),
    run.started.pools_mode && `--pools=${run.started.pools_mode}`,
    run.started.checkpoint_dir && `checkpoint in ${run.started.checkpoint_dir}`,
  ].filter(Boolean).join(" · ");
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Return the share of the work that is done: that of the stage that has most before it. */
function shareDone(run) {
  if (run.isStream && run.isLive) return null; // it has no end that is known
  if (run.state === "done") return 1;
  const open = (run.last?.stages ?? []).filter((stage) => stage.status !== "done");
  const known = open.map((stage) => stage.fraction).filter((each) => each !== undefined && each !== null); // what is done already says nothing of the rest
  const left = run.last?.seconds_left;
  if (left !== undefined && left !== null && run.seconds) return Math.min(0.99, run.seconds / (run.seconds + left));
  return known.length ? Math.min(...known) : null;
}

function* factsOf(run, share) {
  const last = run.last;
  yield ["Time", duration(run.now), run.ended ? `until ${moment(run.started.started_at + run.seconds)}` : ""];
  if (run.isLive && !run.isStream) {
    yield ["Time left", last?.seconds_left ? `about ${duration(last.seconds_left)}` : null, share === null ? "" : `${percent(share)} done`, (last?.stages ?? []).some(stalledOf) ? "a stage is stalled" : "it is known for sources that know their size, and for stages that they feed"];
  }
  const stages = last?.stages ?? [];
  const largest = stages.reduce((best, stage) => ((stage.elements ?? 0) > (best?.elements ?? 0) ? stage : best), null);
  const label = (run.started.stages ?? []).find((stage) => stage.id === largest?.id)?.label ?? "";
  const speed = run.isLive ? largest?.rate : largest && run.seconds ? largest.elements / run.seconds : null;
  const { done, total } = elementsOf(run);
  const isWhole = total !== null && total === done;
  const note = isWhole || run.isStream ? `in ${shortened(label, 32)}` : total === null ? "so far; how many there are is not known" : `of about ${count(total)}`;
  yield ["Elements", done === null ? null : count(done), done === null ? "" : `${speed ? `${rate(speed)} ` : ""}${note}`, "no stage has committed anything yet"];
  const bill = run.cost;
  const isPriced = isNumber(bill?.total);
  const range = isPriced && isNumber(bill.low) && isNumber(bill.high) && bill.low !== bill.high ? `${money(bill.low, "")}to ${money(bill.high, bill.currency)}` : "";
  const why = bill?.notes?.join(" ") || "the bill can't be computed: the record does not say what the workers had";
  yield [run.isLive ? "Cost so far" : "Cost", isPriced ? money(bill.total, bill.currency) : null, range, why];
  const processes = last?.processes ?? {};
  yield ["Memory", processes.peak ? bytes(processes.peak) : null, processes.peak ? "at most, in all processes" : "", "the system does not report it"];
  const retries = stages.reduce((sum, stage) => sum + (stage.retries ?? 0), 0) || run.of("BundleRetried").length;
  const logs = run.of("LogMessage").reduce((sum, each) => sum + (each.left_out || (each.count ?? 1)), 0);
  const lost = run.of("WorkerLost").length;
  const notes = [lost && `${counted(lost, "worker")} lost`, logs && counted(logs, "warning")].filter(Boolean).join(", ");
  yield ["Failed attempts", count(retries), notes];
}
