"""Steps that are called by ``QuickRunner`` get, emit and raise the same as with Beam's own class."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.coders import VarIntCoder
from apache_beam.pvalue import TaggedOutput
from apache_beam.runners import common
from apache_beam.transforms.core import CallableWrapperCombineFn, CallableWrapperDoFn
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import BagStateSpec, ReadModifyWriteStateSpec, TimerSpec, on_timer
from apache_beam.transforms.window import GlobalWindows, IntervalWindow, TimestampedValue
from apache_beam.utils.windowed_value import PaneInfo, PaneInfoTiming, WindowedValue

from luminosity.engine.workers.sdk.cells import ValueState, copy_of_callable
from luminosity.engine.workers.sdk.quick_steps import QuickRunner, make_runner

_DoFn: Any = beam.DoFn
_LAST = _DoFn.StateParam(ReadModifyWriteStateSpec("last", VarIntCoder()))
_ALL = _DoFn.StateParam(BagStateSpec("all", VarIntCoder()))
_IN_EVENT_TIME, _IN_REAL_TIME = TimerSpec("event", TimeDomain.WATERMARK), TimerSpec("real", TimeDomain.REAL_TIME)
_EVENT, _REAL = _DoFn.TimerParam(_IN_EVENT_TIME), _DoFn.TimerParam(_IN_REAL_TIME)
_PANE = PaneInfo(is_first=True, is_last=False, timing=PaneInfoTiming.EARLY, index=0, nonspeculative_index=-1)
_WINDOWS = (IntervalWindow(0, 10), IntervalWindow(10, 20))


class All(beam.DoFn):
    def process(
        self,
        element: Any,
        key: Any = _DoFn.KeyParam,
        window: Any = _DoFn.WindowParam,
        windowed: Any = _DoFn.WindowedValueParam,
        timestamp: Any = _DoFn.TimestampParam,
        pane: Any = _DoFn.PaneInfoParam,
    ) -> Iterable[Any]:
        yield element, key, window, windowed.value, windowed.windows, timestamp, pane


class Stateful(beam.DoFn):
    def process(
        self,
        element: Any,
        last: Any = _LAST,
        real: Any = _REAL,
        window: Any = _DoFn.WindowParam,
        event: Any = _EVENT,
        every: Any = _ALL,
    ) -> list[Any]:
        return [element, last, real, window, event, every]

    @on_timer(_IN_EVENT_TIME)
    def at_event(self) -> None: ...

    @on_timer(_IN_REAL_TIME)
    def at_real(self) -> None: ...


class ElementLast(beam.DoFn):
    def process(self, window: Any = _DoFn.WindowParam, element: Any = _DoFn.ElementParam) -> list[Any]:
        return [(window, element)]


class Tagged(beam.DoFn):
    def process(self, element: Any, timestamp: Any = _DoFn.TimestampParam) -> Iterable[Any]:
        yield TaggedOutput("other", element)
        yield TimestampedValue(element, timestamp + 1)
        yield WindowedValue(element, timestamp, _WINDOWS[1:])


class Nothing(beam.DoFn):
    def process(self, element: Any, windowed: Any = _DoFn.WindowedValueParam) -> None: ...


class Text(beam.DoFn):
    def process(self, element: Any, window: Any = _DoFn.WindowParam) -> Any:
        return "text"


class Failing(beam.DoFn):
    def process(self, element: Any, window: Any = _DoFn.WindowParam) -> Iterable[Any]:
        yield element
        raise KeyError("first", 2)


class PlainDefault(beam.DoFn):
    def process(self, element: Any, window: Any = _DoFn.WindowParam, weights: Any = np.ones(2)) -> list[Any]:  # noqa: B008
        return [(window, weights.sum())]


class KeyOnly(beam.DoFn):
    def process(self, element: Any, key: Any = _DoFn.KeyParam) -> list[Any]:
        return [key]


class NoArguments(beam.DoFn):
    def process(self, element: Any) -> list[Any]:
        return [element]


class Receiver(common.Receiver):
    def __init__(self) -> None:
        self.got: list[Any] = []

    def receive(self, windowed_value: Any) -> None:
        value = windowed_value.value
        self.got.append((value, windowed_value.timestamp, windowed_value.windows, windowed_value.pane_info))


class Context:
    """Tells what it is asked for. As Beam's, it can make timers without a time in event time only."""

    def get_state(self, spec: Any, key: Any, window: Any) -> Any:
        return "state", spec.name, key, window

    def get_timer(self, spec: Any, key: Any, window: Any, timestamp: Any, pane: Any) -> Any:
        return "timer", spec.name, key, window, timestamp if spec is _IN_REAL_TIME else None, pane


