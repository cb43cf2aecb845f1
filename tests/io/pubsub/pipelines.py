"""Runs pipelines over a fake Pub/Sub until something has happened."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity.testing import FakePubSub
from tests.processes import wait_for

__all__ = ["LONG_S", "options", "run_until", "running", "script", "texts"]

LONG_S = 90.0  # for what takes seconds on a machine that does nothing else


def options(*more: str, is_streaming: bool = True) -> PipelineOptions:
    words = ["--runner=luminosity.LuminosityRunner", "--progress=off", "--cpu_workers=2", *more]
    return PipelineOptions([*words, "--streaming"] if is_streaming else words)


@contextlib.contextmanager
def running(build: Callable[[beam.Pipeline], Any], *more: str) -> Iterator[Any]:
    """Run a pipeline in the context, which gets its result."""
    pipeline = beam.Pipeline(options=options(*more))
    build(pipeline)
    result: Any = pipeline.run()
    try:
        yield result
    finally:
        result.cancel()


def run_until(build: Callable[[beam.Pipeline], Any], condition: Callable[[], Any], *more: str) -> None:
    """Run a pipeline until the condition holds."""
    with running(build, *more):
        assert wait_for(condition, LONG_S), "the pipeline did not do it"


def texts(pubsub: FakePubSub, topic: str) -> list[str]:
    return [message.data.decode() for message in pubsub.messages(topic)]


@contextlib.contextmanager
def script(code: str | Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a file, a module, or the code that follows, in a process of its own; end it at the end."""
    command = [str(code)] if isinstance(code, Path) else ["-m", code] if code else ["-c"]
    process = subprocess.Popen(
        [sys.executable, *command, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            _, said = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            _, said = process.communicate()
        print(said, file=sys.stderr)  # shown if the test has failed
