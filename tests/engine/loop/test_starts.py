"""How many workers start: as many as the work can use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import Handler, LuminosityRunner, RunInference, WorkerStarted
from luminosity.engine.data.world import WallClock
from luminosity.engine.loop import splits
from luminosity.engine.loop.bundle import Bundle
from luminosity.engine.loop.dispatch import Staff
from luminosity.engine.loop.parts import RunParts
from luminosity.engine.loop.sizing import BundleSize
from luminosity.engine.loop.workers import PoolRun, Worker
from luminosity.engine.resources.pools import Pool
from luminosity.events import Event
from tests.runners import IS_REFERENCE, finished

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(IS_REFERENCE, reason="it has one worker")]

_START_S = 0.1  # what a worker takes to start


def _pool(workers: int, *, groups: tuple[tuple[str, ...], ...] = ()) -> PoolRun:
    return PoolRun(Pool("cpu", 1.0, 0, 1, groups, workers, ()), first_writer=0, clock=WallClock())


@pytest.fixture
def staff(tmp_path: Path) -> Staff:
    """A staff whose workers are never started."""
    folders = SimpleNamespace(
        url="", memory="", spill="", quota="", main_classes="", all=[str(tmp_path)], sockets=str(tmp_path)
    )
    parts = SimpleNamespace(
        server=SimpleNamespace(connect=lambda *_: None),
        launcher=SimpleNamespace(start=lambda *_: None),
        folders=folders,
        pools=[],
        prints={},
        config=SimpleNamespace(worker_options={}),
    )
    return Staff(cast(RunParts, parts), lambda _: None)


def _started(staff: Staff, pool: PoolRun, times: list[float], *, is_short: bool = False) -> list[float]:
    """Want a worker at each of these times, with much work; return those at which one was started."""
    found: list[float] = []
    for now in times:
        before = len(pool.workers)
        staff.want_worker(pool, now, work=100, is_short=is_short)
        if len(pool.workers) > before:
            found.append(now)
    return found


def test_the_second_worker_waits_until_the_work_takes_as_long_as_its_start(staff: Staff) -> None:
    assert _started(staff, _pool(4), [0.0, 0.05, 0.09, 0.11, 0.12, 0.15, 0.16, 0.19, 0.5]) == [0.0, 0.11, 0.15, 0.19]


def test_no_worker_starts_for_work_that_is_done_earlier(staff: Staff) -> None:
    pool = _pool(4)
    assert _started(staff, pool, [0.0, 0.1, 0.2], is_short=True) == [0.0]
    assert staff.next_start(0.2) == pytest.approx(0.25)
    assert _started(staff, pool, [0.26], is_short=True) == [0.26], "it was not short after all"


def test_a_pool_that_had_a_free_slot_waits_anew(staff: Staff) -> None:
    pool = _pool(2)
    assert _started(staff, pool, [0.0, 0.09]) == [0.0]
    staff.keep_saturated({pool})
    staff.keep_saturated(set())
    assert _started(staff, pool, [0.11, 0.2]) == []
    assert _started(staff, pool, [0.22]) == [0.22]


def test_workers_of_devices_start_at_once(staff: Staff) -> None:
    assert _started(staff, _pool(2, groups=(("gpu:0",), ("gpu:1",))), [0.0, 0.0, 0.0]) == [0.0, 0.0]


def test_work_is_short_only_if_its_speed_is_known() -> None:
    size = BundleSize()
    assert not size.takes_less(1, _START_S)
    size.learn(1000, 0.01)
    assert size.takes_less(1000, _START_S)
    assert not size.takes_less(100_000, _START_S)


def _running(
    count: int, *, is_warm: bool = False, sorts: bool = False, given_back: int = 0
) -> tuple[PoolRun, SimpleNamespace, list[Any]]:
    """Return a pool with a bundle that began at 0, its attempt, and what its worker is asked."""
    pool, asked = _pool(2), list[Any]()
    worker = pool.workers[0] = Worker(pool, 0)
    plan = SimpleNamespace(is_splittable=False, can_cut_elements=False, sorts_its_bundle=sorts)
    stage = SimpleNamespace(id="stage", plan=plan, size=BundleSize(), queued=0)
    attempt = SimpleNamespace(
        worker=SimpleNamespace(instruct=asked.append),
        instruction_id="b",
        started_at=0.0,
        take_at=0.03,
        take_wait=0.03,
        given_back=given_back,
        is_warm=is_warm,
        pending_splits={},
        response=None,
    )
    bundle = SimpleNamespace(stage=stage, inputs={"read": [SimpleNamespace(count=count)]}, count=count, attempt=attempt)
    worker.bundles["b"] = cast(Bundle, bundle)
    pool.with_bundles[0] = worker
    return pool, attempt, asked


@pytest.mark.parametrize(
    ("bundle", "expected"),
    [
        ({"count": 100}, 99),  # so many are worth a set-up of their steps
        ({"count": 100, "given_back": 50}, 49),
        ({"count": 2, "is_warm": True}, 1),  # its steps are set up: the first element takes long
        ({"count": 100, "sorts": True}, 0),  # it has begun all of them
    ],
)
def test_running_bundles_have_work_for_more_workers(bundle: dict[str, Any], expected: int) -> None:
    pool, _, asked = _running(**bundle)
    assert splits.work_to_take(pool, 0.02, _START_S) == 0
    assert splits.work_to_take(pool, 0.04, _START_S) == expected
    assert not asked


def test_a_bundle_of_few_elements_is_asked_for_them_before_a_worker_starts() -> None:
    """A bundle that sets up its steps answers with nothing, so that no other worker sets them up as well."""
    pool, attempt, asked = _running(count=2)
    assert splits.work_to_take(pool, 0.04, _START_S) == 0
    assert not asked
    assert splits.may_give_work(pool, 0.04)
    assert attempt.take_at == _START_S, "it is too early to ask"
    assert splits.work_to_take(pool, _START_S, _START_S) == 0
    assert splits.work_to_take(pool, 0.5, _START_S) == 0, "one question at a time"
    assert splits.may_give_work(pool, 0.5)
    assert [request.process_bundle_split.instruction_id for request in asked] == ["b"]


def test_a_bundle_that_is_split_at_its_deadline_keeps_its_pool_saturated() -> None:
    """Otherwise a set-up that lasts, and is asked to split again and again, would start no second worker."""
    pool, attempt, _ = _running(count=100)
    assert not splits.may_give_work(pool, 0.04)
    attempt.pending_splits["split1"] = False
    assert splits.work_to_take(pool, 0.04, _START_S) == 0
    assert splits.may_give_work(pool, 0.04)


class _SlowToLoad(Handler[str, int, int]):
    """Loads for longer than a worker takes to start."""

    def load_model(self) -> int:
        time.sleep(5 * _START_S)
        return 1

    def predict(self, model: int, batch: Any, inference_args: dict[str, Any] | None = None) -> list[int]:
        return [len(example) for example in batch]


class _SlowToSetUp(beam.DoFn):
    def setup(self) -> None:
        time.sleep(10 * _START_S)

    def process(self, element: str) -> Iterator[int]:
        yield len(element)


def _workers(build: Callable[[beam.Pipeline], Any]) -> int:
    """Run a pipeline; return how many workers have started."""
    events: list[Event] = []
    flags = ["--progress=off", "--run_dir=off", "--cpu_workers=2"]
    pipeline = beam.Pipeline(LuminosityRunner(on_event=events.append), PipelineOptions(flags))
    build(pipeline)
    finished(pipeline.run())
    return sum(isinstance(event, WorkerStarted) for event in events)


@pytest.mark.parametrize("step", [RunInference(_SlowToLoad()), beam.ParDo(_SlowToSetUp())], ids=["model", "set-up"])
def test_two_rows_start_one_worker(step: beam.PTransform[Any, Any]) -> None:
    assert _workers(lambda p: p | beam.Create(["one", "three"]) | step) == 1


def _niceness(_: Any) -> int:
    return os.nice(0)


@pytest.mark.parametrize(("accelerators", "expected"), [(1, {"cpu": 10, "device": 0}), (0, {"cpu": 0, "device": 0})])
def test_cpu_workers_give_way_to_workers_with_devices(
    accelerators: int, expected: dict[str, int], tmp_path: Path
) -> None:
    """The threads that feed a device need a core at once; without a device, all steps run on the same workers."""

    def note(niceness: int, name: str) -> None:
        (tmp_path / name).write_text(str(niceness))

    flags = ["--progress=off", "--run_dir=off", "--cpu_workers=1", f"--accelerators={accelerators}"]
    flags += [] if accelerators else ["--missing_resources=warn"]
    pipeline = beam.Pipeline(LuminosityRunner(), PipelineOptions(flags))
    rows = pipeline | beam.Create([1]) | beam.Reshuffle()
    on_cpu = beam.Map(lambda row: note(_niceness(row), "cpu"))
    _ = rows | "On CPU" >> on_cpu
    on_device = beam.Map(lambda row: note(_niceness(row), "device"))
    _ = rows | "On device" >> on_device.with_resource_hints(accelerator="type:any;count:1")
    finished(pipeline.run())
    found = {name: int((tmp_path / name).read_text()) - os.nice(0) for name in expected}
    assert found == expected


_SCRIPT = """
import subprocess, sys, threading
{first}
from luminosity import LuminosityRunner
print(sum(thread.name == "luminosity-warm-up" or "forkserver" in thread.name for thread in threading.enumerate()) > 0)
"""


@pytest.mark.parametrize(
    ("first", "arguments", "expected"),
    [
        ("", [], "True"),
        ("import luminosity.engine.runner", [], "False"),  # it only plans, or makes a runner next
        ("", ["--debug"], "False"),
    ],
)
def test_a_scripts_fork_server_starts_while_the_engine_is_imported(
    first: str, arguments: list[str], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT.format(first=first))
    command = [sys.executable, "script.py", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=tmp_path, env={**os.environ})
    assert done.stdout.strip() == expected


def test_a_module_that_is_run_starts_none_early(tmp_path: Path) -> None:
    """Workers are such processes, and may import a module of the user that names the runner."""
    (tmp_path / "module.py").write_text(_SCRIPT.format(first=""))
    command = [sys.executable, "-m", "module"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "False"
