"""Run the real loop against simulated workers, and print how many bundles a second it carries.

The loop, its stages, buffers, sizes of bundles and commits are those of every run. Only the workers are simulated: one
object in this process acts for all of them over the interfaces of the loop (``WorkerServer``, ``WorkerConnection`` and
``Launcher``), receives each bundle, and answers after the time that its elements take, without doing work.

Questions, the first two for 10, 100 and 500 workers:

- How many bundles a second does the loop carry at most? Every bundle has one element, which takes no time.
- What does a usual run cost? Elements take 20 ms, bundles grow up to a second as they always do; how busy are the
  workers, and which share of a core does the loop take? A worker that could be busy and is not has lost a bundle: so
  the share of busy workers is that of the bundles that were carried of those that were wanted. Bundles that run when
  the time begins or ends count with their part of it. The column "ended" counts those whole that end in the time, and
  none that ends later: bundles still grow, so it shows some percent less.
- Does it carry a cluster? Two CPU workers for each accelerator work on the same elements, in the same way (only with
  ``--case=cluster`` or ``all``: there ``--workers`` counts accelerators, and 500 of them want 1,500 bundles of a second
  each second).

``--sockets`` lets processes act for the workers over gRPC instead, as real workers do: then the server's threads, which
share the interpreter with the loop, are measured, too. ``--profile`` prints where the loop spends its time.

The column "no core" shows the share of the time in which the loop could run but other processes had all cores: if it is
more than some percent, the machine was not quiet, and workers waited for that.
"""

from __future__ import annotations

import argparse
import cProfile
import logging
import operator
import pstats
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import apache_beam as beam
from _simulated_workers import Answers, DirectCrew, SocketCrew
from apache_beam.coders import coder_impl
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.window import GlobalWindows

from luminosity.engine.assemble import assemble
from luminosity.engine.data import wire
from luminosity.engine.folders import RunFolders
from luminosity.engine.loop import sizing
from luminosity.engine.loop.bundle import Bundle
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.loop.parts import RunParts
from luminosity.engine.loop.scheduler import Scheduler
from luminosity.engine.loop.workers import Worker
from luminosity.engine.plan.codecs import Codecs
from luminosity.engine.plan.graph import Graph
from luminosity.engine.prepare import prepare, worker_environment
from luminosity.engine.workers.failure import Failure
from luminosity.engine.workers.sdk.bundle_report import Stall

_SECONDS = 8.0  # of each case
_ELEMENT_S = 0.02  # of work, in the usual case
_WORKERS = (10, 100, 500)
_CASES = ("most", "usual", "cluster")
_CPU_WORKERS_EACH = 2  # of an accelerator, in the case of a cluster
_MOST_ELEMENTS = 4_500_000  # more than all workers do in the time of a case
_BLOCK_ELEMENTS = 1000  # of the source's output


@dataclass(frozen=True)
class Counts:
    """What is counted from the start of a run, or between two moments of it, in seconds except for the bundles."""

    elapsed: float
    loop_cpu: float
    process_cpu: float
    without_core: float
    bundles: float
    busy: float
    ended: float

    def since(self, before: Counts) -> Counts:
        return Counts(*map(operator.sub, vars(self).values(), vars(before).values()))

    def per_second(self) -> Counts:
        return Counts(*(value / self.elapsed for value in vars(self).values()))


def without_core() -> float:
    """Return for how many seconds this thread could run but had no core. 0 if the system does not tell."""
    file = Path("/proc/thread-self/schedstat")
    return int(file.read_text().split()[1]) / 1e9 if file.exists() else 0.0


class Stopwatch:
    """The loop's listener: counts on the loop's thread from the moment when all workers are there."""

    def __init__(self, workers: int, cancel: Callable[[], None], bundles: Callable[[], int], seconds: float) -> None:
        self._wanted = workers
        self._cancel = cancel
        self._bundles = bundles
        self._seconds = seconds
        self._ends_at = float("inf")
        self._began: Counts | None = None
        self.result: Counts | None = None
        self.busy_seconds: Callable[[], float] = lambda: 0.0
        self.ended_seconds: Callable[[], float] = lambda: 0.0

    def tick(self) -> None:
        if self._began is not None and time.monotonic() >= self._ends_at and self.result is None:
            self.result = self._count().since(self._began)
            self._cancel()

    def worker_started(self, worker: Worker) -> None:
        self._wanted -= 1
        if not self._wanted:
            self._began = self._count()
            self._ends_at = self._began.elapsed + self._seconds

    def _count(self) -> Counts:
        cpu = time.thread_time(), time.process_time(), without_core()
        return Counts(time.monotonic(), *cpu, self._bundles(), self.busy_seconds(), self.ended_seconds())

    def worker_lost(self, worker: Worker, reason: str) -> None:
        raise RuntimeError(f"a simulated worker {reason}")

    def worker_ends(self, worker: Worker) -> None:
        pass

    def worker_ended(self, worker: Worker) -> None:
        pass

    def bundle_stalled(self, bundle: Bundle, stall: Stall) -> None:
        """Do nothing."""

    def bundle_retried(self, bundle: Bundle, failure: Failure) -> None:
        raise RuntimeError(f"a bundle failed: {failure}")


