"""Blocks of encoded elements, passed by reference, and the files that hold them."""

from __future__ import annotations

import os
import shutil

from luminosity.engine.plan.codecs import ElementCodec
from luminosity.engine.workers import wire


class _File:
    """A file of elements that ends with its last reference."""

    __slots__ = ("path", "references", "size")

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.size = size
        self.references = 1

    def release(self) -> None:
        self.references -= 1
        if self.references == 0:
            os.unlink(self.path)


class Block:
    """Some encoded elements: bytes, or a part of a file.

    Whoever holds a block releases it once. ``hold`` (microseconds) is a lower bound of what its elements may still
    cause: no watermark that depends on them passes it.
    """

    __slots__ = ("_content", "_start", "count", "hold", "size")

    def __init__(self, content: bytes | _File, start: int, size: int, count: int, hold: int) -> None:
        self._content = content
        self._start = start
        self.size = size
        self.count = count
        self.hold = hold

    @classmethod
    def of_bytes(cls, data: bytes, count: int, hold: int) -> Block:
        return cls(data, 0, len(data), count, hold)

    @classmethod
    def received(cls, message: bytes, hold: int) -> Block:
        """The block that a worker sent; a file it wrote is ours from here on."""
        count, content = wire.unpack(message)
        if isinstance(content, bytes):
            return cls.of_bytes(content, count, hold)
        return cls(_File(content.path, content.size), content.start, content.size, count, hold)

    def message(self) -> bytes:
        """The message by which a worker gets it."""
        if isinstance(self._content, bytes):
            return wire.pack_bytes(self.count, self.data())
        return wire.pack_span(self.count, wire.FileSpan(self._content.path, self._start, self.size))

    def data(self) -> bytes:
        if isinstance(self._content, bytes):
            return self._content[self._start : self._start + self.size]
        return wire.read_span(wire.FileSpan(self._content.path, self._start, self.size))

    def share(self) -> Block:
        """Another reference to the same elements."""
        if isinstance(self._content, _File):
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
        if isinstance(self._content, _File):
            self._content.release()
        self._content = b""

    def spill(self, memory: str, disk: str) -> None:
        """Move its file from the folder ``memory`` to the folder ``disk``, if it lies there."""
        file = self._content
        if isinstance(file, _File) and os.path.dirname(file.path) == memory:
            target = os.path.join(disk, os.path.basename(file.path))
            shutil.move(file.path, target)
            file.path = target
