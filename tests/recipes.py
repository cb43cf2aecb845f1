"""Small pipelines described by data, so that they can be drawn at random and built for any runner.

Every operation takes numbers and gives numbers, whatever the order in which they come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
from apache_beam.coders import VarIntCoder
from apache_beam.pvalue import AsDict, AsIter, AsSingleton
from apache_beam.transforms import window
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    CombiningValueStateSpec,
    TimerSpec,
    on_timer,
)

from tests.marks import note

_MODULUS = 997  # numbers stay small, however many operations there are

_BAG = BagStateSpec("bag", VarIntCoder())
_COUNT = CombiningValueStateSpec("count", sum)
_END = TimerSpec("end", TimeDomain.WATERMARK)
_BAG_PARAM = beam.DoFn.StateParam(_BAG)
_COUNT_PARAM = beam.DoFn.StateParam(_COUNT)
_END_PARAM = beam.DoFn.TimerParam(_END)


@dataclass(frozen=True)
class Recipe:
    """Numbers, in fixed windows if `window_s` is given, through operations that each have a parameter."""

    data: tuple[int, ...]
    window_s: int | None
    operations: tuple[tuple[str, int], ...]
    seconds_each: float = 0.0  # how long a number takes at the start and after each operation
    at_work: str = ""  # a file in which these steps note the number of their process

    def build(self, pipeline: beam.Pipeline) -> beam.PCollection:
        """Its numbers, each with its window and its time."""
        wait = beam.Map(_wait, seconds=self.seconds_each, at_work=self.at_work)
        numbers = pipeline | beam.Create(self.data) | "Wait" >> wait
        if self.window_s is not None:
            numbers = (
                numbers
                | "Timestamp" >> beam.Map(lambda x: window.TimestampedValue(x, x))
                | "Window" >> beam.WindowInto(window.FixedWindows(self.window_s))
            )
        for i, (name, parameter) in enumerate(self.operations):
            label = f"{i} {name}"
            numbers = numbers | label >> beam.ptransform_fn(OPERATIONS[name])(parameter) | f"{label}, wait" >> wait
        return numbers | "With window and time" >> beam.Map(_with_window_and_time)


def _wait(x: int, seconds: float, at_work: str) -> int:
    if at_work:
        note(at_work, os.getpid())
    time.sleep(seconds)
    return x


def _with_window_and_time(x: int, in_window: Any = beam.DoFn.WindowParam, at: Any = beam.DoFn.TimestampParam) -> Any:
    return x, str(in_window), at.micros


def _keyed(numbers: beam.PCollection, keys: int) -> beam.PCollection:
    return numbers | "Key" >> beam.Map(lambda x: (x % keys, x)).with_output_types(tuple[int, int])


def _map(numbers: beam.PCollection, n: int) -> beam.PCollection:
    return numbers | beam.Map(lambda x: (3 * x + n) % _MODULUS)


def _filter(numbers: beam.PCollection, n: int) -> beam.PCollection:
    return numbers | beam.Filter(lambda x: x % n != 0)


def _flat_map(numbers: beam.PCollection, n: int) -> beam.PCollection:
    return numbers | beam.FlatMap(lambda x: [x + i for i in range(x % n)])


def _flatten(numbers: beam.PCollection, n: int) -> beam.PCollection:
    return (numbers, numbers | beam.Map(lambda x: x + n)) | beam.Flatten()


def _reshuffle(numbers: beam.PCollection, n: int) -> beam.PCollection:
    return numbers | beam.Reshuffle()


def _group(numbers: beam.PCollection, n: int) -> beam.PCollection:
    grouped = _keyed(numbers, n) | beam.GroupByKey()
    return grouped | beam.MapTuple(lambda key, xs: (key + sum((x + 1) ** 2 for x in xs)) % _MODULUS)


def _combine(numbers: beam.PCollection, n: int) -> beam.PCollection:
    return _keyed(numbers, n) | beam.CombinePerKey(sum) | beam.MapTuple(lambda key, x: (key + x) % _MODULUS)


def _singleton(numbers: beam.PCollection, n: int) -> beam.PCollection:
    total = numbers | beam.CombineGlobally(sum).without_defaults()
    side = AsSingleton(total, default_value=0)
    return numbers | beam.Map(lambda x, total: (x + n * total) % _MODULUS, total=side)


def _iterable(numbers: beam.PCollection, n: int) -> beam.PCollection:
    side = AsIter(numbers | "Every" >> beam.Filter(lambda x: x % n == 0))
    return numbers | beam.Map(lambda x, others: (x + sum(others)) % _MODULUS, others=side)


def _dictionary(numbers: beam.PCollection, n: int) -> beam.PCollection:
    side = AsDict(_keyed(numbers, n) | beam.CombinePerKey(max))
    return numbers | beam.Map(lambda x, largest: (x + largest[x % n]) % _MODULUS, largest=side)


class Count(beam.DoFn):
    """Numbers what comes, all at the window's end: which element gets which number is left open."""

    def process(
        self, element: tuple[int, int], count: Any = _COUNT_PARAM, in_window: Any = beam.DoFn.WindowParam
    ) -> Iterable[window.TimestampedValue]:
        count.add(1)
        yield window.TimestampedValue(10 * count.read() + element[0], in_window.max_timestamp())


class Gather(beam.DoFn):
    """Keeps what comes and gives its sum of squares when the window ends."""

    def process(
        self,
        element: tuple[int, int],
        bag: Any = _BAG_PARAM,
        end: Any = _END_PARAM,
        in_window: Any = beam.DoFn.WindowParam,
    ) -> None:
        bag.add(element[1])
        end.set(in_window.max_timestamp())

    @on_timer(_END)
    def at_the_end(self, key: int = beam.DoFn.KeyParam, bag: Any = _BAG_PARAM) -> Iterable[int]:
        yield (key + sum((x + 1) ** 2 for x in bag.read())) % _MODULUS
        bag.clear()


def _count(numbers: beam.PCollection, n: int) -> beam.PCollection:
    return _keyed(numbers, n) | beam.ParDo(Count())


def _gather(numbers: beam.PCollection, n: int) -> beam.PCollection:
    return _keyed(numbers, n) | beam.ParDo(Gather())


OPERATIONS: dict[str, Callable[[beam.PCollection, int], beam.PCollection]] = {
    "map": _map,
    "filter": _filter,
    "flat map": _flat_map,
    "flatten": _flatten,
    "reshuffle": _reshuffle,
    "group": _group,
    "combine": _combine,
    "singleton": _singleton,
    "iterable": _iterable,
    "dictionary": _dictionary,
    "count": _count,
    "gather": _gather,
}
