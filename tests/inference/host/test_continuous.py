"""Models that take examples as they come: order, failures, deaths, timeouts, closed sessions and back-pressure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.testing.util import assert_that, equal_to

from luminosity import Handler, RunInference
from luminosity.core import InferenceMetrics
from luminosity.errors import ModelDied
from luminosity.inference.continuous import ContinuousModel, answers_of
from luminosity.inference.handler import note
from luminosity.inference.host import device as device_module
from luminosity.inference.host.host import ModelHost
from luminosity.inference.host.interface import LaneSettings
from tests.both_runners import Pipelines
from tests.inference.host.test_host import in_thread, outcomes, until, values


class Engine:
    """A model whose answers the test gives, in any order."""

    def __init__(self, capacity: int, script: Callable[[Engine], None] | None = None) -> None:
        self.capacity = capacity
        self.taken: list[Any] = []
        self.arguments: list[Any] = []
        self.open: dict[Any, Future[Any]] = {}
        self.most_open = 0
        self.closed = False
        self._lock = threading.Lock()
        self._script = script

    def submit(self, example: Any, inference_args: Mapping[str, Any] | None) -> Future[Any]:
        with self._lock:
            future: Future[Any] = Future()
            self.taken.append(example)
            self.arguments.append(inference_args)
            self.open[example] = future
            self.most_open = max(self.most_open, len(self.open))
        if self._script is not None:
            self._script(self)
        return future

    def answer(self, example: Any, value: Any = None, error: BaseException | None = None) -> None:
        with self._lock:
            future = self.open.pop(example)
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(10 * example if value is None else value)

    def close(self) -> None:
        self.closed = True
        for future in self.open.values():
            future.cancel()


class Scripted(Handler[int, int, Engine]):
    def __init__(self, *engines: Any, submits: bool = True) -> None:
        super().__init__()
        self._engines = list(engines)
        self._submits = submits
        self.loads = 0

    def load_model(self) -> Engine:
        self.loads += 1
        return self._engines.pop(0)

    def submits(self, inference_args: Mapping[str, Any] | None) -> bool:
        return self._submits

    def collect(self, outputs: Any) -> list[int]:
        note(InferenceMetrics.NEW_TOKENS, 3)
        return [value + 1 for value in outputs]


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_answers_come_in_any_order_and_never_more_than_capacity_are_open() -> None:
    def newest_first(engine: Engine) -> None:
        if len(engine.open) == engine.capacity or len(engine.taken) == 20:
            for example in sorted(engine.open, reverse=True):
                engine.answer(example)

    engine = Engine(4, newest_first)
    host, handler = ModelHost(), Scripted(engine)
    found = outcomes(host, handler, [list(range(12)), list(range(12, 20))], LaneSettings(inference_args={"a": 1}))

    assert values(found) == [10 * example + 1 for example in range(20)]
    assert {place for outcome in found for place in outcome.places.tolist() if outcome.tag == 1} == set(range(8))
    assert engine.taken == list(range(20)), "in the order in which they came"
    assert engine.most_open == 4
    assert engine.arguments == [{"a": 1}] * 20
    host.check_integrity()


def test_bundles_share_the_model_and_each_gets_its_own() -> None:
    both = threading.Barrier(2)
    engine = Engine(8)
    host, handler = ModelHost(), Scripted(engine)
    found: dict[str, Any] = {}

    def bundle(name: str, examples: list[int]) -> None:
        both.wait(60)
        found[name] = outcomes(host, handler, [examples])

    threads = [in_background(lambda: bundle("one", [1, 2])), in_background(lambda: bundle("two", [3, 4]))]
    until(lambda: sorted(engine.open) == [1, 2, 3, 4])
    for example in (4, 1, 3, 2):
        engine.answer(example)
    for thread in threads:
        thread.join(60)
    assert (values(found["one"]), values(found["two"])) == ([11, 21], [31, 41])


def test_one_that_fails_fails_alone() -> None:
    def answer(engine: Engine) -> None:
        [example] = engine.open
        engine.answer(example, error=ValueError("odd") if example % 2 else None)

    host = ModelHost()
    found = outcomes(host, Scripted(Engine(1, answer)), [[0, 1, 2, 3]])

    assert values(found) == [1, 21]
    failed = [(outcome.places.tolist(), str(outcome.error), outcome.batch_count) for outcome in found if outcome.error]
    assert sorted(failed) == [([1], "odd", 1), ([3], "odd", 1)]


def test_what_submit_raises_fails_its_example() -> None:
    class Picky(Engine):
        def submit(self, example: Any, inference_args: Mapping[str, Any] | None) -> Future[Any]:
            if example == 1:
                raise TypeError("not this one")
            return super().submit(example, inference_args)

    found = outcomes(ModelHost(), Scripted(Picky(4, lambda engine: engine.answer(engine.taken[-1]))), [[0, 1, 2]])
    assert values(found) == [1, 21]
    assert [str(outcome.error) for outcome in found if outcome.error] == ["not this one"]


def test_a_model_that_died_is_closed_and_loaded_again() -> None:
    def die(engine: Engine) -> None:
        if len(engine.open) == 2:
            for example in sorted(engine.open):
                engine.answer(example, error=ModelDied("gone"))

    first, second = Engine(2, die), Engine(2, lambda engine: engine.answer(engine.taken[-1]))
    host, handler = ModelHost(), Scripted(first, second)
    found = outcomes(host, handler, [[0, 1, 2, 3]])

    assert handler.loads == 2
    until(lambda: first.closed)
    assert not second.closed
    assert values(found) == [21, 31]
    assert [type(outcome.error) for outcome in found if outcome.error] == [ModelDied, ModelDied]
    host.check_integrity()


def test_a_timeout_fails_one_and_the_others_go_to_the_next_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "LOOK_AGAIN_S", 0.02)

    class Collecting(Scripted):
        def should_garbage_collect_on_timeout(self) -> bool:
            return True

    now = [0.0]
    first = Engine(1)
    second = Engine(1, lambda engine: engine.answer(engine.taken[-1]))
    host, handler = ModelHost(clock=lambda: now[0]), Collecting(first, second)
    found: list[Any] = []
    thread = in_background(lambda: found.extend(outcomes(host, handler, [[0, 1]], LaneSettings(timeout=30))))
    until(lambda: 0 in first.open)
    now[0] += 31  # the timeout counts from before the model gets the example
    thread.join(60)

    assert values(found) == [11]
    assert [(o.places.tolist(), type(o.error)) for o in found if o.error] == [([0], TimeoutError)]
    assert first.open[0].cancelled()
    until(lambda: first.closed)


def test_a_model_that_is_closed_gives_its_examples_to_the_next() -> None:
    first, second = Engine(4), Engine(4, lambda engine: engine.answer(engine.taken[-1]))
    host, handler = ModelHost(), Scripted(first, second)
    found: list[Any] = []
    thread = in_background(lambda: found.extend(outcomes(host, handler, [[0, 1, 2]])))
    until(lambda: len(first.open) == 3)

    lane = host.enter("lane", lambda: handler, LaneSettings())
    in_thread(lambda: host.unload(lane))
    thread.join(60)

    assert values(found) == [1, 11, 21]
    assert handler.loads == 2
    host.leave(lane)


def test_a_closed_session_cancels_what_nobody_waits_for() -> None:
    engine = Engine(2)
    host, handler = ModelHost(), Scripted(engine)
    lane = host.enter("lane", lambda: handler, LaneSettings())
    session = host.open()
    session.submit(lane, [0, 1, 2], np.ones(3), None)
    until(lambda: len(engine.open) == 2)

    session.close()

    until(lambda: all(future.cancelled() for future in engine.open.values()))
    assert engine.taken == [0, 1]
    other = host.open()
    other.submit(lane, [7], np.ones(1), None)
    until(lambda: 7 in engine.open)
    engine.answer(7)
    assert [outcome.values for some in other.finish() for outcome in some] == [[71]]
    host.leave(lane)


class Loop:
    """An engine that is a coroutine, as vLLM's is: each example waits for the one after it."""

    capacity = 8

    def __init__(self) -> None:
        self._events: dict[int, asyncio.Event] = {}
        self.taken: list[int] = []
        self.cancelled: list[int] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def submit(self, example: int, inference_args: Mapping[str, Any] | None) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(self._answer(example), self._loop)

    async def _answer(self, example: int) -> int:
        self.taken.append(example)
        try:
            self._event(example).set()
            if example == 4:
                raise ValueError("the last")
            await self._event(example + 1).wait()
        except asyncio.CancelledError:
            self.cancelled.append(example)
            raise
        return 10 * example

    def _event(self, example: int) -> asyncio.Event:
        return self._events.setdefault(example, asyncio.Event())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


