"""Tests of the connection to a Ray cluster: which one it is, who closes it, and what is said if there is none."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import psutil
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import LuminosityRunner
from luminosity.engine.cluster.driver import ray_connection
from luminosity.engine.cluster.driver.ray_calls import nodes
from luminosity.engine.cluster.driver.ray_connection import connect
from luminosity.engine.explain.explain import plan_pipeline
from luminosity.errors import MissingExtra, OptionError
from tests.fake_cluster import FakeCluster, fake_cluster

_PATIENCE_S = 120
_LOCAL = """
import os, ray
from luminosity.engine.cluster.driver.ray_calls import nodes
from luminosity.engine.cluster.driver.ray_connection import connect

with connect("local", accelerators=3) as found, connect("local") as again:
    (node,) = nodes()
    assert found.is_local and again.address == found.address and node.is_driver
    print(node.accelerators, found._shared.folder.path)
    assert "PYTHONBREAKPOINT" not in os.environ, "breakpoint() must stay what it is without Ray"
assert not ray.is_initialized()
"""
_ON_ONE_MACHINE = """
import sys
import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import LuminosityRunner

with beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off", "--cpu_workers=1"])) as pipeline:
    pipeline | beam.Create([1]) | beam.Map(lambda number: number)
for_clusters = ("ray", "luminosity.engine.cluster")
print([name for name in for_clusters if name in sys.modules])
"""


@pytest.fixture
def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def silent_server() -> Iterator[int]:
    """The port of a server that takes connections and never says anything."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_run_on_one_machine_imports_nothing_for_clusters() -> None:
    command = [sys.executable, "-c", _ON_ONE_MACHINE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
    assert done.stdout == "[]\n", done.stderr


def test_an_address_where_nothing_answers(free_port: int) -> None:
    with pytest.raises(OptionError, match=rf"nothing answers at 127.0.0.1:{free_port} \(Connection refused\)"):
        connect(f"127.0.0.1:{free_port}")


def test_an_address_of_something_else(silent_server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_connection, "_ANSWER_S", 0.3)
    with pytest.raises(OptionError, match=r"that does not speak gRPC, expected the head of a Ray cluster"):
        connect(f"127.0.0.1:{silent_server}")


def test_ray_is_named_if_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"ray is not installed; .*pip install 'cryptography>=42' 'ray>=2.55'"):
        connect("auto")


def test_the_client_of_ray_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(OptionError, match=r"RAY_ADDRESS=ray://head:10001: .*ray job submit"):
        connect("auto")


def test_a_ray_that_has_crashed_is_not_waited_for(
    free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for folder in (tmp_path, tmp_path / "ray"):  # where versions of Ray note the address
        folder.mkdir(exist_ok=True)
        (folder / "ray_current_cluster").write_text(f"127.0.0.1:{free_port}")
    # Others may run a Ray on this machine.
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set[str])
    with pytest.raises(OptionError, match=rf"--ray_address=auto: nothing answers at .*:{free_port}"):
        connect("auto")


def test_a_machine_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set[str])
    with pytest.raises(OptionError, match=r"found no running Ray on this machine.*--ray_address=local"):
        connect("auto")


@pytest.mark.alone
def test_a_ray_on_this_machine_ends_with_its_last_user() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOCAL], capture_output=True, text=True, timeout=_PATIENCE_S, check=True
    )
    accelerators, folder = done.stdout.split()
    assert (accelerators, done.stderr) == ("3.0", "")
    assert not Path(folder).exists()
    left = [each.info["cmdline"] for each in psutil.process_iter(["cmdline"]) if folder in str(each.info["cmdline"])]
    assert left == []


@pytest.mark.alone
def test_a_connection_to_three_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    with fake_cluster((2, 1)) as cluster:
        cluster.add(1, "T4", num_gpus=2)
        try:
            _runs_share_one_connection(cluster, ray)
            _the_connection_of_the_script_is_used(cluster, ray)
            _a_pipeline_is_planned_for_the_nodes(cluster)
            monkeypatch.setattr(ray, "__version__", "1.0.0")
            with pytest.raises(OptionError, match=r"ersion mismatch.*expected the same versions of Ray and Python"):
                connect(cluster.address)
            assert not ray.is_initialized()
        finally:
            ray.shutdown()  # the cluster refuses to end while this process is connected


def _runs_share_one_connection(cluster: FakeCluster, ray: Any) -> None:
    first = connect(cluster.address)
    found = {(node.cores, node.accelerators, node.accelerator_type, node.is_driver) for node in nodes()}
    assert found == {(2.0, 0.0, "", True), (1.0, 0.0, "", False), (1.0, 2.0, "T4", False)}
    assert all(node.object_store_bytes == 100_000_000 and node.ram_bytes > 0 for node in nodes())
    others: list[ray_connection.Session] = []
    thread = threading.Thread(target=lambda: others.append(connect("auto")))
    thread.start()
    thread.join(_PATIENCE_S)
    (second,) = others
    assert (second.address, second.namespace) == (first.address, first.namespace)
    with pytest.raises(OptionError, match=r"found another run of this process on a cluster at "):
        connect("10.0.0.1:6379")
    first.close()
    first.close()
    assert ray.is_initialized()
    second.close()
    assert not ray.is_initialized()


def _the_connection_of_the_script_is_used(cluster: FakeCluster, ray: Any) -> None:
    ray.init(cluster.address, log_to_driver=False)
    try:
        with connect("auto") as found:
            assert not found.is_local
        with pytest.raises(OptionError, match=r"--ray_address=local: found that this script is connected to Ray"):
            connect("local")
        assert ray.is_initialized()
    finally:
        ray.shutdown()


def _a_pipeline_is_planned_for_the_nodes(cluster: FakeCluster) -> None:
    options = PipelineOptions([f"--ray_address={cluster.address}", "--progress=off"])
    pipeline = beam.Pipeline(runner=LuminosityRunner(), options=options)
    numbers = pipeline | beam.Create([1, 2, 3])
    numbers | "Infer" >> beam.Map(str).with_resource_hints(accelerator="type:nvidia-tesla-t4;count:1")
    plan = plan_pipeline(pipeline).explanation
    assert {pool.name: pool.workers for pool in plan.pools} == {"cpu": 4, "device T4": 2}