def planned(workers: int, accelerators: int) -> Any:
    """Return the plan of a pipeline that makes elements and maps them, with one slot for each worker."""
    flags = [f"--cpu_workers={workers}", f"--accelerators={accelerators}"]
    options = PipelineOptions([*flags, "--progress=off", "--run_dir=off"])
    pipeline = beam.Pipeline(options=options)
    elements = pipeline | beam.Impulse() | beam.FlatMap(lambda _: [b""]) | beam.Reshuffle()
    _ = elements | "Work" >> beam.Map(lambda x: x)
    if accelerators:
        predict = beam.Map(lambda x: x).with_resource_hints(accelerator="type:nvidia-tesla-t4;count:1")
        _ = elements | "Predict" >> predict
    return prepare(pipeline.to_runner_api(default_environment=worker_environment(options)), options)


def answers_for(graph: Graph, elements: int, element_seconds: float) -> Answers:
    source = next(stage for stage in graph.stages if stage.writes)
    (write,) = source.writes
    impl = Codecs(graph).safe_impl(write.coder_id)
    stream: Any = coder_impl.create_OutputStream()
    impl.encode_to_stream(GlobalWindows.windowed_value(b"element"), stream, True)
    block = wire.pack_bytes(_BLOCK_ELEMENTS, stream.get() * _BLOCK_ELEMENTS)
    return Answers(
        {stage.id: [each.transform_id for each in stage.writes] for stage in graph.stages},
        source.id,
        [block] * (elements // _BLOCK_ELEMENTS),
        element_seconds,
    )


def run(
    workers: int, element_seconds: float, *, sockets: bool, seconds: float, profile: bool = False, accelerators: int = 0
) -> Counts:
    """Return what was counted in each second: of busy and ended seconds, the share of all workers' time."""
    prepared = planned(workers, accelerators)
    workers += accelerators
    folders = RunFolders()
    try:
        answers = answers_for(prepared.graph, _MOST_ELEMENTS, element_seconds)
        parts: RunParts = assemble(prepared, folders, RunMetrics(), {})
        crew: Any
        if sockets:
            crew = SocketCrew(folders.url, answers)
            parts = replace(parts, launcher=crew)
        else:
            parts.server.stop()
            crew = DirectCrew(answers)
            parts = replace(parts, server=crew, launcher=crew)
        cancelled: list[Callable[[], None]] = []
        stopwatch = Stopwatch(
            workers, lambda: cancelled[0](), lambda: sum(stage.bundles_done for stage in parts.stages), seconds
        )
        stopwatch.busy_seconds, stopwatch.ended_seconds = crew.busy_seconds, crew.ended_seconds
        scheduler = Scheduler(parts, stopwatch)
        cancelled.append(scheduler.cancel)
        profiler = cProfile.Profile(time.thread_time) if profile else None
        try:
            if profiler is not None:
                profiler.enable()
            scheduler.run()
        except Exception as error:
            if stopwatch.result is None:
                raise
            logging.getLogger(__name__).debug("the run was cancelled: %s", error)
        finally:
            if profiler is not None:
                profiler.disable()
                pstats.Stats(profiler).sort_stats("tottime").print_stats(18)
            crew.stop()
            parts.server.stop()
    finally:
        folders.remove()
    if stopwatch.result is None:
        raise RuntimeError("the elements were done before the time was over")
    found = stopwatch.result.per_second()
    return replace(found, busy=found.busy / workers, ended=found.ended / workers)


def one_element(self: sizing.BundleSize, *arguments: Any, **named: Any) -> int:
    """Stand for ``BundleSize.next``."""
    return 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="*", default=list(_WORKERS))
    parser.add_argument("--seconds", type=float, default=_SECONDS)
    parser.add_argument("--sockets", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--case", choices=(*_CASES, "both", "all"), default="both")
    parsed = parser.parse_args()
    logging.disable(logging.WARNING)
    heads = ("workers", "case", "bundles/s", "cores: loop", "process", "no core", "ms a bundle", "busy", "ended")
    print("  ".join(f"{head:>12}" for head in heads))
    for case in {"both": _CASES[:2], "all": _CASES}.get(parsed.case, (parsed.case,)):
        # The loop would make longer bundles, and fewer of them, of elements that take no time.
        sizing.BundleSize.next = one_element if case == "most" else _NEXT  # pyright: ignore[reportAttributeAccessIssue]
        for workers in parsed.workers:
            found = run(
                workers * _CPU_WORKERS_EACH if case == "cluster" else workers,
                0.0 if case == "most" else _ELEMENT_S,
                accelerators=workers if case == "cluster" else 0,
                sockets=parsed.sockets,
                seconds=parsed.seconds,
                profile=parsed.profile,
            )
            cells = (f"{workers}", case, f"{found.bundles:,.0f}", f"{found.loop_cpu:.2f}", f"{found.process_cpu:.2f}")
            cells += (f"{found.without_core:.0%}", f"{1000 * found.loop_cpu / found.bundles:.3f}")
            has_work = case != "most" and not parsed.sockets
            cells += (f"{found.busy:.0%}", f"{found.ended:.0%}") if has_work else ("-", "-")
            print("  ".join(f"{cell:>12}" for cell in cells), flush=True)


_NEXT = sizing.BundleSize.next

if __name__ == "__main__":
    main()
