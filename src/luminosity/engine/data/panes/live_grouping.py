"""GroupByKey over unbounded input: panes are emitted while the input goes on, as watermark and clock move."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from apache_beam.transforms import trigger
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.window import BoundedWindow, NonMergingWindowFn
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.event_time import MAX, MIN, Holds, expiry_micros
from luminosity.engine.data.group_rules import VALUES_LENGTH, values_in_state
from luminosity.engine.data.panes.pane_rows import Panes
from luminosity.engine.data.panes.pane_values import PaneValues
from luminosity.engine.data.panes.trigger_panes import TriggerPanes
from luminosity.engine.data.panes.window_panes import WindowPanes
from luminosity.engine.data.saved_rows import Changes, SavedRows, SingleRow
from luminosity.engine.data.state import StateStore
from luminosity.engine.data.wire import BLOCK_BYTES
from luminosity.engine.data.world import Clock
from luminosity.engine.plan.codecs import ElementCodec
from luminosity.engine.spill.table import LARGE_BYTES

__all__ = ["LiveGrouping", "panes_of"]

_MOST_KNOWN = 10_000  # bounds the cache of windows to some megabytes
_RESTORED_STEP_BYTES = 1 << 20  # between two looks at the memory after a restart
_INPUT_KEY = b"g"  # of the row with the pending input in a checkpoint, which comes before those of the panes
_BREATH_ELEMENTS = 200  # between two looks at the deadline: about a millisecond


def panes_of(windowing: Windowing, clock: Clock) -> Panes[Any]:
    """Return what decides on the panes of a GroupByKey with this windowing."""
    is_simple = isinstance(windowing.windowfn, NonMergingWindowFn) and windowing.triggerfn == trigger.DefaultTrigger()
    return WindowPanes(windowing) if is_simple else TriggerPanes(windowing, clock)


class LiveGrouping:
    """Collects the input of a GroupByKey by key and window, and emits a pane whenever a window's trigger fires.

    Drops elements that are later than allowed. Keys and values count against the memory budget, and values move to disk
    when it is used up. The values of a large pane stay in ``state``, where workers read them piece by piece. Only the
    loop's thread uses it. Call :meth:`release` when the run ends.
    """

    def __init__(
        self,
        written: ElementCodec,
        read: ElementCodec,
        windowing: Windowing,
        state: StateStore,
        blocks: BlockStore,
        clock: Clock,
        folder: str,
    ) -> None:
        self._written = written
        self._read = read
        self._state = state
        self._blocks = blocks
        self._clock = clock
        self._folder = folder
        self._windowing = windowing
        self._panes = panes_of(windowing, clock)
        self._known: dict[BoundedWindow, tuple[BoundedWindow, int]] = {}
        self._held_bytes = 0  # of the panes, as the ledger knows it
        self.may_refer_to_state = True  # whether readers can fetch a large pane's values from the state
        self.pending: deque[Block] = deque()  # not grouped yet, or in part
        self.pending_bytes = 0
        self._pending_holds = Holds()
        # Watermarks to move to, each with the number of blocks that arrived before it. There are at most as many as
        # pending blocks, and one.
        self._marks: deque[tuple[int, int]] = deque()
        self._arrived = self._absorbed = 0  # blocks
        self._work: Iterator[tuple[bytes, WindowedValue] | None] | None = None  # what :meth:`pump` has begun
        self._output: deque[Block] = deque()
        self._parts: list[bytes] = []  # of the block that is being made
        self._parts_bytes = self._parts_count = 0
        self._parts_hold = MAX
        self.watermark = MIN  # up to which all panes have fired
        self.dropped = 0  # elements that came later than their window allows
        # Gets those of a block: encoded, the windows that they are too late for, and the watermark.
        self.on_late: Callable[[Sequence[tuple[bytes, Sequence[BoundedWindow], int]]], None] | None = None
        self._input_row = SingleRow(_INPUT_KEY)

    def track(self) -> None:
        """Note from now on what changes between two checkpoints. Call it before the first block."""
        self._panes.track(self._written)

    @property
    def has_work(self) -> bool:
        """Whether something that :meth:`pump` has begun is not finished."""
        return self._work is not None

    def finish_work(self, deadline: float = math.inf) -> bool:
        """Go on with what :meth:`pump` has begun, until soon after ``deadline``, and begin nothing else.

        Returns whether it is finished. A checkpoint is made then, after you have taken the panes with
        :meth:`next_block`.
        """
        if self._work is None:
            return True
        is_complete = self._emit_until(self._work, deadline)
        self._count_memory()
        self._close_block()
        if is_complete:
            self._work = None
        return is_complete

    def save(self, changes: Changes, owner: str) -> None:
        """Write what has changed since the last checkpoint. Call it after :meth:`finish_work`.

        What was late before a restart is late after it, so the watermarks belong to it, also those that wait for
        pending input.
        """
        if self._work is not None or self._output:
            raise AssertionError("found a grouping with unfinished work or output, expected it to be at rest")
        marks = [(arrived - self._absorbed, watermark) for arrived, watermark in self._marks]
        pending = [changes.refer(block) for block in self.pending]
        self._input_row.save((self.watermark, marks, pending), changes, owner)
        self._panes.save(changes, owner)

    def restore(self, saved: SavedRows, owner: str, check_memory: Callable[[], None] = lambda: None) -> None:
        """Take over what a checkpoint has. Call it once, after :meth:`track` and before anything else.

        ``check_memory`` is called now and then, since there may be more than memory has room for.
        """
        rows = saved.rows(owner)
        first = next(rows, None)
        if first is None:
            return
        self.watermark, marks, pending = self._input_row.restore(first[1])
        self._marks.extend(marks)
        for reference in pending:
            self.add(saved.block(reference))
        for _ in self._panes.restore(rows):
            if self._panes.memory_bytes > self._held_bytes + _RESTORED_STEP_BYTES:
                self._count_memory()
                check_memory()
        self._count_memory()
        check_memory()

    @property
    def earliest(self) -> int:
        """The earliest timestamp that a pane or pending input may have, in microseconds."""
        return min(self._panes.earliest, self._pending_holds.minimum)

    @property
    def is_empty(self) -> bool:
        """Whether no key has an open window, and nothing is pending."""
        return self._panes.is_empty and not (self.pending or self._output)

    @property
    def memory_bytes(self) -> int:
        """How much memory keys and values of open windows take."""
        return self._panes.memory_bytes

    def add(self, block: Block) -> None:
        """Add input to be grouped by :meth:`pump`. Takes over the block."""
        self.pending.append(block)
        self._arrived += 1
        self.pending_bytes += block.weight
        self._pending_holds.add(block.hold)

    def pump(self, watermark: int, deadline: float = math.inf) -> bool:
        """Group pending input, then move event time to ``watermark`` and processing time to the clock's.

        Fires what is due by then. Stops soon after ``deadline``, and continues there with the next call. Returns
        whether there was anything to do. Input that arrives after this call does not keep event time from moving to
        ``watermark``, even if there is always more of it than can be grouped.
        """
        if watermark > (self._marks[-1][1] if self._marks else self.watermark):
            if self._marks and self._marks[-1][0] == self._arrived:
                self._marks.pop()
            self._marks.append((self._arrived, watermark))
        has_moved = False
        while True:
            if self._work is None:
                self._work = self._next_work()
            if self._work is None:
                return has_moved
            has_moved = True
            if not self.finish_work(deadline):
                return True

    def _next_work(self) -> Iterator[tuple[bytes, WindowedValue] | None] | None:
        # Blocks that arrived before a watermark are grouped at the watermark before.
        if self._marks and self._marks[0][0] <= self._absorbed:
            _, watermark = self._marks.popleft()
            return self._advance(watermark)
        fire = self._panes.next_fire()
        if (fire is not None and fire <= self._clock.micros()) or self._panes.has_due():
            return self._advance(self.watermark)
        if self.pending:
            return self._absorb(self.pending[0])
        self._panes.settle()
        return None

    def _absorb(self, block: Block) -> Iterator[tuple[bytes, WindowedValue] | None]:
        """Group the elements of a block. Yields the panes that fire at once."""
        by_key: dict[bytes, list[WindowedValue]] = {}
        watermark = self.watermark
        late: list[tuple[bytes, Sequence[BoundedWindow], int]] = []
        for number, element in enumerate(self._written.keyed_elements(block.data()), 1):
            header: Any = element.header
            known = [self._known.get(window) or self._know(window) for window in header.windows]
            windows = tuple([window for window, expiry in known if expiry >= watermark])
            self.dropped += len(known) - len(windows)
            if self.on_late is not None and len(windows) < len(known):
                late.append((element.encoded, [window for window, expiry in known if expiry < watermark], watermark))
            if windows:
                value = WindowedValue(element.value, header.timestamp, windows, header.pane_info)
                by_key.setdefault(element.key, []).append(value)
            if not number % _BREATH_ELEMENTS:
                yield None
        for key, values in by_key.items():
            yield from self._panes.add(key, values)
            yield None
        if late and self.on_late is not None:
            self.on_late(late)
        self.pending.popleft()
        self._absorbed += 1
        self.pending_bytes -= block.weight
        self._pending_holds.remove(block.hold)
        block.release()

    def _know(self, window: BoundedWindow) -> tuple[BoundedWindow, int]:
        """Return one object for all equal windows, which are slow to compare, and when the window expires."""
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        known = self._known[window] = window, expiry_micros(window, self._windowing)
        return known

    def _advance(self, watermark: int) -> Iterator[tuple[bytes, WindowedValue] | None]:
        yield from self._panes.advance(watermark)
        self.watermark = watermark

    def next_fire(self) -> int | None:
        """Return when the next processing-time trigger fires, in microseconds since 1970, or None if none is set."""
        return self._panes.next_fire()

    def next_block(self) -> Block | None:
        """Return the next panes, or None if there are none now."""
        return self._output.popleft() if self._output else None

    def spill(self, wanted: int) -> int:
        """Move values of open windows to disk until ``wanted`` bytes are free. Returns how many were freed."""
        freed, written = self._panes.spill(self._folder, wanted)
        self._blocks.ledger.add_spilled(written)
        self._count_memory()
        return freed

    def release(self) -> None:
        """Release all data."""
        for block in (*self.pending, *self._output):
            block.release()
        self.pending.clear()
        self._output.clear()
        self._work = None
        self._panes.release()
        self._count_memory()

    def _count_memory(self) -> None:
        self._blocks.ledger.hold(self._panes.memory_bytes - self._held_bytes)
        self._held_bytes = self._panes.memory_bytes

    def _emit_until(self, panes: Iterator[tuple[bytes, WindowedValue] | None], deadline: float) -> bool:
        """Encode panes until ``deadline``. Returns whether these were all."""
        for emitted in panes:
            if emitted is not None:
                self._emit(*emitted)
            if self._clock.monotonic() >= deadline:
                return False
        return True

    def _emit(self, key: bytes, pane: WindowedValue) -> None:
        values: PaneValues = pane.value
        start = self._read.encode_header(pane) + key
        # A late pane holds back no watermark that has passed it already.
        hold = max(pane.timestamp.micros // 1000 * 1000, self._panes.output_watermark)
        size = values.size
        if size > LARGE_BYTES and self.may_refer_to_state:
            self._close_block()
            self._output.append(self._large_pane(start, values, size, hold))
            return
        self._parts += (start, VALUES_LENGTH.pack(len(values)), *values.parts())
        self._parts_bytes += len(start) + VALUES_LENGTH.size + size
        self._parts_count += 1
        self._parts_hold = min(self._parts_hold, hold)
        values.release()
        if self._parts_bytes >= BLOCK_BYTES:
            self._close_block()

    def _large_pane(self, start: bytes, values: PaneValues, size: int, hold: int) -> Block:
        token = self._state.add_group(values.chunks())
        data = start + values_in_state(token)

        def free() -> None:
            self._state.remove_group(token)
            values.release()

        return self._blocks.of_bytes(data, 1, hold, weight=len(data) + size, on_free=free, token=token)

    def _close_block(self) -> None:
        if self._parts_count:
            self._output.append(self._blocks.of_bytes(b"".join(self._parts), self._parts_count, self._parts_hold))
            self._parts, self._parts_bytes, self._parts_count, self._parts_hold = [], 0, 0, MAX
