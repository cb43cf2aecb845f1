"""A cluster that loses workers and nodes, and drivers that are killed: results stay exact, and nothing is left."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fake_cluster import FakeCluster, fake_cluster
from tests.processes import files_of_luminosity, wait_for
from tests.runners import IS_CLUSTER

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(IS_CLUSTER, reason="starts a cluster of its own, and kills its nodes"),
]

_PATIENCE_S = 240
_ELEMENTS = 300
_EMPTY = "Plasma memory usage 0 MiB, 0 objects"

# Elements with 150 kB, which travel as objects, then state, a grouping and a model. The last elements wait for a file.
_SCRIPT = """
import logging, os, sys, time
import apache_beam as beam
from apache_beam.coders import VarIntCoder
from apache_beam.ml.inference.base import ModelHandler, RunInference
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec
from luminosity import LuminosityRunner

count, folder, *flags = sys.argv[1:]
COUNT, KEYS, LAST = int(count), 7, 6

def note(name):
    with open(os.path.join(folder, name), "a") as file:
        file.write(f"{os.getpid()}\\n")

def check(pair, count, folder):
    number, payload = pair
    with open(os.path.join(folder, "at-work"), "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(0.1)
    deadline = time.monotonic() + 100
    while number >= count - LAST and not os.path.exists(os.path.join(folder, "end")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert payload == bytes([number % 251]) * 150_000
    return number % KEYS, number

class Count(beam.DoFn):
    SEEN = ReadModifyWriteStateSpec("seen", VarIntCoder())

    def process(self, element, seen=beam.DoFn.StateParam(SEEN)):
        so_far = (seen.read() or 0) + 1
        seen.write(so_far)
        yield element[0], so_far

class Factor:
    value = 2

class Double(ModelHandler):
    def load_model(self):
        return Factor()

    def run_inference(self, batch, model, inference_args=None):
        return [(key, number * model.value) for key, number in batch]

def compare(found, name, expected):
    assert sorted(found) == expected, (name, sorted(found), expected)

if __name__ == "__main__":
    logging.getLogger("luminosity.engine.cluster.driver.objects").setLevel(logging.INFO)
    of_key = {key: list(range(key, COUNT, KEYS)) for key in range(KEYS)}
    with beam.Pipeline(LuminosityRunner(), beam.options.pipeline_options.PipelineOptions(flags)) as pipeline:
        checked = (
            pipeline
            | beam.Create(range(COUNT))
            | "Spread" >> beam.Reshuffle()
            | "Make" >> beam.Map(lambda number: (number, bytes([number % 251]) * 150_000))
            | "Send" >> beam.Reshuffle()
            | "Check" >> beam.Map(check, COUNT, folder).with_output_types(tuple[int, int])
        )
        found = {
            "groups": checked | beam.GroupByKey() | beam.MapTuple(lambda key, numbers: (key, sorted(numbers))),
            "seen": checked | beam.ParDo(Count()),
            "sums": checked | RunInference(Double()) | beam.CombinePerKey(sum),
        }
        expected = {
            "groups": sorted(of_key.items()),
            "seen": [(key, 1 + index) for key, numbers in of_key.items() for index in range(len(numbers))],
            "sums": [(key, 2 * sum(numbers)) for key, numbers in of_key.items()],
        }
        for name, each in found.items():
            whole = each | f"All {name}" >> beam.combiners.ToList()
            whole | f"Compare {name}" >> beam.Map(compare, name, expected[name])
    note("exact")
"""


class Driver:
    """A process that runs the pipeline. ``folder`` has what its steps note."""

    def __init__(self, cluster: FakeCluster, folder: Path, *flags: str, count: int = _ELEMENTS) -> None:
        self.folder = folder
        self.output = folder / "output"
        script = folder / "work" / "lossy.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text(_SCRIPT)
        arguments = [str(count), str(folder), f"--ray_address={cluster.address}", *flags]
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, script, *arguments], cwd=script.parent, stdout=output, stderr=output
            )

    def begun(self) -> int:
        """How many elements were begun, also those that were lost."""
        return len(self._notes("at-work"))

    def wait_for(self, elements: int) -> None:
        """Wait until so many elements were begun, or until those that wait for the end keep all workers busy."""
        deadline = time.monotonic() + _PATIENCE_S
        last, since = -1, time.monotonic()
        while (begun := self.begun()) < elements:
            if begun != last:
                last, since = begun, time.monotonic()
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            if begun and time.monotonic() - since > 15:
                return
            time.sleep(0.05)

    def wait_for_copies(self, losses: int) -> None:
        """Wait until the blocks of so many lost nodes have other copies."""
        assert wait_for(lambda: self.text().count("have other copies again") >= losses, _PATIENCE_S), self.text()

    def workers(self) -> list[psutil.Process]:
        """The processes that have run elements and live."""
        found: list[psutil.Process] = []
        for pid in set(self._notes("at-work")):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def _notes(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def end(self) -> None:
        """Let the last elements go, and wait for a result that is exact."""
        (self.folder / "end").touch()
        assert self.process.wait(_PATIENCE_S) == 0, self.text()
        assert (self.folder / "exact").exists(), self.text()

    def text(self) -> str:
        lines = self.output.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if "[state-dump]" not in line)[-20_000:]


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    with fake_cluster((2, 2, 2, 2)) as running:
        yield running


@pytest.fixture
def drive(cluster: FakeCluster, tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Starts drivers, which are gone afterwards."""
    drivers: list[Driver] = []

    def start(*flags: str, **more: Any) -> Driver:
        drivers.append(Driver(cluster, tmp_path, *flags, **more))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.process.kill()
        driver.process.wait(_PATIENCE_S)


@contextlib.contextmanager
def leaves_nothing(cluster: FakeCluster) -> Iterator[None]:
    """No actor, no lease, no folder of a node that lives, no file of the driver and no object is left afterwards."""
    files = files_of_luminosity()
    yield
    assert wait_for(lambda: files_of_luminosity() <= files, _PATIENCE_S), files_of_luminosity() - files
    import ray
    from ray._private import state
    from ray._private.internal_api import memory_summary
    from ray.util import placement_group_table

    ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        alive = lambda: [actor for actor in state.actors().values() if actor["State"] != "DEAD"]  # noqa: E731
        assert wait_for(lambda: not alive(), _PATIENCE_S), alive()
        leases = lambda: [each for each in placement_group_table().values() if each["state"] != "REMOVED"]  # noqa: E731
        assert wait_for(lambda: not leases(), _PATIENCE_S), leases()
        summary = lambda: memory_summary(cluster.address, stats_only=True)  # noqa: E731
        assert wait_for(lambda: _EMPTY in summary(), _PATIENCE_S), summary()
    finally:
        ray.shutdown()
    living = [number for number, node in enumerate(cluster.nodes) if node.live_processes()]
    left = lambda: [name for number in living for name in os.listdir(cluster.temporary_folder(number))]  # noqa: E731
    assert wait_for(lambda: not left(), _PATIENCE_S), left()


def _family(node: Any) -> list[psutil.Process]:
    """All processes of a node."""
    roots = [psutil.Process(each[0].process.pid) for each in node.all_processes.values()]
    return [*roots, *(child for root in roots for child in root.children(recursive=True))]


def _node_at_work(cluster: FakeCluster, driver: Driver) -> Any:
    """A node, not the driver's, with a worker that has run elements and lives."""

    def find() -> Any:
        pids = {worker.pid for worker in driver.workers()}
        living = [node for node in cluster.nodes[1:] if node.live_processes()]
        return next((node for node in living if pids & {each.pid for each in _family(node)}), None)

    found = wait_for(find, _PATIENCE_S)
    assert found is not None, driver.text()
    return found


def test_lost_workers_lost_nodes_and_a_frozen_node_change_no_result(
    cluster: FakeCluster, drive: Callable[..., Driver]
) -> None:
    frozen: list[psutil.Process] = []
    with leaves_nothing(cluster):
        driver = drive()
        try:
            driver.wait_for(30)
            driver.workers()[0].kill()
            driver.wait_for(80)
            cluster.kill(_node_at_work(cluster, driver))
            cluster.add(2)
            driver.wait_for_copies(1)
            driver.wait_for(140)
            cluster.kill(_node_at_work(cluster, driver))  # may have had the only copies, were they not renewed
            driver.wait_for_copies(2)
            driver.wait_for(200)
            frozen = _family(_node_at_work(cluster, driver))
            for process in frozen:
                process.suspend()
            driver.end()
        finally:
            for process in frozen:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
    assert driver.text().count("what ran there is repeated elsewhere") >= 2  # the frozen one perhaps not yet
    assert driver.text().count(") has joined the cluster") == 1


def test_a_driver_that_is_interrupted_leaves_nothing(cluster: FakeCluster, drive: Callable[..., Driver]) -> None:
    with leaves_nothing(cluster):
        driver = drive()
        driver.wait_for(20)
        driver.process.send_signal(signal.SIGINT)
        assert driver.process.wait(_PATIENCE_S) != 0
    assert "KeyboardInterrupt" in driver.text()


@pytest.mark.slow
def test_a_killed_driver_leaves_its_checkpoint_alone_and_continues_from_it(
    cluster: FakeCluster, drive: Callable[..., Driver], tmp_path: Path
) -> None:
    flags = [f"--checkpoint_dir={tmp_path / 'checkpoint'}", "--checkpoint_interval=1"]
    with leaves_nothing(cluster):
        first = drive(*flags, count=150)
        first.wait_for(75)
        first.process.kill()
        first.process.wait(_PATIENCE_S)
    begun = first.begun()
    with leaves_nothing(cluster):
        drive(*flags, count=150).end()
    assert first.begun() - begun < 150  # it did not begin anew
