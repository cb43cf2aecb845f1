"""Blocks of encoded elements, passed by reference, and the files that hold them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable

from luminosity.engine.plan.codecs import ElementCodec
from luminosity.engine.workers import wire


class _Shared:
    """What several blocks refer to; ``free`` is called with the last reference."""

    __slots__ = ("data", "free", "path", "references")

    def __init__(self, data: bytes, path: str, free: Callable[[], None]) -> None:
        self.data = data
        self.path = path  # where the data is, unless it is here
        self.free = free
        self.references = 1

    def release(self) -> None:
        self.references -= 1
        if self.references == 0:
            self.free()


_FILES: set[str] = set()


def files_in_use() -> set[str]:
    """The files that some block refers to."""
    return _FILES


def _in_file(path: str) -> _Shared:
    def free() -> None:
        _FILES.discard(shared.path)
        # Its worker may have died, and its files been removed, before we heard of this one.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(shared.path)

    shared = _Shared(b"", path, free)
    _FILES.add(path)
    return shared


class Block:
    """Some encoded elements: bytes, or a part of a file.

    Whoever holds a block releases it once. ``hold`` (microseconds) is a lower bound of what its elements may still
    cause: no watermark that depends on them passes it.
    """

    __slots__ = ("_content", "_start", "count", "hold", "size")

    def __init__(self, content: bytes | _Shared, start: int, size: int, count: int, hold: int) -> None:
        self._content = content
        self._start = start
        self.size = size
        self.count = count
        self.hold = hold

    @classmethod
    def of_bytes(cls, data: bytes, count: int, hold: int) -> Block:
        return cls(data, 0, len(data), count, hold)

    @classmethod
    def of_shared_bytes(cls, data: bytes, count: int, hold: int, free: Callable[[], None]) -> Block:
        """Bytes that refer to something elsewhere, which ``free`` frees once no block needs it."""
        return cls(_Shared(data, "", free), 0, len(data), count, hold)

    @classmethod
    def received(cls, message: bytes, hold: int) -> Block:
        """The block that a worker sent; a file it wrote is ours from here on."""
        count, content = wire.unpack(message)
        if isinstance(content, bytes):
            return cls.of_bytes(content, count, hold)
        return cls(_in_file(content.path), content.start, content.size, count, hold)

    def message(self) -> bytes:
        """The message by which a worker gets it."""
        if isinstance(self._content, bytes) or not self._content.path:
            return wire.pack_bytes(self.count, self.data())
        return wire.pack_span(self.count, wire.FileSpan(self._content.path, self._start, self.size))

    def data(self) -> bytes:
        data = self._content if isinstance(self._content, bytes) else self._content.data
        if data:
            return data[self._start : self._start + self.size]
        assert isinstance(self._content, _Shared)
        return wire.read_span(wire.FileSpan(self._content.path, self._start, self.size))

    def share(self) -> Block:
        """Another reference to the same elements."""
        if isinstance(self._content, _Shared):
            self._content.references += 1
        return Block(self._content, self._start, self.size, self.count, self.hold)

    def cut(self, codec: ElementCodec, count: int) -> tuple[Block, Block]:
        """This block in two, the first with ``count`` elements; takes this block's place."""
        size = codec.offset_after(self.data(), count)
        rest = self.share()
        head = Block(self._content, self._start, size, count, self.hold)
        rest._start += size
        rest.size -= size
        rest.count -= count
        return head, rest

    def release(self) -> None:
        if isinstance(self._content, _Shared):
            self._content.release()
        self._content = b""

    def spill(self, memory: str, disk: str) -> None:
        """Move its file from the folder ``memory`` to the folder ``disk``, if it lies there."""
        shared = self._content
        if isinstance(shared, _Shared) and os.path.dirname(shared.path) == memory:
            target = os.path.join(disk, os.path.basename(shared.path))
            shutil.move(shared.path, target)
            _FILES.discard(shared.path)
            _FILES.add(target)
            shared.path = target