def test_the_futures_of_an_event_loop_will_do() -> None:
    engine = Loop()
    host, handler = ModelHost(), Scripted(engine)
    found = outcomes(host, handler, [[1, 2, 3, 4]])
    assert values(found) == [11, 21, 31]
    assert [str(outcome.error) for outcome in found if outcome.error] == ["the last"]

    lane = host.enter("lane", lambda: handler, LaneSettings())
    session = host.open()
    session.submit(lane, [7], np.ones(1), None)
    until(lambda: engine.taken[-1] == 7)
    session.close()
    until(lambda: engine.cancelled == [7])
    host.leave(lane)
    engine.close()


def test_what_collect_counts_is_counted_for_the_example() -> None:
    engine = Engine(2, lambda engine: engine.answer(engine.taken[-1]))
    host, handler = ModelHost(), Scripted(engine)
    lane = host.enter("lane", lambda: handler, LaneSettings())
    session = host.open()
    session.submit(lane, [1, 2], np.ones(2), None)
    list(session.finish())
    [stats] = session.take_stats().values()
    assert [(each.count, each.notes) for each in stats] == [(1, {InferenceMetrics.NEW_TOKENS: 3})] * 2
    host.leave(lane)


def test_arguments_that_the_model_does_not_know_go_to_predict() -> None:
    class Both(Scripted):
        def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> list[int]:
            return [100 * example for example in batch]

    engine = Engine(2)
    assert values(outcomes(ModelHost(), Both(engine, submits=False), [[1, 2, 3]])) == [101, 201, 301]
    assert engine.taken == []


