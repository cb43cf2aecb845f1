"""A real Ray cluster of three nodes on this machine: each with daemons, an object store and temporary folders of its own.

``LUMINOSITY_TEST_RAY=start`` makes pytest start one for its session, and ``LUMINOSITY_TEST_RAY=HOST:PORT`` names one
that runs. All tests run their pipelines there then: see ``runners.py``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["TestCluster", "three_nodes"]

_NODES = 3
_CPUS = 2  # of each node
_OBJECT_STORE = 100_000_000  # bytes of each node; Ray's least is 75 MB
_MEMORY = 4_000_000_000  # bytes that each node declares; nothing enforces them
# Before Ray is imported: no reports to its makers, and no process killed because others use the machine's memory.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_allow_out_of_band_object_ref_serialization": "0",  # as the runner sets it: a leak is an error
}


@dataclass(frozen=True)
class TestCluster:
    """A running cluster."""

    __test__ = False  # not a class of tests

    address: str
    """The head's HOST:PORT, for ``--ray_address``."""
    folder: Path
    """All files of the cluster. ``tmp0`` to ``tmp2`` in it are the temporary folders of the nodes' processes."""
    cluster: Any
    """Ray's own object."""

    @property
    def temporary_folders(self) -> list[Path]:
        """The temporary folder of each node, the head's first."""
        return [self.folder / f"tmp{number}" for number in range(_NODES)]


@contextlib.contextmanager
def three_nodes() -> Iterator[TestCluster]:
    """Start a cluster, whose daemons and folders are gone when the context ends."""
    # Sockets lie in the folder, and their paths may have at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="lt", dir="/tmp"))
    (folder / "ray").mkdir()  # Ray notes the cluster's address there
    with _environment({**_ENVIRONMENT, "RAY_TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(_import_path())}):
        from ray.cluster_utils import Cluster

        cluster: Any = Cluster()
        try:
            for number in range(_NODES):
                temporary = folder / f"tmp{number}"
                temporary.mkdir()
                cluster.add_node(
                    num_cpus=_CPUS,
                    memory=_MEMORY,
                    object_store_memory=_OBJECT_STORE,
                    temp_dir=str(folder / f"n{number}"),
                    env_vars={"TMPDIR": str(temporary)},
                    **({} if number else {"include_dashboard": False}),
                )
            yield TestCluster(cluster.address, folder, cluster)
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def _import_path() -> list[str]:
    """Return the folders from which this process imports our modules and the tests: nodes have them installed."""
    return [str(Path(__file__).parents[1]), *(entry for entry in sys.path if os.path.exists(f"{entry}/luminosity"))]


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
