// What the page knows of one run: its plan, its newest snapshot, bounded histories, and what happened.

const MOST_POINTS = 2000; // beyond it every other point goes: a run of days stays small
const MOST_HAPPENINGS = 2000;
const ID_CHARACTERS = 8; // of a node's id, as everywhere
const EXACT_AFTER_S = 5; // from here on the mean between two points is better than the rate of the moment

/** A moment of the charts: numbers only, in the order of the plan's stages, pools and devices. */
function pointOf(snapshot, plan) {
  const stages = byId(snapshot.stages);
  const pools = byId(snapshot.pools, "name");
  const devices = byId(snapshot.devices);
  const row = (ids, views, value) => ids.map((id) => (views.has(id) ? value(views.get(id)) : null));
  return {
    t: snapshot.seconds,
    elements: row(plan.stageIds, stages, (v) => v.elements ?? 0),
    rate: row(plan.stageIds, stages, (v) => v.rate ?? 0),
    queued: row(plan.stageIds, stages, (v) => v.queued ?? 0),
    lag: row(plan.stageIds, stages, (v) => (v.stream?.has_ended ? null : v.stream?.behind_seconds ?? null)),
    backlog: row(plan.stageIds, stages, (v) => v.stream?.backlog ?? null),
    latency: row(plan.stageIds, stages, (v) => v.kafka?.find((k) => k.kind === "read")?.p50_ms ?? null),
    busy: row(plan.poolNames, pools, (v) => v.busy ?? 0),
    workers: row(plan.poolNames, pools, (v) => v.workers ?? 0),
    slots: row(plan.poolNames, pools, (v) => v.slots ?? null),
    wanted: row(plan.poolNames, pools, (v) => v.wanted || null),
    device: row(plan.deviceIds, devices, (v) => v.utilization ?? null),
    deviceBusy: row(plan.deviceIds, devices, (v) => v.busy_fraction ?? 0),
    deviceMemory: row(plan.deviceIds, devices, (v) => v.memory_used ?? null),
    nodes: snapshot.nodes?.length ?? null,
    nodeCpu: snapshot.nodes && Object.fromEntries(snapshot.nodes.map((node) => [node.id, node.utilization])),
    held: snapshot.memory?.used ?? 0,
    used: snapshot.processes?.used || null,
  };
}

export function byId(views, name = "id") {
  return new Map((views ?? []).map((view) => [view[name], view]));
}

/** Return whether a step of the pipeline is in a stage; Beam's steps have inner ones, whose names begin with theirs. */
export function isStepOf(step, info) {
  return [...(info.steps ?? []), ...info.label.split(" + ")].some((own) => own === step || step.startsWith(`${own}/`) || own.startsWith(`${step}/`) || own.endsWith(`/${step}`));
}

/** Only some snapshots have the figures of steps, which change slowly. */
function keepSlowFields(earlier, snapshot) {
  const before = byId(earlier?.stages);
  for (const stage of snapshot.stages ?? []) {
    for (const field of ["step_seconds", "step_elements"]) {
      if (stage[field] === undefined && before.get(stage.id)?.[field] !== undefined) stage[field] = before.get(stage.id)[field];
    }
  }
}

/** Keep the first and the last point, and every other one between them. */
export function thinned(points) {
  return points.filter((_, index) => index % 2 === 0 || index === points.length - 1);
}

/** Return { done, total } of a run's elements; null where it is not known. The stage that has most before it decides. */
export function elementsOf(run) {
  const stages = run.last?.stages ?? [];
  const most = Math.max(0, ...stages.map((stage) => stage.elements ?? 0)) || null;
  if (["done", "drained"].includes(run.state)) return { done: most, total: most };
  if (run.isStream) return { done: most, total: null };
  const open = stages.filter((stage) => stage.status !== "done");
  if (!open.length) return { done: most, total: most };
  const known = open.filter((stage) => stage.fraction > 0 && stage.elements).sort((a, b) => a.fraction - b.fraction)[0];
  if (known) return { done: known.elements, total: Math.max(known.elements, Math.round(known.elements / known.fraction)) };
  const busiest = open.filter((stage) => stage.elements).sort((a, b) => (b.busy_seconds ?? 0) - (a.busy_seconds ?? 0))[0];
  return { done: busiest?.elements ?? null, total: null };
}

