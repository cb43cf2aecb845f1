"""Elements that wait for unbounded side inputs: each until the windows that it reads there are ready."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from apache_beam.transforms.window import BoundedWindow, GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.event_time import MAX, Holds
from luminosity.engine.data.live_side_input import LiveSideInput
from luminosity.engine.data.saved_rows import BlockRows, Changes, SavedRows
from luminosity.engine.plan.codecs import ElementCodec

__all__ = ["Side", "SideGate"]

_NUMBER = struct.Struct(">Q")  # of blocks that wait for the same, in a checkpoint
_MOST_KNOWN_WINDOWS = 10_000  # whose side windows are remembered: more than are open at a time


@dataclass(frozen=True)
class Side:
    """One unbounded side input of a step."""

    data: LiveSideInput
    codec: ElementCodec  # of the side input's elements
    map_window: Callable[[BoundedWindow], BoundedWindow]  # from a window of the main input


class _Need(NamedTuple):
    """A window of a side input that an element reads."""

    side: int  # its place in the list of sides
    window: bytes
    end: int  # the last timestamp of the window


_Needs = frozenset[_Need]
_NOTHING: _Needs = frozenset()


class SideGate:
    """Keeps the main input of a step until the windows of its side inputs that it reads are ready.

    Other elements go past those that wait. An element in several windows is divided: it goes ahead in those whose side
    windows are ready. One that comes after its side windows have been forgotten is dropped and counted. Waiting blocks
    hold the watermark. Only the loop's thread uses it. Owns the blocks that wait.
    """

    def __init__(self, sides: list[Side], codecs: Mapping[str, ElementCodec], blocks: BlockStore) -> None:
        self._sides = sides
        self._codecs = codecs
        self._blocks = blocks
        self._is_same_for_all = all(side.codec.is_global for side in sides)
        self._waiting: dict[_Needs, list[tuple[str, Block]]] = {}
        self._known: dict[Any, _Needs] = {}
        self._seen: list[int] = []  # what the sides' ``changes`` were at the last look
        self.holds = Holds()
        self.count = 0  # waiting elements
        self.dropped = 0
        self._rows: dict[_Needs, dict[str, BlockRows]] = {}  # by read, what a checkpoint has
        self._gone: list[tuple[str, BlockRows]] = []  # what it need not have any more, by read
        self._last_number = 0

    def save(self, changes: Changes, owners: Mapping[str, str]) -> None:
        """Write what has changed since the last checkpoint. ``owners`` has the owner of the rows of each read."""
        for read_id, rows in self._gone:
            rows.clear(changes, owners[read_id])
        self._gone.clear()
        for needs, waiting in self._waiting.items():
            by_read: dict[str, list[Block]] = {}
            for read_id, block in waiting:
                by_read.setdefault(read_id, []).append(block)
            known = self._rows.setdefault(needs, {})
            for read_id, blocks in by_read.items():
                if read_id not in known:
                    known[read_id] = self._new_rows()
                known[read_id].save(blocks, changes, owners[read_id])

    def _new_rows(self) -> BlockRows:
        self._last_number += 1
        return BlockRows(_NUMBER.pack(self._last_number))

    def restore(self, saved: SavedRows, owners: Mapping[str, str]) -> None:
        """Let the blocks wait that a checkpoint has. Call it once, after the side inputs were restored.

        Drops none of them, since their side windows were kept for them. Those that can run by now come with
        :meth:`take_ready`.
        """
        for read_id, owner in owners.items():
            rows = BlockRows(b"")  # of the last run: the next checkpoint writes others
            for key, value in saved.rows(owner):
                for block in rows.restore(key, value, saved):
                    self._wait(self._needs_of(read_id, block), read_id, block)
                self._last_number = max(self._last_number, *_NUMBER.unpack_from(key))
            self._gone.append((read_id, rows))

    def _needs_of(self, read_id: str, block: Block) -> _Needs:
        """Return what a block waits for: all its elements wait for the same."""
        codec = self._codecs[read_id]
        if codec.is_global or self._is_same_for_all:
            return self._needs(GlobalWindow())
        header, _ = next(codec.elements(block.data()))
        return self._needs(header.windows[0])

    def admit(self, read_id: str, block: Block, watermark: int) -> list[Block]:
        """Return the elements of a block that can run now, and keep the others. Takes over the block."""
        parts = self._divide(read_id, block, watermark)
        ready: list[Block] = []
        for needs, part in parts:
            if needs:
                self._wait(needs, read_id, part)
            else:
                ready.append(part)
        return ready

    def _wait(self, needs: _Needs, read_id: str, block: Block) -> None:
        self._waiting.setdefault(needs, []).append((read_id, block))
        self.holds.add(block.hold)
        self.count += block.count

    def expiry(self, read_id: str, data: bytes) -> int:
        """Return the last watermark at which the side windows that encoded elements read are still there."""
        windows = {window for header, _ in self._codecs[read_id].elements(data) for window in header.windows}
        needs = {need for window in windows for need in self._needs(window)}
        return min((self._sides[need.side].data.expiry(need.end) for need in needs), default=MAX)

    def take_ready(self) -> Iterator[tuple[str, Block]]:
        """Remove and yield the waiting blocks that can run now, with the ids of their reads."""
        changes = [side.data.changes for side in self._sides]
        if not self._waiting or changes == self._seen:
            return
        self._seen = changes
        for needs in [needs for needs in self._waiting if self._is_ready(needs)]:
            self._gone += self._rows.pop(needs, {}).items()
            for read_id, block in self._waiting.pop(needs):
                self.holds.remove(block.hold)
                self.count -= block.count
                yield read_id, block

    def waiting_blocks(self) -> Iterator[Block]:
        """Yield the blocks that wait, the last ones first."""
        for waiting in reversed(self._waiting.values()):
            yield from (block for _, block in reversed(waiting))

    def release(self) -> None:
        """Release the blocks that wait. Called once, when the run ends."""
        for block in self.waiting_blocks():
            block.release()
        self._waiting.clear()

    def _divide(self, read_id: str, block: Block, watermark: int) -> list[tuple[_Needs, Block]]:
        """Return the parts of a block by what they wait for. Takes over the block."""
        codec = self._codecs[read_id]
        if codec.is_global or self._is_same_for_all:
            needs = self._needs(GlobalWindow())
            return [(_NOTHING if self._is_ready(needs) else needs, block)]
        parts: dict[_Needs, list[bytes]] = {}
        holds: dict[_Needs, int] = {}
        is_whole = True  # whether each element stays as it is
        for header, encoded, value_start in codec.whole_elements(block.data()):
            windows: dict[_Needs, list[BoundedWindow]] = {}
            for window in header.windows:
                needs = self._needs(window)
                expiry = min((self._sides[need.side].data.expiry(need.end) for need in needs), default=MAX)
                if expiry < watermark:
                    self.dropped += 1
                    is_whole = False
                    continue
                waits_for = _NOTHING if self._is_ready(needs) else needs
                windows.setdefault(waits_for, []).append(window)
                holds[waits_for] = min(holds.get(waits_for, block.hold), expiry)
            if len(windows) == 1 and len(next(iter(windows.values()))) == len(header.windows):
                parts.setdefault(next(iter(windows)), []).append(encoded)
                continue
            is_whole = False
            value = encoded[value_start:]
            for waits_for, some in windows.items():
                alone = WindowedValue(None, header.timestamp, tuple(some), header.pane_info)
                parts.setdefault(waits_for, []).append(codec.encode_header(alone) + value)
        if is_whole and len(parts) == 1:
            (needs,) = parts
            block.hold = holds[needs]  # the side windows of late elements must not be forgotten meanwhile
            return [(needs, block)]
        divided = [
            (
                needs,
                self._blocks.of_bytes(
                    data := b"".join(elements),
                    len(elements),
                    holds[needs],
                    weight=len(data),
                    # If elements refer to a large group's values, each part keeps the block, and thereby them, alive.
                    on_free=block.share().release if block.has_references else None,
                    token=block.token,
                ),
            )
            for needs, elements in parts.items()
        ]
        block.release()
        return divided

    def _needs(self, window: BoundedWindow) -> _Needs:
        """Return the windows of the side inputs that an element in ``window`` reads."""
        needs = self._known.get(window)
        if needs is None:
            if len(self._known) >= _MOST_KNOWN_WINDOWS:
                self._known.clear()
            mapped = [side.map_window(window) for side in self._sides]
            needs = self._known[window] = frozenset(
                _Need(index, self._sides[index].codec.encode_window(each), each.max_timestamp().micros)
                for index, each in enumerate(mapped)
            )
        return needs

    def _is_ready(self, needs: _Needs) -> bool:
        return all(self._sides[need.side].data.is_ready(need.window, need.end) for need in needs)
