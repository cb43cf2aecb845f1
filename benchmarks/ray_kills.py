"""A job of 60 s on three nodes of a Ray cluster, while a worker is killed every second and a node every 10 s.

The head, where the driver runs, stays; a killed node is replaced at once. Prints whether the result is exact, how much
longer the job takes than undisturbed in the same run, and how long each loss took to be noticed: from the kill to the
moment when the driver reports the lost worker.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import _measure
import _ray_cluster
import apache_beam as beam
import psutil
from apache_beam.options.pipeline_options import PipelineOptions

_NODES = 3
_WORKERS_PER_NODE = 2
_SECONDS = 60.0  # of the undisturbed job, and of kills
_SECONDS_EACH = 0.1
_WORKER_EVERY_S = 1.0
_NODE_EVERY_S = 10.0
_LONGEST_S = 600.0  # for one side
_LOOK_S = 0.05  # between two looks whether it is time to kill
_FORK_SERVER = "luminosity.engine.workers.forkserver"  # what the command of a fork server, and of its workers, contains


def work(x: int) -> int:
    time.sleep(_SECONDS_EACH)
    return x


def run(result_file: str, elements: int) -> None:
    """Run the job in this process, which is the driver, and write down what happened."""
    from luminosity import LuminosityRunner
    from luminosity.events import WorkerLost, WorkerStarted

    found: dict[str, Any] = {"started": [], "lost": []}
    nodes: dict[str, str] = {}  # by worker

    def note(event: Any) -> None:
        if isinstance(event, WorkerStarted):
            nodes[event.worker] = event.node
            found["started"].append((time.time(), event.node))
        elif isinstance(event, WorkerLost):
            found["lost"].append((time.time(), nodes.get(event.worker, ""), event.bundles))

    options = PipelineOptions(["--progress=off", f"--ray_address={_ray_cluster.address()}"])
    pipeline = beam.Pipeline(LuminosityRunner(on_event=note), options)
    done = pipeline | beam.Create(range(elements)) | beam.Reshuffle() | "Work" >> beam.Map(work)
    _measure.check_count_and_sum(done, elements, sum(range(elements)))  # a wrong result fails the run
    begun = time.perf_counter()
    pipeline.run().wait_until_finish()
    found["seconds"] = time.perf_counter() - begun
    Path(result_file).write_text(json.dumps(found))


@dataclass
class Kills:
    """Kills workers and nodes, and notes when and on which node. Ray starts nodes in the main thread only."""

    cluster: _ray_cluster.RayCluster
    node: _ray_cluster.FakeNode  # what replaces a killed one
    seconds: float  # from the moment when there is a worker
    workers: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    nodes: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    began_at: float = 0.0
    next_worker: float = 0.0
    next_node: float = 0.0
    lacks_node: bool = False
    failed_starts: int = 0  # of nodes, by Ray itself: on a busy machine it gives up after 30 s

    def step(self, driver: int) -> None:
        """Kill what it is time for. Call it often, with the driver's process id."""
        now = time.monotonic()
        if not self.began_at:
            if workers(self.cluster, driver):
                self.began_at = now
                self.next_worker, self.next_node = now + _WORKER_EVERY_S, now + _NODE_EVERY_S
        elif now < self.began_at + self.seconds:
            if now >= self.next_node:
                self.next_node += _NODE_EVERY_S
                if len(self.cluster.nodes) < _NODES:
                    return
                victim = self.chance.choice(self.cluster.nodes[1:])  # the first is the head, where the driver is
                self.nodes.append((time.time(), victim.node_id))
                self.cluster.kill(victim)
                self.lacks_node = True
            elif self.lacks_node:
                self._replace()
            elif now >= self.next_worker and (found := workers(self.cluster, driver)):
                self.next_worker = max(self.next_worker + _WORKER_EVERY_S, now)
                process, node_id = self.chance.choice(found)
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                    self.workers.append((time.time(), node_id))

    def _replace(self) -> None:
        try:
            self.cluster.add(self.node, wait=False)
            self.lacks_node = False
        except Exception as error:  # Ray raises nothing more specific; the next step tries again
            self.failed_starts += 1
            print(f"a node did not start: {error}", file=sys.stderr)


