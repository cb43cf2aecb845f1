"""Fits the work of each stage and the start of workers to a recorded run."""

from __future__ import annotations

from collections.abc import Sequence

from luminosity._shared.text import format_bytes
from luminosity.errors import Fix, RecordError
from luminosity.events import InferenceView, ModelLoaded, PoolInfo, StageInfo, StageView, WorkerStarted
from luminosity.operate.cost.bill import device_names, peak_ram, start_cpu
from luminosity.operate.simulation.workload import (
    AutoscaleRange,
    Input,
    PoolModel,
    PoolOrder,
    Scenario,
    StageModel,
    Workload,
    pools_named,
)
from luminosity.runs.records import Record
from luminosity.runs.views import words

__all__ = ["BETWEEN_RUNS", "device_share", "fit"]

BETWEEN_RUNS = 0.1  # of the time: how much two equal runs differ, on a machine that also does other things

_ROW_BYTES = 1024  # assumed in a queue, if the record does not know
_FEW_BUNDLES = 5  # fewer measured bundles say little about the spread


def fit(record: Record, scenario: Scenario) -> Workload:
    """Return the workload of ``scenario``, with what ``record`` has measured.

    Raises :class:`RecordError` if the record can't tell, and :class:`OptionError` for a pool that it does not have.
    """
    return _Fit(record, scenario).workload()


def device_share(record: Record) -> float | None:
    """Return the share of their workers' time in which models computed, from the first batch to the last.

    Returns None if the run has run no models.
    """
    views = [view for stage in (record.last.stages if record.last else ()) for view in stage.inference]
    by_stage = [view.worker_seconds for view in views if view.worker_seconds]
    if not by_stage:
        return None
    busy = sum(view.device_busy_seconds or view.compute_seconds for view in views)
    return min(1.0, busy / max(by_stage))