export class RunState {
  #hosts = null; // names of hosts by the ids of their nodes, made when they are needed

  constructor(data) {
    this.id = data.id;
    this.replace(data);
  }

  /** Take the whole run, as the server has it now. */
  replace(data) {
    this.state = data.state;
    this.number = data.number ?? 0;
    this.started = data.started;
    this.graph = data.graph; // the steps of its author, and where the graphs have their boxes and links
    this.numbers = data.numbers; // what the tables of stages and models show, as the server describes it
    this.ended = data.ended ?? null;
    this.cost = data.cost ?? null;
    this.happenings = [...(data.happenings ?? [])];
    this.leftOutOf = { ...(data.left_out_of ?? { "": data.left_out ?? 0 }) }; // events that are not here, by kind; older records say only how many
    this.nodes = new Map((this.started.machine?.nodes ?? []).map(({ id, address }) => [id, { address, host: "", most: 0 }])); // of the cluster, also those that are gone
    this.metrics = [];
    this.last = this.newest = null;
    this.points = [];
    this.apart = 0; // seconds between two points, at least
    this.arrivedAt = performance.now();
    this.plan = {
      stageIds: (this.started.stages ?? []).map((stage) => stage.id),
      poolNames: (this.started.pools ?? []).map((pool) => pool.name),
      deviceIds: deviceIds(data),
    };
    for (const event of this.of("NodeChanged")) this.#node(event.node, event.address);
    for (const snapshot of data.snapshots ?? []) this.#snapshot(snapshot);
    if (this.ended) this.#end(this.ended);
  }

  /** Take one event of the stream. */
  apply(event, number) {
    this.number = Math.max(this.number, number);
    if (event.event === "Snapshot") this.#snapshot(event);
    else if (event.event === "RunEnded") this.#end(event);
    else if (event.event !== "RunStarted") this.#happening(event);
  }

