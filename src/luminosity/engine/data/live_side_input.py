"""Side inputs over unbounded input: their windows become readable one by one, and may change afterwards."""

from __future__ import annotations

import heapq
import logging
import struct
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.transforms import trigger
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.window import BoundedWindow, GlobalWindows
from apache_beam.utils.windowed_value import PaneInfoTiming, WindowedValue

from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.complete_side_input import SideInputData
from luminosity.engine.data.event_time import MAX, MIN
from luminosity.engine.data.panes.trigger_panes import TriggerPanes
from luminosity.engine.data.saved_rows import BlockRows, Changes, SavedRows, SingleRow
from luminosity.engine.data.world import Clock
from luminosity.engine.plan.codecs import ElementCodec
from luminosity.engine.spill.files import Chunk, MemoryChunk

__all__ = ["LiveSideInput", "shows_first_pane"]

_LOGGER = logging.getLogger(__name__)

# Keys of rows in a checkpoint, beside those of panes: pending blocks; times and version; windows; blocks of windows.
_PENDING_KEY, _TIMES_KEY, _WINDOW_PREFIX, _BLOCKS_PREFIX = b"p", b"s", b"w", b"x"
_NUMBER = struct.Struct(">Q")  # of a window


@dataclass
class _Window:
    """The elements of one window, and the contents that bundles have read or may read."""

    end: int  # its last timestamp, in microseconds
    blocks: list[Block] = field(default_factory=list[Block])
    # From which version on each content is read. All but the last are for bundles that still run.
    contents: list[tuple[int, SideInputData, bytes]] = field(default_factory=list[tuple[int, SideInputData, bytes]])
    last: bytes = b""  # the encoded value of the element that came last
    first_panes: int = 0  # how often first panes of groups without keys have come

    def release(self) -> None:
        for block in self.blocks:
            block.release()
        for _, content, _ in self.contents:
            content.release()


@dataclass
class _WindowRows:
    """What a checkpoint has of one window."""

    fields: SingleRow
    references: BlockRows
    blocks: list[Block]  # the list that the references belong to

    @classmethod
    def of_number(cls, number: bytes, blocks: list[Block]) -> _WindowRows:
        return cls(SingleRow(_WINDOW_PREFIX + number), BlockRows(_BLOCKS_PREFIX + number), blocks)

    def save(self, key: bytes, window: _Window, changes: Changes, owner: str) -> None:
        self.fields.save((key, window.end, window.last, window.first_panes), changes, owner)
        if window.blocks is not self.blocks:
            self.references.clear(changes, owner)
            self.blocks = window.blocks
        self.references.save(window.blocks, changes, owner)