class _Fit:
    """One fit, which notes each number that it uses."""

    def __init__(self, record: Record, scenario: Scenario) -> None:
        _check(record)
        assert record.last is not None
        self._record = record
        self._scenario = scenario
        self._infos = record.started.stages
        self._views = {view.id: view for view in record.last.stages}
        self._inputs: list[Input] = []
        self._models = [view for stage in record.last.stages for view in stage.inference]
        self._with_models = {
            info.pool for info in self._infos if (view := self._views.get(info.id)) is not None and view.inference
        }
        self._orders = self._ordered()
        self._measured_rows = self._rows_of_the_run()
        self._rows = scenario.rows or self._measured_rows
        self._more_models = self._times_models()

    def workload(self) -> Workload:
        """Return the whole workload."""
        self._note("rows", words.number(round(self._rows)), is_measured=self._scenario.rows is None)
        stages = tuple(self._stage(info) for info in self._infos)
        pools = tuple(self._pool(pool) for pool in self._record.started.pools)
        cores = self._cores(pools)
        self._note_range()
        if self._scenario.preempted_per_hour:
            self._note("preemption", f"{self._scenario.preempted_per_hour:g} per worker and hour", is_measured=False)
        return Workload(
            self._rows,
            stages,
            pools,
            cores,
            float(self._record.started.machine.ram) if cores < float("inf") else 0.0,
            preempted_per_hour=self._scenario.preempted_per_hour,
            lost_at=self._scenario.lost_at,
            inputs=tuple(self._inputs),
        )

    def _note(self, name: str, value: str, note: str = "", *, is_measured: bool) -> None:
        self._inputs.append(Input(name, value, is_measured, note))

    def _note_range(self) -> None:
        note = "two runs of the same pipeline on the same machine may differ by as much; the range covers it"
        self._note("difference between two runs", f"{BETWEEN_RUNS:.0%}", note, is_measured=False)

    # The run

    def _rows_of_the_run(self) -> float:
        if self._scenario.measured_rows:
            self._note("rows of the measured run", words.number(round(self._scenario.measured_rows)), is_measured=False)
            return self._scenario.measured_rows
        inferences = max((view.inferences for view in self._models), default=0)
        rows = inferences or max(view.elements for view in self._views.values())
        note = "examples of a model" if inferences else "elements of its largest stage"
        self._note("rows of the measured run", words.number(rows), note, is_measured=True)
        return float(max(1, rows))

    def _times_models(self) -> float:
        if self._scenario.models is None:
            return 1.0
        if not self._models:
            raise RecordError(
                f"run {self._record.started.run} has run no models, so --models has nothing to multiply",
                fix=Fix("leave out models", command="leave out --models, or name a run with RunInference or Enrich"),
            )
        note = f"measured {len(self._models)}; the others cost as much as these, on average, for each row"
        self._note("models", str(self._scenario.models), note, is_measured=False)
        return self._scenario.models / len(self._models)

    def _ordered(self) -> dict[str, PoolOrder]:
        orders: dict[str, PoolOrder] = {}
        for order in self._scenario.pools:
            for name in pools_named(order.name, self._record.started.pools, self._with_models):
                orders[name] = order
        return orders

    def _cores(self, pools: Sequence[PoolModel]) -> float:
        machine = self._record.started.machine.cores
        workers = sum(pool.most_workers for pool in pools)
        measured = sum(self._workers_of(pool) for pool in self._record.started.pools)
        if self._scenario.cores is not None:
            self._note("cores that all workers share", f"{self._scenario.cores:g}", is_measured=False)
            return self._scenario.cores
        if machine and workers <= max(machine, measured) and not any(order.device for order in self._orders.values()):
            self._note("cores that all workers share", str(machine), "one machine, as measured", is_measured=True)
            return float(machine)
        one = f"; if they share this machine, say --cores={machine}" if machine else ""
        self._note("cores", "enough", f"each worker has the cores that it used{one}", is_measured=False)
        return float("inf")

    # Stages

    def _stage(self, info: StageInfo) -> StageModel:
        view = self._views.get(info.id) or StageView(info.id, "done")
        bundles = [(s, e) for s, e in zip(view.bundle_seconds, view.bundle_elements, strict=False) if e > 0 and s > 0]
        spread, weights = (1.0,), (1.0,)
        if len(bundles) >= _FEW_BUNDLES:
            mean = sum(s for s, _ in bundles) / sum(e for _, e in bundles)
            spread = tuple(s / e / mean for s, e in bundles)
            weights = tuple(float(e) for _, e in bundles)
        grows = view.elements > 1
        scale = self._rows / self._measured_rows if grows else 1.0
        seconds = self._seconds(info, view) * scale
        count = view.bundles or max(1.0, view.busy_seconds)
        self._note_stage(info, view, seconds / self._rows, len(bundles), grows)
        return StageModel(
            info.id,
            info.label,
            info.pool,
            info.reads_from,
            info.side_inputs_from + (info.reads_from if info.reads_groups else ()),
            seconds / self._rows,
            self._cores_of(info, view),
            spread,
            weights,
            max(1e-9, self._rows / (count * scale)),
            self._queue_rows(info),
        )

    def _seconds(self, info: StageInfo, view: StageView) -> float:
        """Return the seconds of workers that the stage takes for the measured rows, with the models asked for."""
        order = self._orders.get(info.pool)
        speed = order.speed if order is not None and order.speed else 1.0
        if not view.inference:
            prepares = any(step.rsplit("/", 1)[-1].startswith("Prepare") for step in info.steps)
            is_for_models = prepares or "(Prepare" in info.label
            return view.busy_seconds / speed * (self._more_models if is_for_models else 1.0)
        computing = sum(_computing(each) for each in view.inference)
        loading = sum(each.load_seconds for each in view.inference)
        rest = max(0.0, view.busy_seconds - loading - computing)
        return (computing / speed + rest) * self._more_models

    def _note_stage(self, info: StageInfo, view: StageView, per_row: float, bundles: int, grows: bool) -> None:
        notes = [f"{bundles} measured bundles" if bundles >= _FEW_BUNDLES else "spread not known: none assumed"]
        if view.inference:
            known = all(each.fixed_seconds or each.seconds_per_cost for each in view.inference)
            line = "a batch's time is a fixed part and one for its cost" if known else "mean time of a batch"
            notes.append(line)
        if not view.cpu_seconds:
            notes.append("CPU seconds not known: never waits for a core")
        if not grows:
            notes.append("does not grow with the rows")
        value = f"{1000 * per_row:.4g} s for 1,000 rows"
        self._note(f"work of {words.shortened(info.label, 40)}", value, "; ".join(notes), is_measured=True)

    def _cores_of(self, info: StageInfo, view: StageView) -> float:
        if not view.cpu_seconds or not view.busy_seconds:
            return 0.0
        most = next((pool.cores_per_worker for pool in self._record.started.pools if pool.name == info.pool), 0.0)
        used = view.cpu_seconds / view.busy_seconds
        return min(used, most) if most else used

    def _queue_rows(self, info: StageInfo) -> float:
        limit = self._record.started.queue_limit
        if not info.reads_from or not limit:
            return float("inf")
        size = sum(self._views[name].output_bytes for name in info.reads_from if name in self._views)
        return limit / (size / self._measured_rows if size else _ROW_BYTES)

    # Pools

    def _pool(self, info: PoolInfo) -> PoolModel:
        order = self._orders.get(info.name, PoolOrder(info.name))
        workers = order.workers if order.workers is not None else self._workers_of(info)
        limits = self._autoscale(info)
        said = f"{limits.least} to {limits.most}, autoscaled" if limits is not None else f"{workers:,}"
        device = order.device or next(iter(device_names(info, self._record.started.machine)), "")
        has_order = order.workers is not None or limits is not None
        self._note(f"workers of pool {info.name}", said, device, is_measured=not has_order)
        self._note_speed(info, order)
        most = limits.most if limits is not None else workers
        cores, ram = self._cores_and_ram(info, order, most)
        return PoolModel(
            info.name,
            workers,
            self._startup(info, order),
            self._loading(info),
            limits,
            cores,
            ram,
            device,
            max(1.0, len(info.devices) / max(1, info.workers)) if info.devices or order.device else 0.0,
            0.0 if order.startup_seconds is not None else self._start_gap(),
        )

    def _cores_and_ram(self, info: PoolInfo, order: PoolOrder, workers: int) -> tuple[float, float]:
        """Return what each worker has, for the bill: what you say, what it was given, or what it used if that is more.

        Workers whose steps ask for no RAM share that of the machine. More of them on others need what was used.
        """
        cores = order.cores if order.cores is not None else info.cores_per_worker
        peak = peak_ram(self._record, info.name)
        note = "for the bill"
        if order.ram is not None:
            ram = order.ram
        elif info.asked.ram or not peak or workers <= self._workers_of(info) or self._scenario.cores is not None:
            ram = float(max(info.ram_per_worker, peak))
        else:
            ram = float(peak)
            note = "for the bill; its steps ask for no RAM: this is what the largest measured worker used"
        if cores or ram:
            is_given = order.cores is not None or order.ram is not None
            value = f"{cores:g} core{'' if cores == 1 else 's'}" + (f", {format_bytes(ram)}" if ram else "")
            self._note(f"a worker of pool {info.name} has", value, note, is_measured=not is_given)
        return cores, ram

    def _start_gap(self) -> float:
        """Return the time between the starts of two workers: each takes CPU seconds of the machine's cores."""
        return start_cpu(self._record) / max(1, self._record.started.machine.cores)

    def _workers_of(self, info: PoolInfo) -> int:
        """Return how many workers the pool had: also those on cores that other pools did not use."""
        up = [view.workers for each in self._record.snapshots for view in each.pools if view.name == info.name]
        return max([info.workers, *up])

    def _autoscale(self, info: PoolInfo) -> AutoscaleRange | None:
        for name, limits in self._scenario.autoscale:
            wanted = name or ("device" if self._with_models else "")
            if not wanted or info.name in pools_named(wanted, self._record.started.pools, self._with_models):
                return limits
        return None

    def _note_speed(self, info: PoolInfo, order: PoolOrder) -> None:
        if order.speed is not None:
            note = "for the models" if info.name in self._with_models else ""
            self._note(f"speed of pool {info.name}", f"{order.speed:g} times the measured", note, is_measured=False)
        elif order.device:
            self._note(
                f"speed of pool {info.name}", f"a {order.device} as fast as what was measured", is_measured=False
            )

    def _startup(self, info: PoolInfo, order: PoolOrder) -> float:
        name = f"start of a worker of pool {info.name}"
        if order.startup_seconds is not None:
            self._note(name, words.duration(order.startup_seconds), is_measured=False)
            return order.startup_seconds
        every = [event for event in self._record.happenings if isinstance(event, WorkerStarted)]
        starts = [e.seconds for e in every if e.pool == info.name] or [e.seconds for e in every]
        if not starts:
            self._note(name, "0 s", "the record has no start of a worker", is_measured=False)
            return 0.0
        note = "a new machine of a cloud takes minutes: say startup=" if order.device else ""
        self._note(name, words.duration(min(starts)), note, is_measured=True)
        return min(starts)

    def _loading(self, info: PoolInfo) -> float:
        if info.name not in self._with_models:
            return 0.0
        stages = {each.id for each in self._infos if each.pool == info.name}
        views = [model for name, view in self._views.items() if name in stages for model in view.inference]
        seconds = sum(view.load_seconds / view.loads for view in views if view.loads)
        if not seconds:
            steps = {view.step for view in views}
            loads = [e for e in self._record.happenings if isinstance(e, ModelLoaded) and e.step in steps]
            by_model: dict[tuple[str, str], list[float]] = {}
            for event in loads:
                by_model.setdefault((event.step, event.model), []).append(event.load_seconds)
            seconds = sum(sum(each) / len(each) for each in by_model.values())
        seconds *= self._more_models
        is_known = seconds > 0
        note = "" if is_known else "the record has no loads of models"
        self._note(
            f"loads of models in a worker of pool {info.name}", words.duration(seconds), note, is_measured=is_known
        )
        return seconds


def _check(record: Record) -> None:
    run = record.started.run
    if record.state == "running":
        raise RecordError(f"run {run} still runs; a simulation needs a run that is done", fix="wait for its end")
    if record.state not in ("done", "drained"):
        raise RecordError(
            f"run {run} is {record.state}, so its work was not measured as a whole; expected a run that is done",
            fix="name a run that is done: `lum runs` lists them",
        )
    if any(stage.is_stream for stage in record.started.stages):
        raise RecordError(
            f"run {run} reads a stream, which has no number of rows; expected a batch",
            fix="run the pipeline over a part of the data that ends, and simulate that run",
        )
    if record.last is None or not any(view.busy_seconds > 0 and view.elements for view in record.last.stages):
        raise RecordError(f"run {run} has no measured bundles", fix="name a run that took longer than a moment")


def _computing(view: InferenceView) -> float:
    if view.fixed_seconds or view.seconds_per_cost:
        return view.fixed_seconds * view.batches + view.seconds_per_cost * view.padded_cost
    return view.compute_seconds or view.device_busy_seconds
