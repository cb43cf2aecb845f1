"""Calls of a service for each element: answers, clients, retries, time-outs, windows and dead letters."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.testing.test_stream import TestStream
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms.window import FixedWindows, SlidingWindows, TimestampedValue

from luminosity import MapAsync
from luminosity.errors import InvalidArgument, InvalidType
from tests.marks import note, notes
from tests.runners import run

_LONG_S = 3600.0  # never waited for


async def doubled(number: int) -> int:
    await asyncio.sleep(0.001 * (number % 3))
    return 2 * number


def doubled_in_a_thread(number: int) -> int:
    return 2 * number


class Doubles:
    async def __call__(self, number: int) -> int:
        return 2 * number


async def doubled_with(factor: int, number: int) -> int:
    return factor * number


@pytest.mark.parametrize("fn", [doubled, doubled_in_a_thread, Doubles(), functools.partial(doubled_with, 2)])
@pytest.mark.parametrize("ordered", [False, True])
def test_every_element_has_its_answer(fn: Any, ordered: bool) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        answers = pipeline | beam.Create(range(100)) | MapAsync(fn, capacity=7, ordered=ordered)
        assert_that(answers, equal_to([2 * number for number in range(100)]))

    run(build)


class Together:
    """Ends a call when so many are on their way at once, and counts how many were."""

    def __init__(self, expected: int) -> None:
        self._expected = expected

    async def __aenter__(self) -> Together:
        self._now, self.most = 0, 0
        self._enough = asyncio.Event()
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def call(self) -> int:
        self._now += 1
        self.most = max(self.most, self._now)
        if self._now == self._expected:
            self._enough.set()
        await self._enough.wait()
        await asyncio.sleep(0)  # others may come, if there is room
        self._now -= 1
        return self.most


async def at_once(_: int, client: Together) -> int:
    return await client.call()


def test_as_many_calls_at_once_as_there_is_capacity_for() -> None:
    def build(pipeline: beam.Pipeline) -> None:
        numbers = pipeline | beam.Create([range(50)]) | beam.FlatMap(lambda several: several)
        most = numbers | MapAsync(at_once, client=functools.partial(Together, 5), capacity=5)
        assert_that(most | beam.CombineGlobally(max), equal_to([5]))

    run(build)


class Noted:
    """A client that notes when it is entered and left."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Noted:
        note(self._path, "entered")
        return self

    def __exit__(self, *_: object) -> None:
        note(self._path, "left")


def with_client(number: int, client: Noted) -> int:
    assert isinstance(client, Noted)
    return number


def test_a_client_is_shared_and_left(tmp_path: Path) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        client = functools.partial(Noted, tmp_path / "client")
        answers = pipeline | beam.Create([1, 2, 3]) | MapAsync(with_client, client=client)
        assert_that(answers, equal_to([1, 2, 3]))

    run(build, "--cpu_workers=1")
    found = notes(tmp_path / "client")
    assert found[0] == "entered"
    assert found.count("entered") == found.count("left") < 3


class FailsFirst:
    """Fails the first calls of each element."""

    def __init__(self, path: Path, failures: int, error: type[Exception] = OSError) -> None:
        self._path, self._failures, self._error = path, failures, error

    async def __call__(self, name: str) -> str:
        note(self._path / name)
        if len(notes(self._path / name)) <= self._failures:
            raise self._error(f"not yet: {name}")
        return name


def counters(result: Any) -> dict[str, int]:
    return {each.key.metric.name: each.committed for each in result.metrics().query()["counters"] if each.committed}


def test_calls_are_made_again(tmp_path: Path) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        answers = pipeline | beam.Create(["a", "b"]) | MapAsync(FailsFirst(tmp_path, 2), retries=2)
        assert_that(answers, equal_to(["a", "b"]))

    found = counters(run(build))
    assert (found["calls_answered"], found["calls_retried"]) == (2, 4)


def test_what_fails_for_good_is_a_dead_letter(tmp_path: Path) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        calls = MapAsync(FailsFirst(tmp_path, 9, KeyError), retries=3, retry_on=(OSError,)).with_exception_handling()
        both: Any = pipeline | beam.Create(["a", "b"]) | calls
        answers, failures = both
        assert_that(answers, equal_to([]), label="answers")
        told = failures | beam.MapTuple(lambda name, error: (name, error[0], error[1], "not yet" in error[2][-1]))
        expected = [(name, KeyError, f"KeyError('not yet: {name}')", True) for name in "ab"]
        assert_that(told, equal_to(expected), label="failures")

    assert counters(run(build))["calls_failed"] == 2
    assert len(notes(tmp_path / "a")) == 1  # a KeyError is not retried