def workers(cluster: _ray_cluster.RayCluster, driver: int) -> list[tuple[psutil.Process, str]]:
    """Return the processes of workers, each with the id of its node. Those of the head belong to the driver."""
    found: list[tuple[psutil.Process, str]] = []
    for number, node in enumerate(cluster.nodes):
        root = node.all_processes["raylet"][0].process.pid if number else driver
        with contextlib.suppress(psutil.NoSuchProcess):
            servers = [each for each in psutil.Process(root).children(recursive=True) if _is_forked(each)]
            ids = {each.pid for each in servers}
            found += [(each, node.node_id) for each in servers if each.ppid() in ids]
    return found


def _is_forked(process: psutil.Process) -> bool:
    """Return whether a process is a fork server or one of its workers."""
    try:
        return _FORK_SERVER in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def measured(folder: Path, elements: int, kills: Kills | None = None) -> dict[str, Any]:
    """Run the job in a process of its own, and kill meanwhile."""
    result_file = folder / "result.json"
    result_file.unlink(missing_ok=True)
    command = [sys.executable, sys.argv[0], "--driver", str(result_file), "--elements", str(elements)]
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]))
    ends_at = time.monotonic() + _LONGEST_S
    driver = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    try:
        while driver.poll() is None:
            if time.monotonic() > ends_at:
                sys.exit(f"FAILED: the job has not ended after {_LONGEST_S:.0f} s")
            if kills is not None:
                kills.step(driver.pid)
            time.sleep(_LOOK_S)
    finally:
        driver.kill()
        driver.wait()
    if driver.returncode:
        sys.exit(f"FAILED: the driver ended with {driver.returncode}")
    return json.loads(result_file.read_text())


def noticed(kills: list[tuple[float, str]], lost: list[tuple[float, str, int]]) -> list[float]:
    """Return how long each kill took to be noticed: to the first report of a worker lost on its node that has no other.

    A worker that was killed before it had connected is not on a node yet, and is left out.
    """
    left, seconds = list(lost), []
    for at, node_id in sorted(kills):
        for report in left:
            if report[1] == node_id and report[0] >= at:
                seconds.append(report[0] - at)
                left.remove(report)
                break
    return seconds


def report(undisturbed: dict[str, Any], disturbed: dict[str, Any], kills: Kills) -> None:
    _measure.print_table(
        {
            "undisturbed": {"seconds": undisturbed["seconds"], "workers lost": len(undisturbed["lost"])},
            "with kills": {
                "seconds": disturbed["seconds"],
                "workers lost": len(disturbed["lost"]),
                "worker kills": len(kills.workers),
                "node kills": len(kills.nodes),
                "failed starts": kills.failed_starts,
            },
        }
    )
    print("exact on both sides")
    _measure.print_figure("times undisturbed", disturbed["seconds"] / undisturbed["seconds"], at_most=1.6)
    lost = [tuple(each) for each in disturbed["lost"]]
    of_nodes = noticed(kills.nodes, [each for each in lost if each[1] in {node_id for _, node_id in kills.nodes}])
    of_workers = noticed(kills.workers, lost)
    for name, seconds, limit in (("a killed worker", of_workers, None), ("a killed node", of_nodes, 5.0)):
        if seconds:
            figures = f"median {median(seconds):.2f} s, at most {max(seconds):.2f} s, {len(seconds)} matched"
            target = f" (target: at most {limit} s)" if limit else ""
            print(f"{name} was noticed after: {figures}{target}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--driver", help=argparse.SUPPRESS)
    parser.add_argument("--elements", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="of the undisturbed job, and of kills")
    parser.add_argument("--workers", type=int, default=_WORKERS_PER_NODE, help="on each node")
    parsed = parser.parse_args()
    if parsed.driver:
        run(parsed.driver, parsed.elements)
        return
    elements = int(_NODES * parsed.workers * parsed.seconds / _SECONDS_EACH)
    node = _ray_cluster.FakeNode(cpus=parsed.workers)
    with tempfile.TemporaryDirectory(prefix="ray-kills-") as folder:
        with _ray_cluster.RayCluster([node] * _NODES) as cluster:
            _ray_cluster.tell(cluster)
            undisturbed = measured(Path(folder), elements)
            kills = Kills(cluster, node, parsed.seconds)
            disturbed = measured(Path(folder), elements, kills)
        report(undisturbed, disturbed, kills)


if __name__ == "__main__":
    main()
