"""The model host: its threads, what they survive, and the outcome of every example."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from luminosity import Handler
from luminosity.errors import ModelTooLarge
from luminosity.inference import memory
from luminosity.inference.adapting.isolated import IsolatedHandler
from luminosity.inference.blocks import rows
from luminosity.inference.host import device as device_module
from luminosity.inference.host import model as host_model
from luminosity.inference.host.host import ModelHost
from luminosity.inference.host.interface import LaneSettings, Outcome
from tests.marks import note, wait_for_file

pytestmark = pytest.mark.thorough

_PATIENCE_S = 120


def doubled(batch: Any) -> list[Any]:
    return [2 * example for example in batch]


class Doubler(Handler[Any, Any, str]):
    def __init__(self, answer: Callable[[Any], Any] | None = None, **batching: Any) -> None:
        super().__init__(**batching)
        self._answer = answer or doubled
        self.loads = 0
        self.batches: list[int] = []

    def load_model(self) -> str:
        self.loads += 1
        return "model"

    def predict(self, model: str, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        self.batches.append(len(batch))
        return self._answer(batch)


def outcomes(
    host: ModelHost,
    handler: Handler[Any, Any, Any],
    blocks: Sequence[Any],
    settings: LaneSettings | None = None,
    cost: Callable[[Any], Any] = lambda block: np.ones(len(block)),
    name: str = "lane",
) -> list[Outcome]:
    """Return the outcomes of one bundle; fail instead of hanging if the host hangs."""
    found: list[Outcome] = []
    errors: list[BaseException] = []

    def bundle() -> None:
        lane = host.enter(name, lambda: handler, settings or LaneSettings())
        session = host.open()
        try:
            for number, block in enumerate(blocks):
                session.submit(lane, block, cost(block), number)
            for some in session.finish():
                found.extend(some)
        except BaseException as error:
            errors.append(error)
        finally:
            session.close()
            host.leave(lane)

    in_thread(bundle)
    if errors:
        raise errors[0]
    return found


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    assert not thread.is_alive(), "the host never responded"


def values(found: list[Outcome]) -> list[Any]:
    return sorted(value for outcome in found for value in outcome.values or [])


def host_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("model-host")}


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_threads_and_models_go_when_nobody_needs_them_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_IDLE_S", 0.1)
    before = host_threads()
    host, handler = ModelHost(), Doubler()
    for _ in range(2):
        assert values(outcomes(host, handler, [[1, 2]])) == [2, 4]
        until(lambda: not host_threads() - before)  # Threads of other tests may end meanwhile, too.
    assert handler.loads == 2


def test_a_model_goes_while_another_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_IDLE_S", 0.1)
    host = ModelHost()
    old, new = (host.enter(name, Doubler, LaneSettings()) for name in ("old", "new"))
    host.load(old)
    host.leave(old)
    session = host.open()

    def old_is_gone() -> bool:
        session.submit(new, [1], np.ones(1), 0)
        list(session.finish())
        return not old.model.is_ready

    until(old_is_gone)
    assert new.model.is_ready


def test_lanes_of_one_model_share_it_and_nothing_else() -> None:
    host = ModelHost()
    first, second = (
        host.enter(step, Doubler, LaneSettings(model="same", inference_args={"step": step})) for step in (1, 2)
    )
    assert first.model is second.model
    assert first.settings.inference_args != second.settings.inference_args
    assert host.enter(3, Doubler, LaneSettings()).model is not first.model


@pytest.mark.parametrize("hook", ["collate", "transfer", "predict", "wait", "collect", "num_examples", "warm_up"])
@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_a_hook_raises_reaches_the_bundle(hook: str, error: BaseException) -> None:
    def fail(*_: Any) -> Any:
        raise error

    host, handler = ModelHost(), Doubler()
    setattr(handler, hook, fail)
    assert [outcome.error for outcome in outcomes(host, handler, [[1]])] == [error]
    delattr(handler, hook)
    assert values(outcomes(host, handler, [[1]])) == [2]


def test_an_error_that_can_not_be_printed() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no")

    def fail(batch: Any) -> Any:
        raise Mute

    assert isinstance(outcomes(ModelHost(), Doubler(fail), [[1]])[0].error, Mute)


def test_a_device_that_can_not_even_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def fail(batch: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(memory, "release_memory", broken)
    assert str(outcomes(ModelHost(), Doubler(fail), [[1, 2]])[0].error) == "CUDA out of memory"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_other_models_are_loaded_after_a_drop_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sized(Doubler):
        def __init__(self, size: int) -> None:
            super().__init__()
            self._size = size

        def memory(self, model: str) -> int:
            return self._size

    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    before, host = host_threads(), ModelHost(budget=10_000_000)
    with monkeypatch.context() as patch:
        patch.setattr(host_model, "release_memory", broken)
        found = outcomes(host, Sized(50_000_000), [[1]], LaneSettings(model="large"), name="large")
        assert isinstance(found[0].error, ModelTooLarge)
        until(lambda: not any("load" in thread.name for thread in host_threads() - before))
    assert values(outcomes(host, Sized(1_000), [[1]], LaneSettings(model="small"), name="small")) == [2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_of_the_host_itself_reaches_who_waits() -> None:
    # This simulates a bug of the host; costs that are not finite are refused earlier.
    before = host_threads()
    with pytest.raises(RuntimeError, match="a thread of the model host has failed"):
        outcomes(ModelHost(), Doubler(), [[1, 2]], cost=lambda block: np.full(len(block), np.nan))
    # The thread ends after it has reported its error; until then, the warning would belong to a later test.
    until(lambda: not any("schedule" in thread.name for thread in host_threads() - before))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (tuple, [1, 2]),
        (iter, [1, 2]),
        (lambda batch: pa.chunked_array([batch[:1], batch[1:]]), [pa.scalar(1), pa.scalar(2)]),
        (lambda batch: dict.fromkeys(batch, 1), "found a dict"),
        (set, "found a set"),
        (lambda batch: None, "found a NoneType"),
    ],
)
def test_what_models_return(kind: Callable[[Any], Any], expected: Any) -> None:
    (outcome,) = outcomes(ModelHost(), Doubler(kind), [[1, 2]])
    if isinstance(expected, str):
        assert expected in str(outcome.error)
    else:
        assert list(outcome.values) == expected


def test_a_model_that_can_not_be_loaded_is_not_tried_for_each_example() -> None:
    class Missing(Doubler):
        def load_model(self) -> str:
            super().load_model()
            raise OSError("no such file")

    handler = Missing(min_batch_size=500)
    settings = LaneSettings(timeout=60, isolate_failures=True)
    found = outcomes(ModelHost(), handler, [list(range(500))], settings)
    assert sum(len(outcome.places) for outcome in found if isinstance(outcome.error, OSError)) == 500
    assert handler.loads == 1


def test_a_hang_after_the_computation_holds_up_nobody_else() -> None:
    stuck = threading.Event()

    class Slow(Doubler):
        at_once = most_at_once = 0

        def predict(self, model: str, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
            if 13 not in batch:
                self.at_once += 1
                self.most_at_once = max(self.most_at_once, self.at_once)
                time.sleep(0.01)
                self.at_once -= 1
            return super().predict(model, batch)

        def wait(self, outputs: Any) -> None:
            if 26 in outputs:
                stuck.wait(_PATIENCE_S)

    host, handler = ModelHost(), Slow(max_batch_size=1)
    impatient, patient = LaneSettings(model="slow", timeout=0.5), LaneSettings(model="slow")
    assert isinstance(outcomes(host, handler, [[13]], impatient)[0].error, TimeoutError)
    assert values(outcomes(host, handler, [[1, 2, 3, 4]], patient, name="patient")) == [2, 4, 6, 8]
    assert handler.most_at_once == 1
    stuck.set()


class Hangs(Doubler):
    def __init__(self, begun: Path) -> None:
        super().__init__()
        self._begun = begun

    def predict(self, model: str, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        if 13 in batch:
            note(self._begun)
            time.sleep(10 * _PATIENCE_S)
        return super().predict(model, batch)


def test_a_hang_in_a_process_of_its_own_ends_with_the_process(tmp_path: Path) -> None:
    """The next batch gets a model that is loaded again."""
    handler = IsolatedHandler(Hangs(tmp_path / "begun"))
    model = handler.load_model()
    errors: list[str] = []

    def hang() -> None:
        try:
            handler.predict(model, [13])
        except RuntimeError as error:
            errors.append(str(error))

    hanging = threading.Thread(target=hang, daemon=True)
    hanging.start()
    wait_for_file(tmp_path / "begun", _PATIENCE_S)
    handler.abandon(model)
    hanging.join(_PATIENCE_S)
    assert errors == ["the model's process ended while it computed this batch"]
    assert handler.predict(handler.load_model(), [1]) == [2]


def test_a_minimum_is_not_waited_for_by_who_waits_for_results() -> None:
    """The other session may belong to the same thread, which then never submits more."""
    host = ModelHost()
    lane = host.enter("lane", lambda: Doubler(min_batch_size=10), LaneSettings())
    waiting, producing = host.open(), host.open()
    for session in (waiting, producing):
        session.submit(lane, [1], np.ones(1), 0)
    found: list[Outcome] = []
    in_thread(lambda: found.extend(outcome for some in waiting.finish() for outcome in some))
    assert values(found) == [2]


def test_a_minimum_larger_than_the_queue() -> None:
    handler = Doubler(min_batch_size=5000, max_batch_size=5000)
    outcomes(ModelHost(), handler, [list(range(1000)) for _ in range(20)])
    assert handler.batches == [5000] * 4


@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
def test_a_model_that_changes_its_batch_does_not_change_the_examples(packs: bool) -> None:
    """They are computed again when the batch fails; a model that packs promises to change nothing."""

    def less(batch: Any) -> Any:
        batch = batch.copy() if packs else batch
        batch -= 10.0
        if (batch > 900).any():
            raise BlockingIOError("one of them")
        return batch.tolist()

    handler = Doubler(less)
    handler.sums_costs = packs
    examples = np.array([11.0, 12.0, 13.0, 14.0, 1000.0, 16.0])
    found = outcomes(ModelHost(), handler, [examples], LaneSettings(isolate_failures=True))
    assert values(found) == [1.0, 2.0, 3.0, 4.0, 6.0]
    assert len(handler.batches) > 1


def test_an_example_that_needs_too_much_memory_alone_makes_no_batch_smaller() -> None:
    def fail_on_bomb(batch: Any) -> Any:
        if -1 in batch:
            raise MemoryError("bomb")
        return batch

    handler = Doubler(fail_on_bomb)
    blocks = [list(range(1000)) for _ in range(20)]
    blocks[3][5] = -1
    found = outcomes(ModelHost(), handler, blocks)
    assert [outcome.places.tolist() for outcome in found if outcome.error] == [[5]]
    assert len(values(found)) == 19_999
    assert len(handler.batches) < 2000, "from then on there is a batch for nearly each example"


class Erratic(Handler[int, int, str]):
    """Runs out of memory at random, and fails for multiples of 97."""

    concurrency = 3

    def load_model(self) -> str:
        return "model"

    def collate(self, prepared: Any) -> Any:
        return list(rows(prepared))

    def predict(self, model: str, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        if len(batch) > 1 and random.random() < 0.02:
            raise MemoryError("at random")
        if any(example % 97 == 0 for example in batch):
            raise ValueError("poison")
        return [2 * example for example in batch]


@pytest.mark.parametrize("as_arrow", [False, True])
def test_many_sessions_on_many_threads(as_arrow: bool) -> None:
    """No outcome is lost, doubled or delivered to another session, even if sessions close early."""
    host, settings = ModelHost(), LaneSettings(isolate_failures=True)
    problems: list[str] = []

    def bundles(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(6):
            handler = Erratic(max_batch_size=64)
            lane = host.enter(f"lane {rng.integers(2)}", lambda handler=handler: handler, settings)
            session = host.open()
            blocks = [rng.integers(1, 10_000, rng.integers(1, 200)) for _ in range(rng.integers(0, 8))]
            answers: dict[tuple[int, int], Any] = {}
            leaves_early = rng.random() < 0.3

            def take(found: list[Outcome], answers: dict[tuple[int, int], Any] = answers) -> None:
                for outcome in found:
                    got = [None] * len(outcome.places) if outcome.values is None else outcome.values
                    for place, value in zip(outcome.places.tolist(), got, strict=True):
                        if answers.setdefault((outcome.tag, place), value) is not value:
                            problems.append(f"{outcome.tag}, {place} came twice")

            for number, block in enumerate(blocks):
                examples = pa.array(block) if as_arrow else block.tolist()
                session.submit(lane, examples, rng.exponential(10, len(block)), number)
                take(session.ready())
            if not leaves_early:
                for found in session.finish():
                    take(found)
                expected = {
                    (number, place): None if example % 97 == 0 else 2 * example
                    for number, block in enumerate(blocks)
                    for place, example in enumerate(block.tolist())
                }
                got = {key: value.as_py() if isinstance(value, pa.Scalar) else value for key, value in answers.items()}
                if got != expected:
                    problems.append(f"{len(got)} answers for {len(expected)} examples, or wrong ones")
            session.close()
            host.leave(lane)

    threads = [threading.Thread(target=bundles, args=(seed,), daemon=True) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "the host never responded"
    assert problems == []
    until(lambda: not host._device.in_flight.running)
    host.check_integrity()