class LiveSideInput:
    """Collects an unbounded side input by window.

    A window is ready when the watermark has passed its end, and then holds the elements of all its panes. If the
    trigger of the PCollection does not wait for that (:func:`shows_first_pane`), a window is ready at its first pane,
    and each later pane replaces the one before. In accumulating mode a pane replaces the earlier panes of its key.
    ``AsSingleton`` reads the last pane alone.

    Each change of a window that is ready makes a new version. A bundle opens the current version when it starts and
    reads that one until it ends, whatever arrives meanwhile.

    The loop's thread calls everything except :meth:`read`, which the server's threads call. Owns all blocks.
    """

    def __init__(
        self, codec: ElementCodec, windowing: Windowing, folder: str, blocks: BlockStore, clock: Clock
    ) -> None:
        self._codec = codec
        self._windowing = windowing
        self._folder = folder
        self._store = blocks
        self._clock = clock
        self._is_accumulating = windowing.accumulation_mode == trigger.AccumulationMode.ACCUMULATING
        self._panes = TriggerPanes(_discarding(windowing), clock) if shows_first_pane(windowing) else None
        self._held_bytes = 0  # of the values that wait for their trigger, as the ledger knows it
        self._pending: list[Block] = []  # arrived since the last ``advance``
        self._windows: dict[bytes, _Window] = {}  # by encoded window
        self._ends: list[tuple[int, bytes]] = []  # a heap: when windows are no longer needed
        self._changed: set[bytes] = set()  # windows with elements that are in none of their contents
        self._is_new_version_due = False
        self._lock = threading.Lock()  # protects ``contents`` and the windows' dictionary
        self._open: Counter[int] = Counter()  # the number of running attempts by version
        self._replaced: set[bytes] = set()  # windows with contents that only running bundles read
        self._readers_watermark = MIN
        self._has_warned = False
        self.lateness = windowing.allowed_lateness.micros  # how long after its end a window may be read or change
        self.version = 1
        self.watermark = MIN
        self.changes = 0  # rises with each event that may make windows ready
        self._pending_row, self._times = SingleRow(_PENDING_KEY), SingleRow(_TIMES_KEY)
        self._rows: dict[bytes, _WindowRows] = {}  # by encoded window
        self._gone: list[_WindowRows] = []
        self._last_number = 0

    @property
    def windows(self) -> int:
        """The number of windows that have elements."""
        return len(self._windows)

    # Checkpoints

    def track(self) -> None:
        """Note from now on what changes between two checkpoints. Call it before the first block."""
        if self._panes is not None:
            self._panes.track(self._codec)

    def save(self, changes: Changes, owner: str) -> None:
        """Write what has changed since the last checkpoint.

        Contents for running bundles are left out, since these bundles count as not started.
        """
        self._pending_row.save([changes.refer(block) for block in self._pending], changes, owner)
        self._times.save((self.watermark, self._readers_watermark, self.version), changes, owner)
        for rows in self._gone:
            changes.remove(owner, rows.fields.key)
            rows.references.clear(changes, owner)
        self._gone.clear()
        for key, window in self._windows.items():
            rows = self._rows.get(key)
            if rows is None:
                self._last_number += 1
                rows = self._rows[key] = _WindowRows.of_number(_NUMBER.pack(self._last_number), window.blocks)
            rows.save(key, window, changes, owner)
        if self._panes is not None:
            self._panes.save(changes, owner)

    def restore(self, saved: SavedRows, owner: str) -> None:
        """Take over what a checkpoint has. Call it once, after :meth:`track` and before anything else."""
        by_number: dict[bytes, tuple[_Window, _WindowRows]] = {}
        for row, value in saved.rows(owner):
            number = row[1:]
            if row == _PENDING_KEY:
                self._pending += map(saved.block, self._pending_row.restore(value))
            elif row == _TIMES_KEY:
                self.watermark, self._readers_watermark, self.version = self._times.restore(value)
            elif row.startswith(_WINDOW_PREFIX):
                window = _Window(0)
                rows = _WindowRows.of_number(number, window.blocks)
                key, window.end, window.last, window.first_panes = rows.fields.restore(value)
                self._windows[key], self._rows[key], by_number[number] = window, rows, (window, rows)
                heapq.heappush(self._ends, (window.end, key))
                self._changed.add(key)
                (self._last_number,) = _NUMBER.unpack(number)
            elif row.startswith(_BLOCKS_PREFIX):
                window, rows = by_number[number[: _NUMBER.size]]
                window.blocks += rows.references.restore(row, value, saved)
        self.changes += 1
        if self._panes is not None:
            for _ in self._panes.restore(saved.rows(owner)):
                pass
            self._count_memory(self._panes)

    # Input

    def add(self, block: Block) -> None:
        """Add elements, which count from the next :meth:`advance` on. Takes over the block."""
        self._pending.append(block)

    def advance(self, watermark: int) -> None:
        """Take in what has arrived, move event time to ``watermark``, and fire what is due by then."""
        if self._pending:
            self._absorb()
        if self._panes is not None:
            for fired in self._panes.advance(max(watermark, self.watermark)):
                if fired is not None:
                    self._show(fired[1])
            self._count_memory(self._panes)
        if watermark > self.watermark:
            self.watermark = watermark
            self.changes += 1

    def next_fire(self) -> int | None:
        """Return when a processing-time trigger fires next, in microseconds since 1970, or None if none is set."""
        return self._panes.next_fire() if self._panes is not None else None

    def is_due(self) -> bool:
        """Return whether :meth:`advance` would fire a processing-time trigger."""
        fire = self.next_fire()
        return fire is not None and fire <= self._clock.micros()

    def _absorb(self) -> None:
        elements: dict[bytes, tuple[BoundedWindow, list[WindowedValue]]] = {}
        for block in self._pending:
            for header, value in self._codec.elements(block.data()):
                for window in header.windows:
                    alone = WindowedValue(None, header.timestamp, (window,), header.pane_info)
                    alone.value = self._codec.encode_header(alone) + value
                    elements.setdefault(self._codec.encode_window(window), (window, []))[1].append(alone)
            block.release()
        self._pending.clear()
        for key, (window, values) in elements.items():
            if self._panes is None:
                self._put(key, window, [each.value for each in values], len(values), replaces=False)
                continue
            for _, pane in self._panes.add(b"", values):
                self._show(pane)

    def _show(self, pane: WindowedValue) -> None:
        values: list[bytes] = pane.value.parts()  # one part may hold many elements that were on disk
        count = len(pane.value)
        for window in pane.windows:
            key = self._codec.encode_window(window)
            if values or key not in self._windows:  # an empty pane says nothing new
                self._put(key, window, values, count, replaces=not self._is_accumulating)
        pane.value.release()

    def _put(self, key: bytes, window: BoundedWindow, values: list[bytes], count: int, *, replaces: bool) -> None:
        """Add ``count`` elements to a window, each with its header, or replace those that it has."""
        end = window.max_timestamp().micros
        if self.is_over(end, self._readers_watermark):
            return  # no element will read it
        self._is_new_version_due |= self.is_ready(key, end)
        known = self._windows.get(key)
        if known is None:
            known = _Window(end)
            with self._lock:
                self._windows[key] = known
            heapq.heappush(self._ends, (end, key))
        if values:
            (known.last,) = deque((value for _, value in self._codec.elements(values[-1])), maxlen=1)
        if self._is_accumulating:
            values = list(self._without_replaced(known, [block.data() for block in known.blocks], values))
            replaces, count = True, len(values)
        if replaces:
            for block in known.blocks:
                block.release()
            known.blocks = []
        if values:
            known.blocks.append(self._store.of_bytes(b"".join(values), count, MAX))
        self._changed.add(key)
        self.changes += 1

    def _without_replaced(self, window: _Window, old: list[bytes], new: list[bytes]) -> Iterator[bytes]:
        """Yield the elements of a window, without those that a later pane of the same key contains."""
        latest: dict[bytes | None, int] = {}
        found: list[tuple[bool, bytes | None, int, bytes]] = []
        has_first_pane = False
        for number, part in enumerate([*old, *new]):
            for header, value in self._codec.elements(part):
                pane: Any = header.pane_info
                is_of_group = pane.timing != PaneInfoTiming.UNKNOWN
                key = self._codec.key_of(value) if is_of_group else None
                has_first_pane |= is_of_group and key is None and pane.index == 0 and number >= len(old)
                latest[key] = max(latest.get(key, 0), pane.index)
                found.append((is_of_group, key, pane.index, self._codec.encode_header(header) + value))
        window.first_panes += has_first_pane
        if window.first_panes > 1 and not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "a side input has accumulating panes of several groups, and its elements are no pairs of key and "
                "value: it keeps all panes. Make them pairs: then it keeps the latest pane of each key"
            )
        # Of elements that are no pairs, it is not known which group they come from.
        if window.first_panes < 2:
            return (e for is_of_group, key, index, e in found if not is_of_group or index == latest[key])
        return (e for _, key, index, e in found if key is None or index == latest[key])

    # Reading

    def is_ready(self, key: bytes, end: int) -> bool:
        """Return whether the window with this encoding and this last timestamp may be read."""
        return self.watermark > end or self.watermark >= MAX or (self._panes is not None and key in self._windows)

    def is_over(self, end: int, watermark: int) -> bool:
        """Return whether a window with this last timestamp is not read by elements that arrive at ``watermark``."""
        return self.expiry(end) < watermark

    def expiry(self, end: int) -> int:
        """Return the last watermark at which elements may read a window with this last timestamp."""
        return min(end + self.lateness, MAX - 1)

    def open(self) -> int:
        """Return the current version, which stays readable until :meth:`close` is called as often."""
        if self._changed:
            self._renew()
        self._open[self.version] += 1
        return self.version

    def close(self, version: int) -> None:
        """End one reader's use of a version."""
        self._open[version] -= 1
        if not self._open[version]:
            del self._open[version]
            if version != self.version:
                self._release_old()

    def read(self, version: int, state_key: beam_fn_api_pb2.StateKey, *, only_last: bool) -> Sequence[Chunk]:
        """Return the chunks that ``state_key`` names in an open version; ``only_last``: of the latest element alone."""
        requested = getattr(state_key, str(state_key.WhichOneof("type")))
        with self._lock:
            window = self._windows.get(requested.window)
            contents = window.contents if window is not None else []
            found = next((content for content in reversed(contents) if content[0] <= version), None)
        if found is None:
            return []
        _, content, last = found
        if only_last and self._panes is not None:
            return [MemoryChunk(last)] if content.blocks else []
        if only_last and (of_last_pane := content.of_last_pane()) is not None:
            return of_last_pane  # otherwise one late element, which makes another pane, would fail all readers
        return content.read(state_key)

    def _renew(self) -> None:
        """Make the contents of changed windows that are ready."""
        if self._is_new_version_due:
            self.version += 1
            self._is_new_version_due = False
        ready = [key for key in self._changed if self.is_ready(key, self._windows[key].end)]
        self._changed.difference_update(ready)
        for key in ready:
            window = self._windows[key]
            content = SideInputData(self._codec, self._folder, self._store.ledger)
            for block in window.blocks:
                content.add(block.share())
            with self._lock:
                window.contents.append((self.version, content, window.last))
            if len(window.contents) > 1:
                self._replaced.add(key)
        self._release_old()

    def _release_old(self) -> None:
        """Release contents that no running bundle reads, and that later ones replace."""
        oldest = min(self._open, default=self.version)
        for key in list(self._replaced):
            window = self._windows[key]
            while len(window.contents) > 1 and window.contents[1][0] <= oldest:
                with self._lock:
                    _, content, _ = window.contents.pop(0)
                content.release()
            if len(window.contents) < 2:
                self._replaced.discard(key)

    def data(self) -> Iterator[bytes]:
        """Yield all encoded elements, one block at a time."""
        return (block.data() for window in self._windows.values() for block in window.blocks)

    # Memory

    def forget(self, watermark: int) -> None:
        """Forget windows that no element will read, given the watermark of all input that is still to read them."""
        self._readers_watermark = max(self._readers_watermark, watermark)
        while self._ends and self.is_over(self._ends[0][0], self._readers_watermark):
            _, key = heapq.heappop(self._ends)
            with self._lock:
                window = self._windows.pop(key)
            self._changed.discard(key)
            self._replaced.discard(key)
            if (rows := self._rows.pop(key, None)) is not None:
                self._gone.append(rows)
            window.release()

    def spill(self, store: BlockStore, wanted: int) -> int:
        """Move blocks, and values that wait for their trigger, to disk. Returns how many bytes were freed."""
        freed = store.spill((block for window in self._windows.values() for block in window.blocks), wanted)
        if self._panes is not None and freed < wanted:
            of_values, written = self._panes.spill(self._folder, wanted - freed)
            store.ledger.add_spilled(written)
            self._count_memory(self._panes)
            freed += of_values
        return freed

    def _count_memory(self, panes: TriggerPanes) -> None:
        self._store.ledger.hold(panes.memory_bytes - self._held_bytes)
        self._held_bytes = panes.memory_bytes

    def release(self) -> None:
        """Release all data. Called once, when the run ends."""
        for block in self._pending:
            block.release()
        self._pending.clear()
        if self._panes is not None:
            self._panes.release()
            self._count_memory(self._panes)
        for window in self._windows.values():
            window.release()
        self._windows.clear()