  #snapshot(snapshot) {
    if (this.last && snapshot.seconds < this.last.seconds) return;
    if (snapshot.metrics?.length) this.metrics = snapshot.metrics;
    const earlier = this.last;
    this.arrivedAt = performance.now();
    this.last = this.newest = snapshot; // the end has another last one, in which nothing runs
    if (!snapshot.checkpoint && earlier?.checkpoint) this.last.checkpoint = earlier.checkpoint;
    for (const node of snapshot.nodes ?? []) this.#node(node.id, node.address, node.workers);
    keepSlowFields(earlier, snapshot);
    this.#point(pointOf(snapshot, this.plan));
  }

  /** Keep points evenly spread over the run's time. The newest one moves on until it is far enough from the others. */
  #point(point) {
    const before = this.points.at(-2);
    const isNear = before !== undefined && this.points.at(-1).t - before.t < this.apart;
    if (isNear || this.points.at(-1)?.t === point.t) this.points.pop();
    this.points.push(point);
    if (this.points.length <= MOST_POINTS) return;
    this.points = thinned(this.points);
    this.apart = (0.9 * (point.t - this.points[0].t)) / (this.points.length - 1); // snapshots may come a bit early
  }

  #end(event) {
    this.ended = event;
    this.state = event.state;
    if (event.metrics?.length) this.metrics = event.metrics;
    // The last snapshot of a run has means over the whole run in places of recent rates: it is no point of a chart.
    if (event.last) this.last = { ...event.last, checkpoint: event.last.checkpoint ?? this.last?.checkpoint };
  }

  /** Keep the name of a node's host, and the most workers that it had at once. */
  #node(id, host, workers = 0) {
    const known = this.nodes.get(id) ?? { address: "", host: "", most: 0 };
    this.nodes.set(id, { ...known, host: host || known.host, most: Math.max(known.most, workers) });
    this.#hosts = null;
  }

  /** Return the name of a node's host, or its address, or the beginning of its id; with that, if hosts have the same name. */
  hostOf(id) {
    if (this.#hosts === null) {
      const names = [...this.nodes].map(([each, { host, address }]) => [each, host || address]);
      const counts = new Map();
      for (const [, name] of names) counts.set(name, (counts.get(name) ?? 0) + 1);
      this.#hosts = new Map(names.map(([each, name]) => [each, !name ? each.slice(0, ID_CHARACTERS) : counts.get(name) > 1 ? `${name} (${each.slice(0, ID_CHARACTERS)})` : name]));
    }
    return this.#hosts.get(id) ?? id.slice(0, ID_CHARACTERS);
  }

  #happening(event) {
    if (event.event === "NodeChanged") this.#node(event.node, event.address);
    this.happenings.push(event);
    if (this.happenings.length <= MOST_HAPPENINGS) return;
    for (const { event: kind } of this.happenings.splice(0, this.happenings.length - MOST_HAPPENINGS)) {
      this.leftOutOf[kind] = (this.leftOutOf[kind] ?? 0) + 1;
    }
  }

  /** The name of the job, or else of the script. */
  get title() {
    return this.started.job || this.started.name;
  }

  get isLive() {
    return this.state === "running" && !this.ended;
  }

  get isStream() {
    return (this.started.stages ?? []).some((stage) => stage.is_stream);
  }

  /** Seconds from the run's start to its end or to its newest snapshot. */
  get seconds() {
    return this.ended?.seconds ?? this.last?.seconds ?? 0;
  }

  /** Seconds since the run started: a live run goes on between two snapshots. */
  get now() {
    return this.isLive ? this.seconds + (performance.now() - this.arrivedAt) / 1000 : this.seconds;
  }

  /** Return the step whose code failed the run, as far as it is known. */
  get failedStep() {
    if (this.state !== "failed") return "";
    return this.ended?.step || this.ended?.failure?.match(/^step '(.+?)' failed/)?.[1] || "";
  }

  /** Return the newest views of stages by their ids. */
  views() {
    return byId(this.last?.stages);
  }

  /** Return the events of a kind, the newest last. */
  of(...kinds) {
    return this.happenings.filter((event) => kinds.includes(event.event));
  }

  /** Return [seconds, value] of one field; `index` chooses the stage, pool, device or node. */
  series(field, index = null) {
    return this.broken(field, index).filter(([, value]) => value !== null);
  }

  /** Return the same with null where the value is not known, at which a line breaks. */
  broken(field, index = null) {
    return this.points.map((point) => [point.t, (index === null ? point[field] : point[field]?.[index]) ?? null]);
  }

  /** Return the largest value of one field for each stage, without a list for each: there may be hundreds. */
  largest(field) {
    const most = this.plan.stageIds.map(() => 0);
    for (const point of this.points) point[field].forEach((value, index) => { if (value > most[index]) most[index] = value; });
    return most;
  }

  /** Return what the workers of a pool have cost up to each moment, from what one of them costs in a second. */
  costOf(index) {
    const bill = this.cost?.pools?.find((each) => each.pool === this.plan.poolNames[index]);
    if (!bill?.worker_seconds) return [];
    let sum = 0;
    return this.points.map((point, place) => {
      const before = this.points[place - 1];
      if (before) sum += ((before.workers[index] ?? 0) * (point.t - before.t) * bill.total) / bill.worker_seconds;
      return [point.t, sum];
    });
  }

  /** Return elements a second of a stage over time. */
  throughput(index) {
    return this.points.map((point, place) => {
      const before = this.points[place - 1];
      const apart = before ? point.t - before.t : 0;
      if (apart < EXACT_AFTER_S) return [point.t, point.rate[index] ?? 0];
      return [point.t, Math.max(0, (point.elements[index] - before.elements[index]) / apart)];
    });
  }

  /** Return how busy a device was: as its driver says, or else the share of time in which its worker had a bundle. */
  deviceUse(index) {
    const said = this.series("device", index);
    if (said.length) return said;
    return this.points.map((point, place) => {
      const before = this.points[place - 1];
      if (!before) return [point.t, point.deviceBusy[index] ?? 0];
      const busy = point.deviceBusy[index] * point.t - before.deviceBusy[index] * before.t;
      return [point.t, Math.min(1, Math.max(0, busy / Math.max(point.t - before.t, 1e-9)))];
    });
  }
}

function deviceIds(data) {
  const known = (data.started.machine?.devices ?? []).map((device) => device.id);
  const seen = [...(data.snapshots ?? []).slice(-1), data.ended?.last].flatMap((each) => each?.devices ?? []);
  return [...new Set([...known, ...seen.map((device) => device.id)])];
}
