"""GroupByKey over unbounded input: panes are emitted while the input goes on, as watermark and clock move."""

from __future__ import annotations

import heapq
import itertools
import struct
from collections import deque
from collections.abc import Iterable
from typing import Any

from apache_beam.transforms import trigger
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.window import BoundedWindow
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.clock import Clock
from luminosity.engine.data.expiry import expiry_micros
from luminosity.engine.data.watermarks import MAX, MIN, Holds
from luminosity.engine.data.wire import BLOCK_BYTES
from luminosity.engine.plan.codecs import ElementCodec

__all__ = ["LiveGrouping"]

_LENGTH = struct.Struct(">i")  # Beam's iterable coder begins with the length
_HOLD_TAG = "watermark"  # Beam's trigger machine names the state of its holds so


class LiveGrouping:
    """Collects the input of a GroupByKey by key and window, and emits a pane whenever a window's trigger fires.

    Beam's trigger machine decides when that is. This class keeps its state and timers, holds the watermark back for
    panes that are still to come, drops elements that are later than allowed, and forgets windows that have expired.
    Only the loop's thread uses it. Call :meth:`release` when the run ends.
    """

    def __init__(
        self, written: ElementCodec, read: ElementCodec, windowing: Windowing, blocks: BlockStore, clock: Clock
    ) -> None:
        self._written = written
        self._read = read
        self._blocks = blocks
        self._clock = clock
        self._windowing = windowing
        self._machine = _TriggerMachine(windowing, _Seconds(clock))
        self._keys: dict[bytes, _KeyState] = {}
        self._timers: dict[str, list[_Timer]] = {TimeDomain.WATERMARK: [], TimeDomain.REAL_TIME: []}
        self._expiries: list[tuple[int, bytes]] = []  # a heap: when a window of a key expires
        self._order = itertools.count()
        self._holds = Holds()
        self.pending: deque[Block] = deque()  # not grouped yet
        self._pending_holds = Holds()
        self._output: deque[Block] = deque()
        self._parts: list[bytes] = []  # of the block that is being made
        self._parts_bytes = self._parts_count = 0
        self._parts_hold = MAX
        self.watermark = MIN  # of the input that has been grouped
        self._output_watermark = MIN
        self.dropped = 0  # elements that came later than their window allows

    @property
    def earliest(self) -> int:
        """The earliest timestamp that a pane or pending input may have, in microseconds."""
        return min(self._holds.minimum, self._pending_holds.minimum)

    @property
    def is_empty(self) -> bool:
        """Whether no key has an open window, and nothing is pending."""
        return not (self._keys or self.pending or self._output)

    def add(self, block: Block) -> None:
        """Add input to be grouped by :meth:`absorb`. Takes over the block."""
        self.pending.append(block)
        self._pending_holds.add(block.hold)

    def absorb(self) -> None:
        """Group the elements of one pending block, at the watermark of the last :meth:`advance`."""
        block = self.pending.popleft()
        by_key: dict[bytes, list[WindowedValue]] = {}
        for element in self._written.keyed_elements(block.data()):
            header: Any = element.header
            windows = tuple(window for window in header.windows if not self._has_expired(window))
            self.dropped += len(header.windows) - len(windows)
            if windows:
                value = WindowedValue(element.value, header.timestamp, windows, header.pane_info)
                by_key.setdefault(element.key, []).append(value)
        output_watermark = Timestamp(micros=self._output_watermark)
        for key, values in by_key.items():
            state = self._keys.get(key) or self._keys.setdefault(key, _KeyState(self, key))
            panes = self._machine.process_elements(state, values, output_watermark, Timestamp(micros=self.watermark))
            self._emit(state, panes)
            self._settle(state)
        self._pending_holds.remove(block.hold)
        block.release()
        self._close_block()

    def advance(self, watermark: int) -> None:
        """Move event time to ``watermark`` and processing time to the clock's, and fire what is due by then.

        Nothing may be pending, since it arrived at the watermark before.
        """
        self.watermark = max(self.watermark, watermark)
        self._fire(TimeDomain.WATERMARK, self.watermark)
        self._fire(TimeDomain.REAL_TIME, self._clock.micros())
        while self._expiries and self._expiries[0][0] < self.watermark:
            _, key = heapq.heappop(self._expiries)
            if (state := self._keys.get(key)) is not None:
                self._close_expired(state)
        self._close_block()
        self._output_watermark = max(self._output_watermark, min(self.watermark, self._holds.minimum))

    def next_fire(self) -> int | None:
        """Return when the next processing-time trigger fires, in microseconds since 1970, or None if none is set."""
        timers = self._timers[TimeDomain.REAL_TIME]
        while timers and not timers[0].is_set():
            heapq.heappop(timers)
        return timers[0].fire_micros if timers else None

    def next_block(self) -> Block | None:
        """Return the next panes, or None if there are none now."""
        return self._output.popleft() if self._output else None

    def release(self) -> None:
        """Release all data."""
        for block in (*self.pending, *self._output):
            block.release()
        self.pending.clear()
        self._output.clear()
        self._keys.clear()

    def schedule(self, timer: _Timer) -> None:
        """Note a timer that the trigger machine has set."""
        heapq.heappush(self._timers[timer.domain], timer)

    def next_order(self) -> int:
        """Return a number that is larger than all before."""
        return next(self._order)

    def _fire(self, domain: str, now: int) -> None:
        timers = self._timers[domain]
        while timers and timers[0].fire_micros <= now:
            timer = heapq.heappop(timers)
            if not timer.is_set():
                continue
            timer.clear()
            # The time of a processing-time timer says nothing about the window: only the watermark does.
            micros = timer.fire_micros if domain == TimeDomain.WATERMARK else self.watermark
            time, watermark = Timestamp(micros=micros), Timestamp(micros=self.watermark)
            state = timer.state
            self._emit(state, self._machine.process_timer(timer.window_id, timer.name, domain, time, state, watermark))
            self._settle(state)

    def _settle(self, state: _KeyState) -> None:
        """Update the hold of a key, and note when its windows expire."""
        # The watermark can't be held for a pane that is late already.
        hold = state.earliest_hold(self._machine.timestamp_combiner_impl, self._output_watermark)
        if hold != state.hold:
            if state.hold is not None:
                self._holds.remove(state.hold)
            if hold is not None:
                self._holds.add(hold)
            state.hold = hold
        for window in state.windows():
            if window not in state.expiring:
                state.expiring.add(window)
                heapq.heappush(self._expiries, (expiry_micros(window, self._windowing), state.key))

    def _close_expired(self, state: _KeyState) -> None:
        """Emit what the triggers of expired windows have left over, and forget these windows."""
        for window in [window for window in state.windows() if self._has_expired(window)]:
            if state.has_unfired(window):
                self._emit(state, [self._machine.last_pane(window, state, Timestamp(micros=self.watermark))])
            state.forget(window)
        state.expiring.intersection_update(state.windows())
        self._settle(state)
        if not state.windows():
            del self._keys[state.key]

    def _has_expired(self, window: BoundedWindow) -> bool:
        return expiry_micros(window, self._windowing) < self.watermark

    # Output

    def _emit(self, state: _KeyState, panes: Iterable[WindowedValue]) -> None:
        for pane in panes:
            for window in pane.windows:
                state.note_fired(window)
            values: list[bytes] = list(pane.value)
            parts = (self._read.encode_header(pane), state.key, _LENGTH.pack(len(values)), *values)
            self._parts += parts
            self._parts_bytes += sum(map(len, parts))
            self._parts_count += 1
            self._parts_hold = min(self._parts_hold, pane.timestamp.micros // 1000 * 1000)
            if self._parts_bytes >= BLOCK_BYTES:
                self._close_block()

    def _close_block(self) -> None:
        if self._parts_count:
            self._output.append(self._blocks.of_bytes(b"".join(self._parts), self._parts_count, self._parts_hold))
            self._parts, self._parts_bytes, self._parts_count, self._parts_hold = [], 0, 0, MAX


class _TriggerMachine(trigger.GeneralTriggerDriver):
    """Beam's trigger machine, which can also close a window."""

    def last_pane(self, window: BoundedWindow, state: _KeyState, watermark: Timestamp) -> WindowedValue:
        """Return a last pane with the elements that a window has left."""
        adapter: Any = trigger.MergeableStateAdapter(state)
        return self._output(window, True, adapter, watermark, True)


class _Seconds:
    """The clock as Beam's trigger machine wants it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def time(self) -> float:
        return self._clock.micros() / 1e6


class _Timer:
    """A timer of the trigger machine. It is valid as long as its state has it set for that time."""

    __slots__ = ("domain", "fire_micros", "name", "order", "state", "window_id")

    def __init__(self, state: _KeyState, window_id: Any, name: str, domain: str, fire_micros: int, order: int) -> None:
        self.state = state
        self.window_id = window_id
        self.name = name
        self.domain = domain
        self.fire_micros = fire_micros
        self.order = order

    def __lt__(self, other: _Timer) -> bool:
        return (self.fire_micros, self.order) < (other.fire_micros, other.order)

    def is_set(self) -> bool:
        return self.state.set_timers.get((self.window_id, self.name, self.domain)) is self

    def clear(self) -> None:
        del self.state.set_timers[self.window_id, self.name, self.domain]


class _KeyState(trigger.InMemoryUnmergedState):
    """What the trigger machine keeps for one key. Its timers are scheduled among those of all keys."""

    def __init__(self, grouping: LiveGrouping, key: bytes) -> None:
        super().__init__()
        self._grouping = grouping
        self.key = key
        self.hold: int | None = None
        self.set_timers: dict[tuple[Any, str, str], _Timer] = {}
        self.expiring: set[BoundedWindow] = set()  # windows whose expiry is scheduled
        self._unfired: set[Any] = set()  # ids of windows with elements that were in no pane yet

    def add_state(self, window: Any, tag: Any, value: Any) -> None:
        super().add_state(window, tag, value)
        if tag is trigger.GeneralTriggerDriver.ELEMENTS:
            self._unfired.add(window)

    def has_unfired(self, window: BoundedWindow) -> bool:
        """Return whether a window has elements that were in no pane yet."""
        return not self._unfired.isdisjoint(self._window_ids().get(window, ()))

    def note_fired(self, window: BoundedWindow) -> None:
        """Note that all elements of a window were in a pane."""
        self._unfired.difference_update(self._window_ids().get(window, ()))

    def set_timer(self, window: Any, name: str, time_domain: str, timestamp: Any, dynamic_timer_tag: str = "") -> None:
        micros = Timestamp.of(timestamp).micros
        timer = _Timer(self, window, name, time_domain, micros, self._grouping.next_order())
        self.set_timers[window, name, time_domain] = timer
        self._grouping.schedule(timer)

    def clear_timer(self, window: Any, name: str, time_domain: str, dynamic_timer_tag: str = "") -> None:
        self.set_timers.pop((window, name, time_domain), None)

    def windows(self) -> list[BoundedWindow]:
        """Return the windows that are open."""
        return list(self._window_ids())

    def _window_ids(self) -> dict[BoundedWindow, list[Any]]:
        ids: Any = self.get_global_state(trigger.MergeableStateAdapter.WINDOW_IDS, {})
        return ids

    def forget(self, window: BoundedWindow) -> None:
        """Drop all that is kept of a window."""
        for window_id in self._window_ids().pop(window):
            self.state.pop(window_id, None)
            self._unfired.discard(window_id)
            for timer in [timer for timer in self.set_timers if timer[0] == window_id]:
                del self.set_timers[timer]

    def earliest_hold(self, combiner: Any, watermark: int) -> int | None:
        """Return the earliest timestamp from ``watermark`` on of a pane that is still to come, after encoding."""
        holds: list[int] = []
        for window_ids in self._window_ids().values():
            times = [time for i in window_ids if i in self.state for time in self.state[i].get(_HOLD_TAG, ())]
            if times:
                holds.append(combiner.combine_all(times).micros // 1000 * 1000)
        return min((hold for hold in holds if hold >= watermark // 1000 * 1000), default=None)
