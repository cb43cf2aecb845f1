"""Streams for tests: a TestStream of tables or values, and steps that note what has happened while it runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam import coders
from apache_beam.testing.test_stream import TestStream
from apache_beam.transforms import trigger
from apache_beam.transforms.window import FixedWindows, TimestampedValue

from tests.runners import run


def stream_of(*events: Any, element_type: Any = None) -> TestStream:
    """Return a TestStream: a list holds elements, each ``(value, timestamp)``; a number moves the watermark."""
    coder: Any = None if element_type is None else coders.registry.get_coder(element_type)
    made = TestStream() if coder is None else TestStream(coder=coder)
    for event in events:
        if isinstance(event, list):
            made = made.add_elements([TimestampedValue(value, timestamp) for value, timestamp in event])
        else:
            made = made.advance_watermark_to(event)
    made = made.advance_watermark_to_infinity()
    return made if element_type is None else made.with_output_types(element_type)


def tables(*numbers: int) -> list[tuple[pa.RecordBatch, int]]:
    """Return tables with one row each, at the second of its number."""
    return [(pa.record_batch({"n": [number]}), number) for number in numbers]


def early_and_late_panes(size_s: int = 10, allowed_lateness_s: int = 50) -> Any:
    """Return fixed windows of which every element is a pane: early, on time or late."""
    return beam.WindowInto(
        FixedWindows(size_s),
        trigger=trigger.AfterWatermark(early=trigger.AfterCount(1), late=trigger.AfterCount(1)),
        accumulation_mode=trigger.AccumulationMode.DISCARDING,
        allowed_lateness=allowed_lateness_s,
    )


class Notes:
    """Values that steps write down, in order; a step may look at the world when an element passes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, value: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(value) + "\n")

    def step(self, note: Callable[[Any], Any]) -> Any:
        """Return a transform that writes down ``note(element)`` for each element."""
        return beam.Map(lambda element: self.write(note(element)))

    def read(self) -> list[Any]:
        return [json.loads(line) for line in self._path.read_text().splitlines()] if self._path.exists() else []


def run_stream(build: Callable[[beam.Pipeline], Any], *flags: str) -> Any:
    """Run a pipeline in this process, which takes no time to start workers."""
    return run(build, "--debug", *flags)


def names_in(folder: Path) -> list[str]:
    """Return the visible files below a folder."""
    if not folder.exists():
        return []
    found: Iterable[Path] = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in found if not any(part.startswith(".") for part in path.parts))


def wait_for(condition: Callable[[], bool], seconds: float = 100.0) -> bool:
    """Wait until the condition holds; return False if it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
