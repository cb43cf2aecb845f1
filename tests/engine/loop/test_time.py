"""Tests of event time: which elements have arrived when a timer fires."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import BagStateSpec, TimerSpec, on_timer

from tests.runners import collect, new_pipeline

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("leaves_nothing")]

_BAG = beam.DoFn.StateParam(BagStateSpec("bag", beam.coders.VarIntCoder()))
_END = TimerSpec("end", TimeDomain.WATERMARK)
_END_PARAM = beam.DoFn.TimerParam(_END)


class GatherToTheEnd(beam.DoFn):
    """Sets its timer to the end of the window, which is also the timestamp of a grouping's output."""

    def process(
        self, element: tuple[int, int], bag: Any = _BAG, end: Any = _END_PARAM, window: Any = beam.DoFn.WindowParam
    ) -> None:
        bag.add(element[1])
        end.set(window.max_timestamp())

    @on_timer(_END)
    def at_the_end(self, bag: Any = _BAG) -> Iterable[list[int]]:
        yield sorted(bag.read())


def slowly(n: int, _: Any) -> tuple[int, int]:
    time.sleep(0.05)  # so that the stateful step is idle in between
    return 0, n


def test_a_timer_waits_for_elements_of_its_own_time(tmp_path: Path) -> None:
    def build(pipeline: beam.Pipeline) -> beam.PCollection:
        return (
            pipeline
            | beam.Create([(n, n) for n in range(20)])
            | beam.GroupByKey()  # its output has the timestamp of the timer
            | beam.MapTuple(slowly)
            | beam.ParDo(GatherToTheEnd())
        )

    assert collect(build, tmp_path, new_pipeline("--cpu_workers=2")) == [list(range(20))]
