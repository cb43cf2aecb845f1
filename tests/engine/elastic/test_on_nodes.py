"""A run on a real cluster whose nodes join while it lasts, and are given back when they have nothing to do."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.pvalue import AsSingleton

from luminosity import LuminosityRunner
from tests.fake_cluster import FakeCluster, fake_cluster
from tests.processes import files_of_luminosity, wait_for
from tests.runners import IS_CLUSTER, finished

pytestmark = [
    pytest.mark.alone,
    pytest.mark.timeout(400),
    pytest.mark.skipif(IS_CLUSTER, reason="starts a cluster of its own, whose nodes join later"),
]

_PATIENCE_S = 240
_ELEMENTS = 60
_NODES = 3


class _Meet(beam.DoFn):
    """Notes on which nodes it runs. Each element waits until there are workers on all of them."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def process(self, number: int) -> Iterator[tuple[int, bytes]]:
        seen = os.path.join(self._folder, "seen")
        os.makedirs(os.path.join(seen, tempfile.gettempdir().replace("/", "-")), exist_ok=True)
        deadline = time.monotonic() + _PATIENCE_S
        while len(os.listdir(seen)) < _NODES and time.monotonic() < deadline:
            time.sleep(0.02)
        yield number, bytes([number]) * 150_000  # travels as an object, which stays on its node


def _wait(number: int, folder: str) -> int:
    wait_for(lambda: os.path.exists(os.path.join(folder, "end")), _PATIENCE_S)
    return number


def _check(pair: tuple[int, bytes], waited: int, folder: str) -> None:
    number, payload = pair
    assert payload == bytes([number]) * 150_000
    Path(folder, "checked", f"{number}").write_text(f"{waited}")


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with fake_cluster((2,)) as made:
        yield made


def test_nodes_that_join_get_workers_and_are_given_back_with_their_blocks_elsewhere(
    cluster: FakeCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="luminosity.engine")
    for name in ("seen", "checked"):
        (tmp_path / name).mkdir()
    flags = [f"--ray_address={cluster.address}", "--progress=off", "--run_dir=off", "--idle_timeout=1s"]
    pipeline = beam.Pipeline(LuminosityRunner(), PipelineOptions(flags))
    waited = pipeline | "One" >> beam.Create([1]) | "Wait" >> beam.Map(_wait, str(tmp_path))
    sent = pipeline | beam.Create(range(_ELEMENTS)) | beam.Reshuffle() | beam.ParDo(_Meet(str(tmp_path)))
    _ = sent | "Send" >> beam.Reshuffle() | "Check" >> beam.Map(_check, AsSingleton(waited), str(tmp_path))
    result = pipeline.run()
    try:
        assert wait_for(lambda: bool(os.listdir(tmp_path / "seen")), _PATIENCE_S)
        for _ in range(_NODES - 1):
            cluster.add(1)
        assert wait_for(lambda: len(os.listdir(tmp_path / "seen")) == _NODES, _PATIENCE_S), caplog.text
        assert wait_for(lambda: caplog.text.count("is given back") == _NODES - 1, _PATIENCE_S), caplog.text
        for number in range(1, _NODES):
            assert not files_of_luminosity(cluster.temporary_folder(number))
            cluster.kill(cluster.nodes[number])  # its blocks are elsewhere
        (tmp_path / "end").touch()
        finished(result)
    finally:
        result.cancel()
    assert sorted(map(int, os.listdir(tmp_path / "checked"))) == list(range(_ELEMENTS))
    assert "BlockLost" not in caplog.text