async def never(_: int) -> None:
    await asyncio.sleep(_LONG_S)


def never_in_a_thread(_: int) -> None:
    threading.Event().wait(1.0)  # longer than the time-out; its thread ends with it


@pytest.mark.parametrize("fn", [never, never_in_a_thread])
def test_a_call_that_takes_too_long(fn: Any) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        calls = MapAsync(fn, timeout_s=0.05, retries=1).with_exception_handling()
        both: Any = pipeline | beam.Create([1]) | calls
        answers, failures = both
        assert_that(answers, equal_to([]), label="answers")
        told = failures | beam.MapTuple(
            lambda number, error: (number, error[0], "did not return within 0.05 s" in error[1])
        )
        assert_that(told, equal_to([(1, TimeoutError, True)]), label="failures")

    assert counters(run(build))["calls_timed_out"] == 2


def test_an_error_names_the_element(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="not yet: some name"):
        run(lambda pipeline: pipeline | beam.Create(["some name"]) | MapAsync(FailsFirst(tmp_path, 99), retries=0))


class NotesCalls:
    def __init__(self, path: Path) -> None:
        self._path = path

    async def __call__(self, name: str) -> str:
        note(self._path)
        await asyncio.sleep(0.05)  # so that its other windows come before it has ended
        return name


class Placed(beam.DoFn):
    """Emits names with their timestamps and the starts of their windows."""

    def process(
        self, name: str, at: Any = beam.DoFn.TimestampParam, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[tuple[str, float, float]]:
        yield name, float(at), float(window.start)


def test_windows_and_timestamps_stay(tmp_path: Path) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        events = (
            TestStream()
            .advance_watermark_to(0)
            .add_elements([TimestampedValue("a", 5), TimestampedValue("b", 15)])
            .advance_watermark_to_infinity()
        )
        names = pipeline | events | beam.WindowInto(SlidingWindows(20, 10))
        answers = names | MapAsync(NotesCalls(tmp_path / "calls"))
        windows = answers | beam.ParDo(Placed())
        expected = [("a", 5.0, -10.0), ("a", 5.0, 0.0), ("b", 15.0, 0.0), ("b", 15.0, 10.0)]
        assert_that(windows | "Together" >> beam.WindowInto(FixedWindows(1 << 30)), equal_to(expected))

    run(build)
    assert len(notes(tmp_path / "calls")) == 2  # one call for an element, not for each of its windows


def test_an_order_within_the_bundle() -> None:
    async def slower_first(number: int) -> int:
        await asyncio.sleep(0.02 if number == 0 else 0)
        return number

    def build(pipeline: beam.Pipeline) -> None:
        numbers = pipeline | beam.Create([range(20)]) | beam.FlatMap(lambda several: several)
        answers = numbers | MapAsync(slower_first, ordered=True)
        assert_that(answers | beam.combiners.ToList(), equal_to([list(range(20))]))

    run(build, "--cpu_workers=1")


def test_answers_that_are_early_do_not_wait() -> None:
    """Without an order, a call that hangs lets others pass: all other elements are answered before it is given up."""

    async def one_hangs(number: int) -> int:
        await asyncio.sleep(_LONG_S if number == 0 else 0)
        return number

    def build(pipeline: beam.Pipeline) -> None:
        calls = MapAsync(one_hangs, capacity=2, timeout_s=1.0, retries=0).with_exception_handling()
        both: Any = pipeline | beam.Create(range(200)) | calls
        answers, failures = both
        assert_that(answers, equal_to(list(range(1, 200))), label="answers")
        assert_that(failures | beam.Keys(), equal_to([0]), label="failures")

    run(build)


async def yields(number: int) -> Any:
    yield number


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fn": 3}, "found 3, expected a function of an element"),
        ({"fn": yields}, "found yields, which yields, expected a function that returns one value"),
        ({"fn": doubled, "client": object()}, "expected a function that makes one"),
    ],
)
def test_wrong_types(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidType, match=message):
        MapAsync(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "found capacity=0"),
        ({"timeout_s": 0}, "found timeout_s=0"),
        ({"timeout_s": float("inf")}, "found timeout_s=inf"),
        ({"retries": -1}, "found retries=-1"),
    ],
)
def test_wrong_numbers(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        MapAsync(doubled, **arguments)


def test_a_label_and_a_type() -> None:
    answers: Any = beam.Pipeline() | beam.Create([1]) | MapAsync(doubled)
    assert answers.element_type is int
    assert MapAsync(doubled).default_label() == "MapAsync(doubled)"
