"""A model in its own process leaves nothing behind, however its worker ends."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luminosity import Handler, SentenceEmbedder
from luminosity.inference.adapting import isolated
from luminosity.inference.adapting.isolated import IsolatedHandler
from luminosity.inference.host.host import ModelHost
from luminosity.inference.host.interface import LaneSettings
from tests.inference.texts import MINILM
from tests.processes import wait_for

pytestmark = pytest.mark.thorough

SCRIPT = """
import os, sys

import apache_beam as beam

from luminosity import Handler, LuminosityRunner, RunInference


class Pids(Handler):
    def load_model(self):
        return None

    def predict(self, model, batch, inference_args=None):
        if "fail" in batch:
            raise BlockingIOError("no")
        return [os.getpid() for _ in batch]


if __name__ == "__main__":
    with beam.Pipeline(runner=LuminosityRunner()) as pipeline:
        good, bad = (
            pipeline
            | beam.Create(["a", "fail", "b"])
            | RunInference(Pids()).with_exception_handling(use_subprocess=True)
        )
        _ = good | beam.Map(lambda result: print("pid", result.inference, flush=True))
        _ = bad.failed_inferences | "Bad" >> beam.Map(lambda letter: print("letter", letter[1][1], flush=True))
"""


def test_the_process_ends_with_its_worker_and_without_a_word(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # Standard error is a pipe, which stays open as long as any process of the run lives.
    done = subprocess.run([sys.executable, script, "--progress=off"], capture_output=True, text=True, timeout=200)

    assert done.returncode == 0, done.stderr
    assert "letter BlockingIOError('no')" in done.stdout
    assert "leaked" not in done.stderr
    pids = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("pid")]
    assert len(pids) == 2
    assert wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), timeout_s=60)


class SecondLoadFails(Handler[str, str, str]):
    def __init__(self, loads: Path) -> None:
        super().__init__()
        self._loads = loads

    def load_model(self) -> str:
        with open(self._loads, "a") as file:
            file.write(".")
        if len(self._loads.read_text()) == 2:
            raise BlockingIOError("not now")
        return "a model"

    def predict(self, model: str, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        if "crash" in batch:
            os._exit(1)
        return [f"{model}: {example}" for example in batch]


def test_a_load_that_fails_after_a_crash_is_done_again(tmp_path: Path) -> None:
    handler = IsolatedHandler(SecondLoadFails(tmp_path / "loads"))
    model = handler.load_model()
    with pytest.raises(RuntimeError, match="ended"):
        handler.predict(model, ["crash"])
    with pytest.raises(BlockingIOError):
        handler.predict(model, ["b"])
    assert handler.predict(model, ["c"]) == ["a model: c"]


class NeverLoads(Handler[str, str, str]):
    def load_model(self) -> str:
        time.sleep(600)
        return "a model"


def test_a_process_that_is_given_up_before_it_is_started_does_not_stay() -> None:
    child = isolated._Child(NeverLoads())
    child.kill()
    with pytest.raises(RuntimeError, match="ended"):
        child.call("load")


def test_loads_that_hang_leave_one_process_at_most() -> None:
    host = ModelHost()
    lane = host.enter(0, lambda: IsolatedHandler(NeverLoads()), LaneSettings(timeout=0.5))
    before = set(multiprocessing.active_children())
    for _ in range(3):
        session = host.open()
        session.submit(lane, ["a"], np.ones(1), None)
        errors = [outcome.error for outcomes in session.finish() for outcome in outcomes]
        assert [type(error) for error in errors] == [TimeoutError]
        session.close()
    wait_for(lambda: len(set(multiprocessing.active_children()) - before) <= 1, timeout_s=60)
    hanging = set(multiprocessing.active_children()) - before
    for process in hanging:
        process.kill()
    assert len(hanging) <= 1


def test_a_text_encoder_of_another_process_gets_padded_batches() -> None:
    """This process has no device, so it can't say whether that one needs no padding."""
    inner = SentenceEmbedder(MINILM, device="CPU")
    handler = IsolatedHandler(inner)
    assert not handler.sums_costs
    model = handler.load_model()
    try:
        batch = handler.collate(handler.prepare(["one text", "two"]))
        assert "input_ids" in batch.inputs
        assert np.shape(handler.predict(model, batch)) == (2, 384)
    finally:
        model.kill()
    assert "packing" not in vars(inner) or inner.packing is None
