"""Panes as Beam's own trigger machine fires them: slow and simple, to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from apache_beam.transforms import trigger
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.window import BoundedWindow
from apache_beam.utils.timestamp import MIN_TIMESTAMP, Timestamp
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.engine.data.event_time import MAX, MIN, expiry_micros
from luminosity.engine.data.world import Clock


class BeamPanes:
    """Calls Beam's trigger machine for each key, looks at all timers, and closes windows that have expired."""

    def __init__(self, windowing: Windowing, clock: Clock) -> None:
        self._windowing = windowing
        self._clock = clock
        self._machine = _Machine(windowing, _Seconds(clock))
        self._states: dict[bytes, _State] = {}
        self._watermark = self.output_watermark = MIN

    @property
    def earliest(self) -> int:
        holds = [hold for state in self._states.values() for hold in state.holds(self._machine)]
        return min((hold for hold in holds if hold >= self.output_watermark // 1000 * 1000), default=MAX)

    @property
    def is_empty(self) -> bool:
        return not self._states

    def add(self, key: bytes, values: list[WindowedValue]) -> Iterator[tuple[bytes, WindowedValue]]:
        state = self._states.setdefault(key, _State())
        times = Timestamp(micros=self.output_watermark), Timestamp(micros=self._watermark)
        for pane in self._machine.process_elements(state, values, *times):
            yield self._fired(key, state, pane)

    def advance(self, watermark: int) -> Iterator[tuple[bytes, WindowedValue]]:
        self._watermark = watermark
        self._machine.watermark = Timestamp(micros=watermark)
        for domain, now in ((TimeDomain.WATERMARK, watermark), (TimeDomain.REAL_TIME, self._clock.micros())):
            while due := min(self._due(domain, now), default=None, key=lambda timer: timer[:3]):
                fire, _, name, window_id, key = due
                state = self._states[key]
                state.clear_timer(window_id, name, domain)
                time = Timestamp(micros=fire if domain == TimeDomain.WATERMARK else watermark)
                arguments = window_id, name, domain, time, state, self._machine.watermark
                for pane in self._machine.process_timer(*arguments):
                    yield self._fired(key, state, pane)
        for key, state in list(self._states.items()):
            for window in [w for w in state.window_ids if expiry_micros(w, self._windowing) < watermark]:
                if not state.unfired.isdisjoint(state.window_ids[window]):
                    yield self._fired(key, state, self._machine.last_pane(window, state))
                state.forget(window)
            if not state.window_ids:
                del self._states[key]
        self.settle()

    def settle(self) -> None:
        self.output_watermark = max(self.output_watermark, min(self._watermark, self.earliest))

    def _due(self, domain: str, now: int) -> list[tuple[int, int, str, Any, bytes]]:
        return [
            (Timestamp.of(fire).micros, state.orders[window_id, name, domain], name, window_id, key)
            for key, state in self._states.items()
            for window_id, timers in state.timers.items()
            for (name, of_domain, _), fire in timers.items()
            if of_domain == domain and Timestamp.of(fire).micros <= now
        ]

    def _fired(self, key: bytes, state: _State, pane: WindowedValue) -> tuple[bytes, WindowedValue]:
        for window in pane.windows:
            state.unfired.difference_update(state.window_ids.get(window, ()))
        return key, WindowedValue(list(pane.value), pane.timestamp, pane.windows, pane.pane_info)


class _Machine(trigger.GeneralTriggerDriver):
    """Beam's trigger machine, which knows early from late panes by the watermark of the input."""

    watermark: Timestamp = MIN_TIMESTAMP

    def _output(self, window: Any, finished: Any, state: Any, output_watermark: Any, maybe_ontime: Any) -> Any:
        pane = super()._output(window, finished, state, self.watermark, maybe_ontime)
        if finished:
            state.clear_state(window, self.WATERMARK_HOLD)  # no pane follows
        return pane

    def last_pane(self, window: BoundedWindow, state: _State) -> WindowedValue:
        adapter: Any = trigger.MergeableStateAdapter(state)
        return self._output(window, True, adapter, self.watermark, True)


class _Seconds:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def time(self) -> float:
        return self._clock.micros() / 1e6


class _State(trigger.InMemoryUnmergedState):
    """The state of a key."""

    def __init__(self) -> None:
        super().__init__()
        self.unfired: set[Any] = set()
        self.orders: dict[Any, int] = {}  # of timers
        self._last_order = 0

    @property
    def window_ids(self) -> dict[BoundedWindow, list[Any]]:
        ids: Any = self.get_global_state(trigger.MergeableStateAdapter.WINDOW_IDS, {})
        return ids

    def set_timer(self, window: Any, name: str, time_domain: str, timestamp: Any, dynamic_timer_tag: str = "") -> None:
        if self.timers[window].get((name, time_domain, dynamic_timer_tag)) != timestamp:
            self._last_order += 1
            self.orders[window, name, time_domain] = self._last_order
        super().set_timer(window, name, time_domain, timestamp, dynamic_timer_tag)

    def add_state(self, window: Any, tag: Any, value: Any) -> None:
        super().add_state(window, tag, value)
        if tag is trigger.GeneralTriggerDriver.ELEMENTS:
            self.unfired.add(window)

    def forget(self, window: BoundedWindow) -> None:
        for window_id in self.window_ids.pop(window):
            self.state.pop(window_id, None)
            self.timers.pop(window_id, None)
            self.unfired.discard(window_id)

    def holds(self, machine: _Machine) -> Iterator[int]:
        for ids in self.window_ids.values():
            times = [time for i in ids if i in self.state for time in self.state[i].get("watermark", ())]
            if times:
                hold: Any = machine.timestamp_combiner_impl.combine_all(times)
                yield hold.micros // 1000 * 1000