def shows_first_pane(windowing: Windowing) -> bool:
    """Return whether a side input with this windowing can be read from its first pane on.

    A trigger that waits for the end of the window says that there is no result before. The global window never ends.
    """
    at_the_end = {"DefaultTrigger", "AfterWatermark", "_Never"}
    kinds = {type(part).__name__ for part in _parts(windowing.triggerfn)}
    if isinstance(windowing.windowfn, GlobalWindows):
        return bool(kinds - at_the_end - {"Repeatedly"})
    return not kinds & at_the_end


def _parts(triggerfn: Any) -> Iterator[Any]:
    """Yield a trigger and the triggers that it is made of, except those that fire after the watermark only."""
    yield triggerfn
    inner = [getattr(triggerfn, name, None) for name in ("underlying", "early")]
    for part in [*inner, *getattr(triggerfn, "triggers", ())]:
        if part is not None:
            yield from _parts(part)


def _discarding(windowing: Windowing) -> Windowing:
    """Return the same windowing without accumulation: the side input itself keeps what earlier panes had."""
    return Windowing(
        windowing.windowfn,
        windowing.triggerfn,
        trigger.AccumulationMode.DISCARDING,
        windowing.timestamp_combiner,
        windowing.allowed_lateness.micros / 1e6,
    )
