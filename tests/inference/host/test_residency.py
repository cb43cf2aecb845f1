"""Many models in one memory budget: which are loaded, which are evicted, and what they predict."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from luminosity import Handler
from luminosity.errors import ModelTooLarge
from luminosity.inference.host import model as host_model
from luminosity.inference.host.host import ModelHost, model_budget
from luminosity.inference.host.interface import Ahead, Family, LaneSettings, LoadStats
from luminosity.inference.host.lane import Batch, Lane, Stage
from luminosity.inference.host.model import Loaded as AsLoaded
from luminosity.inference.host.model import Model
from luminosity.inference.host.residency import Residency

_PATIENCE_S = 120
_MODELS, _FIT, _SIZE = 20, 5, 100


class Machine:
    """Records which models are in memory, as reported by the models themselves."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.here: set[int] = set()
        self.loads = 0
        self.most_here = 0
        self.most_loading = 0
        self.problems: list[str] = []
        self._loading = 0

    def load(self, name: int, seconds: float) -> None:
        with self.lock:
            self._loading += 1
            self.most_loading = max(self.most_loading, self._loading)
        time.sleep(seconds)
        with self.lock:
            self._loading -= 1
            if name in self.here:
                self.problems.append(f"{name} was loaded twice")
            self.here.add(name)
            self.loads += 1
            self.most_here = max(self.most_here, len(self.here))

    def check(self, name: int) -> None:
        with self.lock:
            if name not in self.here:
                self.problems.append(f"{name} was gone while it was used")

    def gone(self, name: int) -> None:
        with self.lock:
            self.here.discard(name)


class Loaded:
    def __init__(self, machine: Machine, name: int) -> None:
        self._machine, self.name = machine, name

    def __del__(self) -> None:
        self._machine.gone(self.name)


