"""A Ray cluster of several nodes on this machine, for the benchmarks: real daemons, each node with its own folders."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _measure
import psutil

__all__ = [
    "CpuMeter",
    "FakeNode",
    "RayCluster",
    "address",
    "connect",
    "connect_ray_data",
    "main",
    "read_parquet",
    "tell",
]

# Environment variables for the processes of the sides: the head's address, and the ids of the cluster's daemons.
_ADDRESS = "LUMINOSITY_BENCHMARK_RAY"
_DAEMONS = "LUMINOSITY_BENCHMARK_RAY_DAEMONS"
_OBJECT_STORE = 200_000_000  # bytes of each node; Ray's least is 75 MB
_LOOK_S = 0.5  # between two looks at the CPU times of all processes
_MEMORY = 4_000_000_000  # bytes that each node declares; nothing enforces them
# Before Ray is imported: no reports to its makers, no process killed because others use the machine's memory.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # otherwise Ray warns about tasks without an accelerator
}


@dataclass(frozen=True)
class FakeNode:
    """What a node declares. Cores and accelerators need not exist: Ray counts them only."""

    cpus: int
    gpus: int = 0
    accelerator_type: str = "T4"  # of its accelerators, if it has some


class RayCluster:
    """A running cluster. Use it as a context: its end stops all nodes and removes their folders."""

    def __init__(self, nodes: Sequence[FakeNode]) -> None:
        """Start the head, which is the first of the nodes, and the others. Blocks until all have joined."""
        # Sockets lie in the folders, and their paths may have at most 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="lb", dir="/tmp"))
        os.environ["RAY_TMPDIR"] = str(self._folder)  # Ray notes there where the last cluster of this machine is
        (self._folder / "ray").mkdir()
        os.environ.update(_ENVIRONMENT)
        from ray.cluster_utils import Cluster

        self._started = 0
        self._cluster: Any = Cluster()
        self.nodes: list[Any] = []
        try:
            for node in nodes:
                self.add(node)
        except BaseException:
            self.stop()
            raise

    @property
    def address(self) -> str:
        """The head's HOST:PORT, for ``--ray_address``."""
        return self._cluster.address

    def add(self, node: FakeNode, *, wait: bool = True) -> Any:
        """Start one more node, and return it: once it has joined, unless ``wait`` is False. Only in the main thread."""
        folder = self._folder / f"n{self._started}"
        temporary = folder / "tmp"  # of the processes that run there
        temporary.mkdir(parents=True)
        self._started += 1
        head_only = {} if self.nodes else {"include_dashboard": False}
        resources = {f"accelerator_type:{node.accelerator_type}": 1} if node.gpus else {}
        started = self._cluster.add_node(
            wait=wait,
            num_cpus=node.cpus,
            num_gpus=node.gpus,
            resources=resources,
            memory=_MEMORY,
            object_store_memory=_OBJECT_STORE,
            temp_dir=str(folder),
            env_vars={"TMPDIR": str(temporary)},
            **head_only,
        )
        self.nodes.append(started)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # instead of Ray's, which ends this process at once
        return started

    def kill(self, node: Any) -> None:
        """Kill a node and everything that runs there. It has no time to say goodbye."""
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def stop(self) -> None:
        """Stop all nodes and remove their folders. Calling it twice does no harm."""
        self.nodes.clear()
        self._cluster.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *error: object) -> None:
        with _not_interrupted():
            self.stop()


@contextlib.contextmanager
def _not_interrupted() -> Generator[None]:
    """Ignore Ctrl-C for a moment: whoever presses it twice would leave daemons behind."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main(
    sides: dict[str, _measure.Side],
    report: Callable[[_measure.Results], None],
    nodes: Sequence[FakeNode],
    rounds: int = 1,
) -> None:
    """Measure the sides as :func:`_measure.main` does, on one cluster that runs all the time."""
    if len(sys.argv) > 1:
        _measure.main(sides, report)
        return
    with RayCluster(nodes) as cluster:
        tell(cluster)
        _measure.main(sides, report, rounds)


def tell(cluster: RayCluster) -> None:
    """Let processes that this one starts from now on know the cluster."""
    os.environ[_ADDRESS] = cluster.address
    daemons = [each.process.pid for node in cluster.nodes for kind in node.all_processes.values() for each in kind]
    os.environ[_DAEMONS] = " ".join(map(str, daemons))


def address() -> str:
    """Return the address of the cluster, in the process of a side."""
    return os.environ[_ADDRESS]


class CpuMeter:
    """Sums up the CPU time of this process, the cluster's daemons and all that they start, while the context lasts.

    Unlike seconds, it hardly depends on what else the machine does. A thread looks often, because the kernel forgets
    the times of Ray's workers when they end: what each used after the last look is lost.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[int, float], float] = {}
        self._now: dict[tuple[int, float], float] = {}  # by process id and start
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cpu-meter", daemon=True)

    def __enter__(self) -> CpuMeter:
        self._look()
        self._before = dict(self._now)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._look()

    @property
    def seconds(self) -> float:
        """The CPU time between the beginning and the end of the context."""
        return sum(used - self._before.get(process, 0.0) for process, used in self._now.items())

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        for pid in os.environ[_DAEMONS].split():
            with contextlib.suppress(psutil.NoSuchProcess):
                processes += [psutil.Process(int(pid)), *psutil.Process(int(pid)).children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                self._now[process.pid, process.create_time()] = times.user + times.system


def connect() -> None:
    """Connect the process of a side to the cluster."""
    import logging

    import ray

    ray.init(address=address(), logging_level=logging.ERROR, log_to_driver=False)


def connect_ray_data() -> Any:
    """Connect the process of a Ray Data side to the cluster, and return the module ``ray.data``."""
    import ray.data

    connect()
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    return ray.data


def read_parquet(data: Any, folder: Path, blocks: int) -> Any:
    """Return a table as a data set of Ray Data with this number of blocks.

    Ray 2.60 has two readers of Parquet. The second one, its default, packs row groups into blocks of 128 MB and ignores
    ``override_num_blocks``: a smaller table would be one block, and one worker would do all the work.
    """
    data.DataContext.get_current().use_datasource_v2 = False
    return data.read_parquet(str(folder), override_num_blocks=blocks)