def outcome(make: Any, fn: Any, elements: list[WindowedValue]) -> tuple[type, list[Any]]:
    """Return the class that calls the step, and what it emits and raises."""
    receivers = {None: Receiver(), "other": Receiver()}
    context = Context() if isinstance(fn, Stateful) else None
    windowing = SimpleNamespace(windowfn=GlobalWindows())
    runner = make(fn, [], {}, [], windowing, tagged_receivers=receivers, step_name="Step", user_state_context=context)
    found: list[Any] = []
    for element in elements:
        try:
            runner.process(element)
        except Exception as error:
            found.append((type(error), str(error)))
    return type(runner), [*found, *receivers[None].got, "other", *receivers["other"].got]


_ELEMENTS = [
    WindowedValue(("a", 1), 5, _WINDOWS[:1], _PANE),
    WindowedValue(("b", 2), 12, _WINDOWS, _PANE),
    WindowedValue(["c", 3], 6, _WINDOWS[:1], _PANE),  # a key, but no tuple
    WindowedValue("no key", 7, _WINDOWS[:1], _PANE),
]


@pytest.mark.parametrize(
    ("fn", "is_quick"),
    [
        (All(), True),
        (Stateful(), True),
        (ElementLast(), True),
        (Tagged(), True),
        (Nothing(), True),
        (Text(), True),
        (Failing(), True),
        (KeyOnly(), True),
        (CallableWrapperDoFn(lambda element, window=_DoFn.WindowParam: [(element, window)]), True),
        (PlainDefault(), False),
        (NoArguments(), False),  # Beam is quick enough
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_step_gets_emits_and_raises_the_same(fn: beam.DoFn, is_quick: bool) -> None:
    elements = _ELEMENTS[:1] if isinstance(fn, Text) else _ELEMENTS  # Beam looks at the first return value only
    kind, found = outcome(make_runner, fn, elements)
    assert (kind is QuickRunner) == is_quick
    _, expected = outcome(common.DoFnRunner, fn, elements)
    assert found == expected
    assert len(found) > 1 or isinstance(fn, Nothing)


@pytest.mark.parametrize(
    "given", [{"args": [1]}, {"kwargs": {"x": 1}}, {"side_inputs": [SimpleNamespace(is_globally_windowed=bool)]}]
)
def test_beam_calls_steps_with_other_arguments(given: dict[str, Any]) -> None:
    class Other(beam.DoFn):
        def process(self, element: Any, x: Any = None, window: Any = _DoFn.WindowParam) -> None: ...

    arguments: dict[str, Any] = {"args": [], "kwargs": {}, "side_inputs": [], **given}
    windowing = SimpleNamespace(windowfn=GlobalWindows())
    made = make_runner(Other(), windowing=windowing, tagged_receivers={None: Receiver()}, **arguments)
    assert type(made) is common.DoFnRunner


class Bag:
    """Counts what reaches the bag of a cell."""

    def __init__(self, *values: Any) -> None:
        self.values = list(values)
        self.calls: list[str] = []

    def read(self) -> list[Any]:
        self.calls.append("read")
        return list(self.values)

    def clear(self) -> None:
        self.calls.append("clear")
        self.values.clear()

    def add(self, value: Any) -> None:
        self.calls.append("add")
        self.values.append(value)

    def commit(self) -> None:
        self.calls.append("commit")


def test_a_value_is_read_once_and_written_once() -> None:
    bag: Any = Bag(7)
    value = ValueState(bag)
    assert [value.read(), value.read()] == [7, 7]
    for number in range(5):
        value.write(number)
        assert value.read() == number
    value.commit()
    assert bag.calls == ["read", "clear", "add", "commit"]
    assert bag.values == [4]


def test_a_value_that_is_only_read_is_not_written() -> None:
    bag: Any = Bag()
    value = ValueState(bag)
    assert value.read() is None
    value.commit()
    assert bag.calls == ["read", "commit"]


def test_a_cleared_value_is_empty_and_none_is_a_value() -> None:
    bag: Any = Bag(7)
    value = ValueState(bag)
    value.clear()
    assert value.read() is None
    value.commit()
    assert (bag.values, bag.calls) == ([], ["clear", "commit"])
    again = ValueState(bag)
    again.write(None)
    again.commit()
    assert bag.values == [None]


class Longest:
    """A callable with something of its own."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, values: Iterable[Any]) -> Any:
        self.seen = [max(values)]
        return self.seen[0]


def test_a_combine_fn_of_a_function_is_not_copied_but_one_with_an_object_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CallableWrapperCombineFn, "__deepcopy__", copy_of_callable, raising=False)
    longest = Longest()
    of_function, of_object = CallableWrapperCombineFn(sum), CallableWrapperCombineFn(longest)
    assert copy.deepcopy(of_function) is of_function
    copied: Any = copy.deepcopy(of_object)
    assert copied is not of_object
    assert copied.apply([3, 5]) == 5
    assert longest.seen == []