class Tenant(Handler[int, int, Loaded]):
    """Adds its number, and checks after a prediction that it was not evicted meanwhile."""

    def __init__(
        self, machine: Machine, name: int, size: int | None = _SIZE, seconds: float = 0.002, **batching: Any
    ) -> None:
        super().__init__(**batching)
        self._machine, self._name, self._size, self._seconds = machine, name, size, seconds

    @property
    def model_id(self) -> str:
        return str(self._name)

    def load_model(self) -> Loaded:
        self._machine.load(self._name, self._seconds)
        return Loaded(self._machine, self._name)

    def memory(self, model: Loaded) -> int | None:
        return self._size

    def predict(self, model: Loaded, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        time.sleep(0.0005)
        self._machine.check(model.name)
        return [1000 * example + model.name for example in batch]


def lanes_of(host: ModelHost, machine: Machine, count: int = _MODELS, family: Family | None = None) -> list[Lane]:
    return [
        host.enter(name, lambda name=name: Tenant(machine, name), LaneSettings(family=family)) for name in range(count)
    ]


def lru_loads(accesses: list[int], capacity: int) -> int:
    """Return how often an LRU cache of this capacity has to load, for these accesses in order."""
    here: OrderedDict[int, None] = OrderedDict()
    loads = 0
    for name in accesses:
        if name not in here:
            loads += 1
            if len(here) == capacity:
                here.popitem(last=False)
        here[name] = None
        here.move_to_end(name)
    return loads


def ask(host: ModelHost, lane: Lane, examples: list[int]) -> list[Any]:
    session = host.open()
    session.submit(lane, examples, np.ones(len(examples)), None)
    values: dict[int, Any] = {}
    for outcomes in session.finish():
        for outcome in outcomes:
            if outcome.error is not None:
                session.close()
                raise outcome.error
            values.update(zip(outcome.places.tolist(), outcome.values or [], strict=True))
    session.close()
    return [values[place] for place in range(len(examples))]


def in_threads(count: int, work: Callable[[int], None]) -> None:
    problems: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "the host never responded"
    assert problems == []


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("access", ["uniform", "skewed"])
def test_twenty_models_of_which_five_fit_and_eight_threads(access: str) -> None:
    host, machine = ModelHost(budget=_FIT * _SIZE), Machine()
    lanes = lanes_of(host, machine)
    weights = [1.0 if access == "uniform" else 1 / (name + 1) for name in range(_MODELS)]
    accesses: list[int] = []

    def bundles(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            name = rng.choices(range(_MODELS), weights)[0]
            accesses.append(name)
            examples = [rng.randrange(10_000) for _ in range(rng.randrange(1, 20))]
            assert ask(host, lanes[name], examples) == [1000 * example + name for example in examples]

    in_threads(8, bundles)
    assert machine.problems == []
    assert machine.most_here <= _FIT
    assert machine.most_loading == 1
    assert machine.loads <= 1.2 * lru_loads(accesses, _FIT)
    host.check_integrity()


def test_bundles_with_work_for_all_models_load_each_a_few_times() -> None:
    """A model computes many blocks before it is evicted: far fewer loads than blocks."""
    host, machine = ModelHost(budget=_FIT * _SIZE), Machine()
    lanes = lanes_of(host, machine)
    right: list[bool] = []

    def bundle(seed: int) -> None:
        rng = random.Random(seed)
        session = host.open()
        given: dict[int, tuple[int, list[int]]] = {}
        for number in range(200):
            name = rng.randrange(_MODELS)
            given[number] = name, [rng.randrange(10_000) for _ in range(5)]
            session.submit(lanes[name], given[number][1], np.ones(5), number)
        for outcomes in session.finish():
            for outcome in outcomes:
                name, examples = given[outcome.tag]
                expected = [1000 * examples[place] + name for place in outcome.places.tolist()]
                right.append(outcome.values == expected)
        session.close()

    in_threads(8, bundle)
    assert all(right)
    assert machine.problems == []
    assert machine.loads < 8 * 200 / 10
    host.check_integrity()


def test_a_model_with_endless_work_makes_room_for_one_that_waits() -> None:
    host, machine = ModelHost(budget=_SIZE), Machine()
    busy, waiting = lanes_of(host, machine, 2)
    stop = threading.Event()

    def endless() -> None:
        session = host.open()
        while not stop.is_set():
            session.submit(busy, list(range(50)), np.ones(50), None)
            session.ready()
        session.close()

    thread = threading.Thread(target=endless, daemon=True)
    thread.start()
    until(lambda: busy.model.run_seconds > 0)
    in_threads(1, lambda _: [ask(host, waiting, [1]) for _ in range(3)] and None)
    stop.set()
    thread.join(_PATIENCE_S)
    assert machine.problems == []
    assert machine.most_here == 1


def test_who_is_to_leave_stays_the_same_while_it_finishes_its_batches() -> None:
    residency = Residency(2 * _SIZE)
    models = [Model(name, Handler[Any, Any, Any](), time, None) for name in range(3)]
    for now, model in enumerate(models[:2]):
        model.size = _SIZE
        model.arrived(AsLoaded((), _SIZE, 0.0, LoadStats(0, 0)), now)
        model.run_seconds, model.users = 100.0, 1
        residency.hold(model, _SIZE)
    for now, model in enumerate(models[:2], start=10):
        model.used_at = now  # One batch of this model is done, and another is under way.
        assert residency.room_for(models[2], lambda _: True, may_displace=True).leaving == [models[0]]


def test_one_load_for_all_who_ask_at_once() -> None:
    host, machine = ModelHost(budget=_FIT * _SIZE), Machine()
    lanes = lanes_of(host, machine, 1)
    in_threads(8, lambda number: host.load(lanes[0]))
    assert machine.loads == 1


def test_what_is_larger_than_the_budget_is_refused_with_both_numbers() -> None:
    host, machine = ModelHost(budget=50_000_000), Machine()
    settings = LaneSettings(label="Tenant, key 'large'")
    lane = host.enter("large", lambda: Tenant(machine, 0, size=70_000_000), settings)
    for _ in range(2):
        with pytest.raises(ModelTooLarge, match=r"Tenant, key 'large' takes 70 MB.* may take 50 MB"):
            ask(host, lane, [1])
    assert machine.loads == 1, "the model is loaded again although its size is known"
    host.check_integrity()


def test_a_size_is_learned_by_loading() -> None:
    """The second model is larger than the first and fits only alone; both are used in turn."""
    host, machine = ModelHost(budget=100), Machine()
    small = host.enter("small", lambda: Tenant(machine, 0, size=10), LaneSettings())
    large = host.enter("large", lambda: Tenant(machine, 1, size=95), LaneSettings())
    for _ in range(3):
        assert ask(host, small, [1]) == [1000]
        assert ask(host, large, [1]) == [1001]
        host.check_integrity()
    assert machine.most_here <= 2  # while the size of the second model was unknown


def test_a_device_that_jax_does_not_have_sets_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert model_budget("cuda:1000", requested=None, workers=1) is None


def test_a_model_that_tells_nothing_is_measured_by_the_process() -> None:
    class Bulky(Handler[int, int, Any]):
        def load_model(self) -> Any:
            return np.ones(40_000_000)  # written to, so that the memory is really allocated

        def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
            return [int(model[0])] * len(batch)

    host = ModelHost(budget=10**12)
    lane = host.enter("bulky", Bulky, LaneSettings())
    gc.collect()  # What earlier tests have left behind must not be freed while the model is loaded.
    host.load(lane)
    # Models of earlier tests may be dropped meanwhile: the largest of them has 100 MB.
    assert 200_000_000 < (lane.model.size or 0) < 500_000_000


def test_at_most_so_many_of_a_family() -> None:
    host, machine = ModelHost(), Machine()
    lanes = lanes_of(host, machine, 6, Family("keys", 2))
    other = host.enter("other", lambda: Tenant(machine, 99), LaneSettings())
    in_threads(6, lambda number: [ask(host, lanes[number], [1]) for _ in range(5)] and None)
    ask(host, other, [1])
    assert machine.most_here <= 3
    assert machine.problems == []
    host.check_integrity()


def test_out_of_memory_while_loading_takes_an_idle_model_away() -> None:
    """A device may have less free memory than the budget."""
    machine = Machine()

    class Tight(Tenant):
        def load_model(self) -> Loaded:
            if machine.here:
                raise RuntimeError("CUDA error: out of memory")
            return super().load_model()

    host = ModelHost(budget=100_000_000)
    lanes = [
        host.enter(name, lambda name=name: Tight(machine, name, size=2_000_000), LaneSettings()) for name in range(3)
    ]
    for name in (0, 1, 2, 0):
        assert ask(host, lanes[name], [1]) == [1000 + name]
    assert machine.most_here == 1


class FirstBatchIsTooMuch(Tenant):
    concurrency = 2

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine, 1)
        self.calls = 0
        self.second_runs, self.may_end = threading.Event(), threading.Event()

    def predict(self, model: Loaded, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise MemoryError
        self.second_runs.set()
        assert self.may_end.wait(_PATIENCE_S)
        return super().predict(model, batch, inference_args)


def test_a_batch_that_is_tried_again_before_the_first_try_is_put_away(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, host = Machine(), ModelHost(budget=10_000_000)
    idle = host.enter(0, lambda: Tenant(machine, 0, 2_000_000), LaneSettings())
    handler = FirstBatchIsTooMuch(machine)
    lane = host.enter(1, lambda: handler, LaneSettings(timeout=_PATIENCE_S))
    ask(host, idle, [1])
    put_back, put_away = host._device._put_back, threading.Event()

    def slow_put_back(batch: Batch) -> None:
        put_back(batch)
        assert handler.second_runs.wait(_PATIENCE_S)
        put_away.set()

    monkeypatch.setattr(host._device, "_put_back", slow_put_back)
    session = host.open()
    session.submit(lane, [1], np.ones(1), None)
    assert put_away.wait(_PATIENCE_S)
    until(lambda: lane.model.slots._value == 1)  # pyright: ignore[reportAttributeAccessIssue]
    assert [batch.stage for batch in host._device.in_flight.running] == [Stage.COMPUTING]
    handler.may_end.set()
    assert [outcome.error for outcomes in session.finish() for outcome in outcomes] == [None]


def test_ahead_of_its_work() -> None:
    host, machine = ModelHost(budget=_SIZE), Machine()
    old, new = lanes_of(host, machine, 2)
    assert ask(host, old, [1]) == [1000]
    session = host.open()
    until(lambda: host.load_ahead(new) is Ahead.READY)  # The old model has no work, and is evicted.
    assert machine.here == {1}
    session.close()


def test_no_room_beside_one_that_works() -> None:
    host, machine = ModelHost(budget=_SIZE), Machine()
    done = threading.Event()

    class Long(Tenant):
        def predict(self, model: Loaded, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
            done.wait(_PATIENCE_S)
            return super().predict(model, batch)

    old = host.enter("old", lambda: Long(machine, 0), LaneSettings())
    new = host.enter("new", lambda: Tenant(machine, 1), LaneSettings())
    session = host.open()
    session.submit(old, [1], np.ones(1), None)
    until(lambda: old.model.users == 1)
    until(lambda: host.load_ahead(new) is Ahead.NO_ROOM)
    done.set()
    assert [list(outcome.values or []) for some in session.finish() for outcome in some] == [[1000]]
    assert ask(host, new, [1]) == [1001]


class SlowToGo(Loaded):
    def __del__(self) -> None:
        time.sleep(0.1)
        super().__del__()


class TakesItsTimeToGo(Tenant):
    def load_model(self) -> Loaded:
        self._machine.load(self._name, self._seconds)
        return SlowToGo(self._machine, self._name)


def test_what_was_larger_than_thought_is_gone_before_the_next_load() -> None:
    machine, host = Machine(), ModelHost(budget=250)
    working = host.enter(0, lambda: TakesItsTimeToGo(machine, 0), LaneSettings())
    larger = host.enter(1, lambda: TakesItsTimeToGo(machine, 1, 200), LaneSettings())
    other = host.enter(2, lambda: TakesItsTimeToGo(machine, 2), LaneSettings())
    host.load(working)
    working.model.waiters += 1  # As a thread that waits for the model, so that it is not evicted.
    host.load_ahead(larger)
    until(lambda: larger.model.size is not None)
    host.load_ahead(other)
    until(lambda: host.load_ahead(other) is Ahead.READY)
    assert host.load_ahead(larger) is Ahead.NO_ROOM
    assert machine.most_here == 2


def test_a_new_version_that_is_larger_than_the_budget_is_told_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    machine, host = Machine(), ModelHost(budget=_SIZE)
    old = host.enter("old", lambda: Tenant(machine, 1), LaneSettings())
    new = host.enter("new", lambda: Tenant(machine, 2, 2 * _SIZE), LaneSettings())
    assert ask(host, old, [1]) == [1001]
    until(lambda: host.load_ahead(new) is not Ahead.LOADING)
    assert host.load_ahead(new) is Ahead.FAILED
    assert "takes 200" in caplog.text


class InNoHurry(Tenant):
    """Computes slowly until an event is set."""

    def __init__(self, machine: Machine, name: int, hurry: threading.Event, **batching: Any) -> None:
        super().__init__(machine, name, **batching)
        self._hurry = hurry

    def predict(self, model: Loaded, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        self._hurry.wait(0.05)
        return super().predict(model, batch, inference_args)


def work_under_an_update(new_handler: Callable[[Machine], Tenant]) -> tuple[set[str | None], int]:
    """Return how often each version predicted, with much work for an old one and no room for a new one beside it."""
    host, machine, known = ModelHost(budget=_SIZE), Machine(), threading.Event()
    # 400 batches, so that some are left even if the new version is requested after 20 seconds.
    old = host.enter("old", lambda: InNoHurry(machine, 0, known, max_batch_size=5), LaneSettings())
    new = host.enter("new", lambda: new_handler(machine), LaneSettings())
    session = host.open()
    session.submit(old, list(range(2000)), np.ones(2000), None)
    until(lambda: old.model.run_seconds > 0)
    until(lambda: host.load_ahead(new, instead_of=old) in (Ahead.READY, Ahead.FAILED))
    known.set()
    found = [outcome for some in session.finish() for outcome in some]
    for outcome in found:
        name = int(outcome.model_id or 0)
        assert outcome.values == [1000 * place + name for place in outcome.places.tolist()]
    session.close()
    assert machine.problems == []
    assert machine.most_here == 1
    host.check_integrity()
    return {outcome.model_id for outcome in found}, sum(len(outcome.places) for outcome in found)


def test_a_new_version_without_room_comes_after_the_old_one() -> None:
    assert work_under_an_update(lambda machine: Tenant(machine, 1, max_batch_size=5)) == ({"0", "1"}, 2000)


def test_a_new_version_without_room_that_is_broken_leaves_the_work_to_the_old_one() -> None:
    class Broken(Tenant):
        def load_model(self) -> Loaded:
            raise OSError("not a model")

    assert work_under_an_update(lambda machine: Broken(machine, 1)) == ({"0"}, 2000)


def test_a_size_in_doubt_is_measured_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first model of a library also loads the library."""
    sizes = iter([0, 900, 900, 1000])
    monkeypatch.setattr(host_model, "resident_bytes", lambda: next(sizes))
    host, machine = ModelHost(budget=500), Machine()
    lane = host.enter("model", lambda: Tenant(machine, 7, size=None), LaneSettings())
    assert ask(host, lane, [1]) == [1007]
    assert (machine.loads, lane.model.size) == (2, 100)


def test_a_failing_load_is_told_to_all_who_wait_and_tried_again_by_who_comes_later() -> None:
    class Flaky(Doubled):
        def load_model(self) -> str:
            attempts.append(1)
            if len(attempts) == 1:
                raise OSError("not now")
            return "model"

    attempts: list[int] = []
    host = ModelHost()
    lane = host.enter("flaky", Flaky, LaneSettings())
    with pytest.raises(OSError, match="not now"):
        ask(host, lane, [1, 2])
    assert ask(host, lane, [1, 2]) == [2, 4]


class Doubled(Handler[int, int, str]):
    def load_model(self) -> str:
        return "model"

    def predict(self, model: str, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        return [2 * example for example in batch]


def test_a_slow_load_fails_who_has_no_time_and_serves_who_comes_later() -> None:
    gate = threading.Event()

    class Slow(Doubled):
        def load_model(self) -> str:
            gate.wait(_PATIENCE_S)
            return "model"

    host = ModelHost()
    slow = host.enter("slow", Slow, LaneSettings(model="slow", timeout=0.2))
    with pytest.raises(TimeoutError):
        ask(host, slow, [1])
    quick = host.enter("quick", Doubled, LaneSettings())
    assert ask(host, quick, [1]) == [2], "a load that hangs blocks the load of another model"
    gate.set()
    until(lambda: slow.model.is_ready)
    later = host.enter("later", Slow, LaneSettings(model="slow"))
    assert later.model is slow.model
    assert ask(host, later, [1]) == [2]


class FailsAt(Tenant):
    def __init__(self, machine: Machine, name: int, hook: str) -> None:
        super().__init__(machine, name)
        self._hook = hook

    def warm_up(self, model: Loaded) -> None:
        self._may_fail("warm_up")

    def predict(self, model: Loaded, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        self._may_fail("predict")

    def _may_fail(self, hook: str) -> None:
        if hook == self._hook:
            try:
                raise KeyError("cause")
            except KeyError as error:
                raise ValueError("failed") from error


@pytest.mark.parametrize("hook", ["warm_up", "predict"])
def test_an_error_does_not_keep_the_model_that_raised_it(hook: str) -> None:
    machine, host = Machine(), ModelHost(budget=_SIZE)
    failing = host.enter(0, lambda: FailsAt(machine, 0, hook), LaneSettings())
    other = host.enter(1, lambda: Tenant(machine, 1), LaneSettings())
    session = host.open()
    session.submit(failing, [1], np.ones(1), None)
    errors = [outcome.error for outcomes in session.finish() for outcome in outcomes]
    assert ask(host, other, [1]) == [1001]
    assert machine.most_here == 1, "the second model was loaded before the first was dropped"
    assert isinstance(errors[0], ValueError)


def test_a_model_that_always_fails_makes_room_for_one_that_waits() -> None:
    machine, host = Machine(), ModelHost(budget=_SIZE)
    failing = host.enter(0, lambda: FailsAt(machine, 0, "predict"), LaneSettings())
    other = host.enter(1, lambda: Tenant(machine, 1), LaneSettings())
    stop = threading.Event()

    def keep_busy() -> None:
        session = host.open()
        while not stop.is_set():
            for _ in range(100):
                session.submit(failing, [1], np.ones(1), None)
            while not session.ready():
                time.sleep(0.0001)
        session.close()

    threads = [threading.Thread(target=keep_busy, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: machine.loads > 0)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.extend(ask(host, other, [1])), daemon=True)
    asking.start()
    asking.join(_PATIENCE_S)
    stop.set()
    assert answers == [1001]
    for thread in threads:
        thread.join(_PATIENCE_S)


class NeverLoads(Handler[int, int, str]):
    """Loads when the test is over."""

    def __init__(self, is_over: threading.Event) -> None:
        super().__init__()
        self._is_over = is_over

    def load_model(self) -> str:
        self._is_over.wait(_PATIENCE_S)
        return "a model"

    def should_garbage_collect_on_timeout(self) -> bool:
        return True


def test_two_lanes_give_up_the_same_load() -> None:
    before, host, is_over = set(threading.enumerate()), ModelHost(), threading.Event()
    settings = LaneSettings(model="shared", timeout=0.2)
    lanes = [host.enter(name, lambda: NeverLoads(is_over), settings) for name in range(2)]
    session = host.open()
    for lane in lanes:
        session.submit(lane, [1], np.ones(1), None)
    errors = [outcome.error for outcomes in session.finish() for outcome in outcomes]
    assert [type(error) for error in errors] == [TimeoutError, TimeoutError]
    host.check_integrity()
    is_over.set()
    until(lambda: not any("load" in thread.name for thread in set(threading.enumerate()) - before))
