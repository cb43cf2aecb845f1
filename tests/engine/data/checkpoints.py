"""A checkpoint in memory, and a way to interrupt a part of a run at any point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.saved_rows import BlockReference, Changes, SavedRows

__all__ = ["Checkpoint", "interrupted"]


class Checkpoint:
    """Keeps rows, and the contents of those blocks that the latest checkpoint refers to."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[bytes, bytes]] = {}
        self._contents: dict[int, bytes] = {}
        self._numbers: dict[tuple[int, int, int], tuple[int, Any]] = {}  # the content is kept, since its id is the key
        self._referred: set[int] = set()
        self._store: BlockStore | None = None
        self.written = 0  # rows and bytes of the latest checkpoint
        self.written_bytes = 0

    def save(self, write: Callable[[Changes], None]) -> None:
        """Make a checkpoint of what ``write`` writes."""
        self._referred.clear()
        self.written = self.written_bytes = 0
        write(self)
        self._contents = {number: self._contents[number] for number in self._referred}
        self._numbers = {key: found for key, found in self._numbers.items() if found[0] in self._referred}

    def saved(self, store: BlockStore) -> SavedRows:
        """Return the rows for a new run, whose blocks ``store`` has."""
        self._store = store
        return self

    def keys(self, owner: str) -> list[bytes]:
        """Return the keys of an owner's rows."""
        return sorted(self._rows.get(owner, {}))

    def put(self, owner: str, key: bytes, value: bytes) -> None:
        self._rows.setdefault(owner, {})[key] = value
        self.written += 1
        self.written_bytes += len(key) + len(value)

    def remove(self, owner: str, key: bytes) -> None:
        self._rows.get(owner, {}).pop(key, None)

    def remove_all(self, owner: str) -> None:
        self._rows.pop(owner, None)

    def refer(self, block: Block) -> BlockReference:
        data = block.data()
        key = id(block.content), block._start, block.size  # type: ignore[attr-defined]
        if key not in self._numbers:
            number = max(self._contents, default=0) + 1
            self._numbers[key] = number, block.content
            self._contents[number] = data
        number, _ = self._numbers[key]
        self._referred.add(number)
        return number, block.count, block.hold, block.weight

    def rows(self, owner: str) -> Iterator[tuple[bytes, bytes]]:
        yield from sorted(self._rows.get(owner, {}).items())

    def block(self, reference: BlockReference) -> Block:
        assert self._store is not None
        number, count, hold, weight = reference
        block = self._store.of_bytes(self._contents[number], count, hold, weight=weight)
        self._numbers[id(block.content), 0, block.size] = number, block.content
        return block


class _Part(Protocol):
    def finish(self) -> list[Any]: ...

    def save(self, changes: Changes) -> None: ...

    def restore(self, checkpoint: Checkpoint) -> None: ...

    def release(self) -> None: ...


_T = TypeVar("_T", bound=_Part)


def interrupted(
    make: Callable[[], _T], steps: Sequence[Callable[[_T], list[Any]]], saves: set[int], crashes: set[int]
) -> list[Any]:
    """Return what the steps give if the run is saved and interrupted before the steps with these indices.

    Each interruption happens once. The run then goes on behind the last step that was saved.
    """
    checkpoint, part, left = Checkpoint(), make(), sorted(crashes)
    output: list[Any] = []
    saved_position = saved_output = position = 0
    while position < len(steps):
        if position in saves:
            output += part.finish()
            checkpoint.save(part.save)
            saved_position, saved_output = position, len(output)
        if position in left:
            left.remove(position)
            part.release()
            part = make()
            part.restore(checkpoint)
            position = saved_position
            del output[saved_output:]
        output += steps[position](part)
        position += 1
    part.release()
    return output
