"""Three batch pipelines and a stream, in turns without and with ``--checkpoint_dir``: what checkpoints cost.

    [PAIRS=5] [ONLY=stream] python benchmarks/durable.py    # predictions, grouping, reshuffle, stream
    [PAIRS=5] [RECORDS=500000] ONLY=checksums python benchmarks/durable.py

The stream gets its records as fast as it takes them. A step needs so much processor time that two workers process
about 1,000 records a second, each of another key, and a stateful step counts them.

``ONLY=checksums`` runs a durable stream of records of 200 bytes whose steps do next to nothing, in turns with and
without the checksums of rows, blocks and files, which no option turns off.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import _measure
import apache_beam as beam
import numpy as np
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.ml.inference.base import ModelHandler
from apache_beam.transforms.core import RestrictionProvider
from apache_beam.transforms.userstate import CombiningValueStateSpec

from luminosity import RunInference
from luminosity.engine.durable import tables

_PAIRS = int(os.environ.get("PAIRS", "5"))
_AT_MOST = {"predictions": 1.10, "grouping": 1.10, "reshuffle": 1.10, "stream": 1.03}  # of the time without checkpoints
_RECORDS, _KEYS = 20_000, 10_000  # of the stream
_RECORD_S = 0.0018  # processor time
_MANY_RECORDS = int(os.environ.get("RECORDS", "500000"))  # of the stream whose checksums are measured
_CHECKSUMS_AT_MOST = 1.03  # of the time without them
_COUNT = beam.DoFn.StateParam(CombiningValueStateSpec("count", sum))


class _Double(ModelHandler[int, int, float]):
    """A model that takes a millisecond for a batch."""

    def load_model(self) -> float:
        return 2.0

    def run_inference(
        self, batch: Sequence[int], model: float, inference_args: dict[str, Any] | None = None
    ) -> list[int]:
        time.sleep(0.001)
        return (np.asarray(batch) * model).astype(int).tolist()


def _predictions(pipeline: beam.Pipeline) -> Any:
    return pipeline | beam.Create(range(1_000_000)) | RunInference(_Double())


def _grouping(pipeline: beam.Pipeline) -> Any:
    pairs = pipeline | beam.Create(range(100)) | beam.Reshuffle() | beam.FlatMap(_pairs)
    return pairs | beam.GroupByKey() | beam.MapTuple(lambda key, values: (key, sum(map(len, values))))


def _pairs(part: int) -> Iterator[tuple[int, str]]:
    return ((number % 1000, "x" * 100) for number in range(part * 20_000, (part + 1) * 20_000))


def _reshuffle(pipeline: beam.Pipeline) -> Any:
    rows = pipeline | beam.Create(range(100)) | "Spread" >> beam.Reshuffle() | beam.FlatMap(_rows)
    return rows | beam.Reshuffle() | beam.Map(len) | beam.CombineGlobally(sum)


def _rows(part: int) -> Iterator[bytes]:
    return (bytes(200) for _ in range(20_000))


class _Numbers(RestrictionProvider):
    def initial_restriction(self, element: int) -> OffsetRange:
        return OffsetRange(0, element)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element: int, restriction: OffsetRange) -> int:
        return restriction.size()


_NUMBERS = beam.DoFn.RestrictionParam(_Numbers())


class _Source(beam.DoFn):
    """Emits numbers as a stream."""

    @beam.DoFn.unbounded_per_element()
    def process(self, element: int, tracker: Any = _NUMBERS) -> Iterator[int]:
        number = tracker.current_restriction().start
        while tracker.try_claim(number):
            yield number
            number += 1


class _CountPerKey(beam.DoFn):
    def process(self, element: tuple[int, None], count: Any = _COUNT) -> Iterator[int]:
        count.add(1)
        yield count.read()


def _work(number: int) -> tuple[int, None]:
    end = time.thread_time() + _RECORD_S
    while time.thread_time() < end:
        pass
    return number % _KEYS, None


def _stream(pipeline: beam.Pipeline) -> Any:
    numbers = pipeline | beam.Create([_RECORDS]) | beam.ParDo(_Source()).with_output_types(int) | beam.Reshuffle()
    return numbers | beam.Map(_work).with_output_types(tuple[int, None]) | beam.ParDo(_CountPerKey())


def _quick_stream(pipeline: beam.Pipeline) -> Any:
    numbers = pipeline | beam.Create([_MANY_RECORDS]) | beam.ParDo(_Source()).with_output_types(int)
    padded = numbers | beam.Map(lambda number: (number % _KEYS, bytes(200))).with_output_types(tuple[int, bytes])
    key = beam.Map(lambda pair: (pair[0], None)).with_output_types(tuple[int, None])
    return padded | beam.Reshuffle() | "Key" >> key | beam.ParDo(_CountPerKey())


_PIPELINES: dict[str, Callable[[beam.Pipeline], Any]] = {
    "predictions": _predictions,
    "grouping": _grouping,
    "reshuffle": _reshuffle,
    "stream": _stream,
    "checksums": _quick_stream,
}


def _side(name: str, *, is_durable: bool) -> dict[str, float]:
    """Run a pipeline twice, and measure the second run."""
    figures: dict[str, float] = {}
    for _ in range(2):
        with tempfile.TemporaryDirectory(dir=os.environ.get("CHECKPOINTS")) as folder:
            cpu = _cpu_seconds()
            flags = [f"--checkpoint_dir={folder}/checkpoint"] if is_durable else []
            figures = {"seconds": _measure.run_ours(_PIPELINES[name], *flags)}
            figures["cpu"] = _cpu_seconds() - cpu
    return figures


def _without_checksums() -> dict[str, float]:
    """Run the quick stream as :func:`_side` does, with zeros in place of the checksums of rows, blocks and files."""
    real = tables.row_sums, tables.content_row, tables.file_sum
    tables.row_sums = lambda rows: ((*row, 0) for row in rows)
    tables.content_row = lambda content: (*content, 0)
    tables.file_sum = lambda path: (os.path.getsize(path), 0)
    try:
        return _side("checksums", is_durable=True)
    finally:
        tables.row_sums, tables.content_row, tables.file_sum = real


def _cpu_seconds() -> float:
    """Return the CPU time of this process, where the loop runs, and of the workers that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _report(results: _measure.Results) -> None:
    _measure.print_table(results)
    if "no checksums" in results:
        sums, none = results["checksums"], results["no checksums"]
        _measure.print_figure("time / without", sums["seconds"] / none["seconds"], at_most=_CHECKSUMS_AT_MOST)
        _measure.print_figure("CPU time / without", sums["cpu"] / none["cpu"])
        _measure.print_figure("records a second", _MANY_RECORDS / sums["seconds"])
    for name, at_most in _AT_MOST.items():
        if name not in results:
            continue
        without, durable = results[name], results[f"{name}, durable"]
        _measure.print_figure(f"{name}: of the time without", durable["seconds"] / without["seconds"], at_most=at_most)
        _measure.print_figure(f"{name}: of the CPU time without", durable["cpu"] / without["cpu"])


if __name__ == "__main__":
    _SIDES: dict[str, _measure.Side] = {}
    if os.environ.get("ONLY") == "checksums":
        _SIDES = {"checksums": partial(_side, "checksums", is_durable=True), "no checksums": _without_checksums}
        _measure.main(_SIDES, _report, rounds=_PAIRS)
        sys.exit()
    for _name in [os.environ["ONLY"]] if "ONLY" in os.environ else _AT_MOST:
        _SIDES[_name] = partial(_side, _name, is_durable=False)
        _SIDES[f"{_name}, durable"] = partial(_side, _name, is_durable=True)
    _measure.main(_SIDES, _report, rounds=_PAIRS)