def test_outside_of_a_host_answers_keep_their_order_and_capacity_holds() -> None:
    def last_first(engine: Engine) -> None:
        if len(engine.open) == 3:
            for example in sorted(engine.open, reverse=True):
                engine.answer(example)

    engine = Engine(3, last_first)
    assert isinstance(engine, ContinuousModel)
    assert answers_of(engine, [1, 2, 3, 4, 5, 6], None) == [10, 20, 30, 40, 50, 60]
    assert engine.most_open == 3
    handler = Scripted(Engine(1, lambda engine: engine.answer(engine.taken[-1])))
    results: list[Any] = list(handler.run_inference([1, 2], handler.load_model()))
    assert [result.inference for result in results] == [11, 21]


class Echo(Engine):
    """Answers at once, and fails for one example."""

    def submit(self, example: Any, inference_args: Mapping[str, Any] | None) -> Future[Any]:
        future = super().submit(example, inference_args)
        self.answer(example, error=ValueError("seven") if example == 7 else None)
        return future


class Echoes(Handler[int, Any, Engine]):
    self_batching = True

    def load_model(self) -> Engine:
        return Echo(4)


def test_in_a_pipeline_one_example_is_a_dead_letter(pipelines: Pipelines) -> None:
    with pipelines() as (pipeline, _):
        examples = pipeline | beam.Create(range(50))
        good, bad = examples | RunInference(Echoes()).with_exception_handling()
        expected = [10 * number for number in range(50) if number != 7]
        assert_that(good | beam.Map(lambda result: result.inference), equal_to(expected), "good")
        letters = bad.failed_inferences | beam.Map(lambda letter: (letter[0], letter[1][1]))
        assert_that(letters, equal_to([([7], "ValueError('seven')")]), "bad")
