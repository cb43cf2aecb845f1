"""Measures a stateful step: a bag, a combining value and a timer for each key.

DirectRunner, one worker and two workers run the same pipeline, with few keys and with many. A DirectRunner's run takes
10 seconds or more, so that the start of worker processes, about a second, hardly counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import _measure
import apache_beam as beam
from apache_beam.transforms.userstate import BagStateSpec, CombiningValueStateSpec, TimeDomain, TimerSpec, on_timer

CASES = {"5 keys": (300_000, 5), "5,000 keys": (60_000, 5_000)}  # elements and keys
ELEMENTS_AT_ONCE = 1000
AT_MOST_ONE_WORKER = 1.0  # times DirectRunner's time
AT_MOST_TWO_WORKERS = {"5 keys": 1.0, "5,000 keys": 0.7}  # times one worker's time

_END = TimerSpec("end", TimeDomain.WATERMARK)
_VALUES = beam.DoFn.StateParam(BagStateSpec("values", beam.coders.VarIntCoder()))
_TOTAL = beam.DoFn.StateParam(CombiningValueStateSpec("total", sum))
_TIMER = beam.DoFn.TimerParam(_END)
_KEY: Any = beam.DoFn.KeyParam


class Totals(beam.DoFn):
    """Keeps all values of a key and their sum, and emits number and sum at the end."""

    def process(self, element: tuple[int, int], values: Any = _VALUES, total: Any = _TOTAL, end: Any = _TIMER) -> None:
        values.add(element[1])
        total.add(element[1])
        end.set(1000)

    @on_timer(_END)
    def emit(self, key: int = _KEY, values: Any = _VALUES, total: Any = _TOTAL) -> Iterable[tuple[int, int, int]]:
        yield key, sum(1 for _ in values.read()), total.read()


def build(pipeline: beam.Pipeline, elements: int, keys: int) -> None:
    def numbers(start: int) -> Iterable[tuple[int, int]]:
        return ((number % keys, number) for number in range(start, start + ELEMENTS_AT_ONCE))

    def check(rows: list[tuple[int, int, int]]) -> None:
        found = len(rows), sum(row[1] for row in rows), sum(row[2] for row in rows)
        if found != (keys, elements, elements * (elements - 1) // 2):
            raise ValueError(f"keys, values and sum are {found}")

    (
        pipeline
        | beam.Create(range(0, elements, ELEMENTS_AT_ONCE))
        | beam.FlatMap(numbers).with_output_types(tuple[int, int])
        | beam.ParDo(Totals())
        | beam.combiners.ToList()
        | beam.Map(check)
    )


def side(case: str, workers: int | None) -> dict[str, float]:
    """The seconds of a case, with so many workers or on DirectRunner."""
    elements, keys = CASES[case]
    pipeline = partial(build, elements=elements, keys=keys)
    if workers is None:
        return {"seconds": _measure.run_direct(pipeline)}
    return {"seconds": _measure.run_ours(pipeline, f"--cpu_workers={workers}")}


SIDES: dict[str, Callable[[], dict[str, float]]] = {
    f"{case}, {name}": partial(side, case, workers)
    for case in CASES
    for name, workers in (("DirectRunner", None), ("one worker", 1), ("two workers", 2))
}


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    for case in CASES:
        direct, one, two = (
            results[f"{case}, {name}"]["seconds"] for name in ("DirectRunner", "one worker", "two workers")
        )
        _measure.print_figure(f"{case}: one worker / DirectRunner", one / direct, at_most=AT_MOST_ONE_WORKER)
        _measure.print_figure(f"{case}: two workers / one", two / one, at_most=AT_MOST_TWO_WORKERS[case])


if __name__ == "__main__":
    _measure.main(SIDES, report)
