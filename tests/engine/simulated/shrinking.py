"""Makes a failing scenario small: fewer disasters, a calmer world, fewer elements and steps, as long as it fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from luminosity.engine.simulated.disasters import Weather
from tests.engine.simulated.scenarios import Scenario
from tests.engine.simulated.shapes import Shape

__all__ = ["as_test", "failure", "shrunk"]

_T = TypeVar("_T")
_CALM = Weather(delay_s=0.0, element_s=0.0, start_s=0.0, block=50)


def failure(scenario: Scenario) -> str:
    """Return the kind of error with which a scenario fails; empty if it does not."""
    try:
        scenario.run()
    except Exception as error:
        return type(error).__name__
    return ""


def shrunk(scenario: Scenario, fails: Callable[[Scenario], str] = failure) -> Scenario:
    """Return a small scenario that fails in the same way."""
    kind = fails(scenario)

    def still(smaller: Scenario) -> bool:
        return fails(smaller) == kind

    while True:
        before = scenario
        scenario = _with_less(scenario, still)
        if scenario == before:
            return scenario


def _with_less(scenario: Scenario, still: Callable[[Scenario], bool]) -> Scenario:
    disasters = _fewest(scenario.weather.disasters, lambda left: still(_with_weather(scenario, disasters=tuple(left))))
    scenario = _with_weather(scenario, disasters=tuple(disasters))
    for field in fields(Weather):
        calm = getattr(_CALM, field.name)
        if field.name != "disasters" and getattr(scenario.weather, field.name) != calm:
            scenario = _if(still, _with_weather(scenario, **{field.name: calm}), scenario)
    for name, plain in (("memory_budget", 1 << 30), ("inline_bytes", 32 << 10), ("workers", 1), ("interval_s", 0.2)):
        if getattr(scenario, name) != plain:
            scenario = _if(still, replace(scenario, **{name: plain}), scenario)
    data = _fewest(scenario.data, lambda left: bool(left) and still(_with_data(scenario, tuple(left))))
    scenario = _with_data(scenario, tuple(data))
    operations = _fewest(scenario.shape.operations, lambda left: still(_with_shape(scenario, operations=tuple(left))))
    scenario = _with_shape(scenario, operations=tuple(operations))
    if scenario.shape.window_s is not None and not scenario.shape.is_stream:
        scenario = _if(still, _with_shape(scenario, window_s=None), scenario)
    return scenario


def _if(still: Callable[[Scenario], bool], smaller: Scenario, otherwise: Scenario) -> Scenario:
    return smaller if still(smaller) else otherwise


def _with_weather(scenario: Scenario, **changes: Any) -> Scenario:
    return replace(scenario, weather=replace(scenario.weather, **changes))


def _with_shape(scenario: Scenario, **changes: Any) -> Scenario:
    return replace(scenario, shape=replace(scenario.shape, **changes))


def _with_data(scenario: Scenario, data: Any) -> Scenario:
    scenario = replace(scenario, data=data)
    return _with_shape(scenario, events=data) if scenario.shape.events else scenario


def _fewest(items: Sequence[_T], still: Callable[[list[_T]], bool]) -> list[_T]:
    """Return the items without those that are not needed, tried in halves, quarters and so on."""
    left = list(items)
    size = (len(left) + 1) // 2
    while size:
        at = 0
        while at < len(left):
            fewer = left[:at] + left[at + size :]
            if still(fewer):
                left = fewer
            else:
                at += size
        size //= 2
    return left


def as_test(scenario: Scenario) -> str:
    """Return a test to paste into ``test_found.py``. It names what differs from the defaults."""

    def given(item: Any) -> str:
        parts: list[str] = []
        for field in fields(item):
            value = getattr(item, field.name)
            if isinstance(value, Weather | Shape):
                parts.append(f"{field.name}={given(value)}")
            elif value != field.default:
                parts.append(f"{field.name}={value!r}")
        return f"{type(item).__name__}({', '.join(parts)})"

    return f"def test_found_by_seed_{scenario.seed}() -> None:\n    {given(scenario)}.run()\n"
