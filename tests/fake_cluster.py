"""A Ray cluster whose nodes are processes of this machine, each with folders of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

_STORE_BYTES = 100_000_000  # the least that Ray takes is 75 MB


class FakeCluster:
    """The nodes, first the head. Each has its own temporary folder, model cache and folder of Ray's.

    Node N has the custom resource ``nodeN``, so that a test can place an actor there.
    """

    def __init__(self, folder: str) -> None:
        from ray.cluster_utils import Cluster

        self.folder = folder  # short: Ray's sockets lie below it
        self.nodes: list[Any] = []
        self._cluster: Any = Cluster()

    @property
    def address(self) -> str:
        return self._cluster.address

    def add(self, cpus: int = 2, accelerator_type: str = "", **more: Any) -> Any:
        types = {f"accelerator_type:{accelerator_type}": 1} if accelerator_type else {}
        number = len(self.nodes)
        own = os.path.join(self.folder, str(number))
        os.makedirs(os.path.join(own, "tmp"))
        node = self._cluster.add_node(
            num_cpus=cpus,
            object_store_memory=_STORE_BYTES,
            include_dashboard=False,
            resources={f"node{number}": 100, **types},
            temp_dir=os.path.join(own, "ray"),
            env_vars={"TMPDIR": os.path.join(own, "tmp"), "XDG_CACHE_HOME": os.path.join(own, "cache")},
            **more,
        )
        self.nodes.append(node)
        return node

    def kill(self, node: Any) -> None:
        """Kill all processes of a node at once."""
        self._cluster.remove_node(node, allow_graceful=False)

    def temporary_folder(self, number: int) -> str:
        return os.path.join(self.folder, str(number), "tmp")

    def close(self) -> None:
        self._cluster.shutdown()


@contextlib.contextmanager
def fake_cluster(cpus: Sequence[int] = (2, 2)) -> Iterator[FakeCluster]:
    """A cluster with a node for each number of cores; its processes and folders are gone afterwards."""
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_MEMORY_MONITOR": "1", "RAY_memory_monitor_refresh_ms": "0"}
    quiet["RAY_allow_out_of_band_object_ref_serialization"] = "0"  # a leak is an error, as in a run that imports Ray
    quiet["RAY_worker_niceness"] = "0"  # otherwise any other process of this machine goes first
    # Ray changes more: what breakpoint() does, and what SIGTERM does in a process that connects.
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    os.environ.update(quiet)
    folder = tempfile.mkdtemp(prefix="lum", dir="/tmp")
    os.makedirs("/tmp/ray", exist_ok=True)  # where Ray writes the head's address, whatever folder the head has
    try:
        with contextlib.closing(FakeCluster(folder)) as cluster:
            for each in cpus:
                cluster.add(each)
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.environ.clear()
        os.environ.update(before)
        signal.signal(signal.SIGTERM, handler)
