"""Elements that wait for unbounded side inputs: each until the windows that it reads there are ready."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from apache_beam.transforms.window import BoundedWindow, GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.sides.live_side_input import LiveSideInput
from luminosity.engine.data.watermarks import MAX, Holds
from luminosity.engine.plan.codecs import ElementCodec

__all__ = ["Side", "SideGate"]

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

    def admit(self, read_id: str, block: Block, watermark: int) -> list[Block]:
        """Return the elements of a block that can run now, and keep the others. Takes over the block."""
        parts = self._divide(read_id, block, watermark)
        ready: list[Block] = []
        for needs, part in parts:
            if needs:
                self._waiting.setdefault(needs, []).append((read_id, part))
                self.holds.add(part.hold)
                self.count += part.count
            else:
                ready.append(part)
        return ready

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
