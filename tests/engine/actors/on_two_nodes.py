"""A driver that looks at two nodes through agents and workers, prints what it sees, and kills itself."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import urllib.request
from typing import Any

from luminosity.engine.actors.node_actor import NodeAgent
from luminosity.engine.cluster import shipping
from luminosity.inference.files.local import cached_copy
from luminosity.inference.files.source import Source, SourceFile
from luminosity.inference.ipc.channel import Channel
from luminosity.inference.ipc.client import connect

HOST_ID = "5" * 32
_TIMEOUT_S = 120


class Worker:
    """What a worker sees of its node."""

    def __init__(self, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        shipped = shipping.shipped()
        sys.path[:] = shipped.import_path
        os.chdir(shipped.working_folder)
        self._channel: Channel | None = None

    def read(self, path: str) -> str:
        with open(path) as file:
            return f"{os.path.abspath(path)}\n{file.read()}"

    def fetch(self, url: str, size: int) -> str:
        return cached_copy(Source(url, "model.bin", (SourceFile(url, "model.bin", size, 1.0),), _open))

    def host(self) -> int:
        """The process id of the model host that serves this worker."""
        self._channel = self._channel or connect(HOST_ID, "tests.inference.ipc.ipc_services:echo")
        self._channel.send(("pid", None))
        return self._channel.recv(_TIMEOUT_S)


def _open(url: str) -> Any:
    return urllib.request.urlopen(url, timeout=_TIMEOUT_S)


def main(address: str, url: str, size: int) -> None:
    import ray

    with tempfile.TemporaryDirectory() as scratch:
        ray.init(address=address, runtime_env=shipping.runtime_env(scratch), log_to_driver=False)

    def get(references: list[Any]) -> list[Any]:
        return ray.get(references, timeout=_TIMEOUT_S)

    def on(number: int, made: Any, *arguments: Any) -> Any:
        return ray.remote(made).options(num_cpus=0, resources={f"node{number}": 1}).remote(*arguments)

    agents = [on(number, NodeAgent, "0123456789abcdef", {"main-classes": b"classes"}) for number in range(2)]
    folders, environments = get([a.folder.remote() for a in agents]), get([a.environment.remote() for a in agents])
    workers = [on(number, Worker, environments[number]) for number in (0, 0, 1, 1)]
    seen: dict[str, Any] = {
        "nodes": [node["NodeID"] for node in ray.nodes()],
        "folders": folders,
        "samples": [sample.to_json() for sample in get([agent.sample.remote() for agent in agents])],
        "wrong": get([ray.remote(shipping.check_versions).remote({**shipping.versions(), "apache-beam": "1.0"})]),
        "read": get([worker.read.remote("README.md") for worker in workers]),
        "fetched": get([worker.fetch.remote(url, size) for worker in workers]),
        "hosts": get([worker.host.remote() for worker in workers]),
    }
    for worker in workers[::2]:
        ray.kill(worker)
    seen["hosts_later"] = get([worker.host.remote() for worker in workers[1::2]])
    print(json.dumps(seen), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
