"""Blocks of encoded elements, passed by reference, and the store that counts and spills them."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from luminosity.engine.data import wire
from luminosity.engine.plan.codecs import ElementCodec
from luminosity.engine.spill import files
from luminosity.engine.spill.quota import Ledger

__all__ = ["Block", "BlockStore", "Content", "RemoteData", "RestoredContent"]

_PACK_BYTES = 1 << 20  # small pieces of data share a spill file of about this size
_numbers = itertools.count(1)


class RestoredContent(Protocol):
    """The data of blocks as a checkpoint has it: bytes, or a file."""

    @property
    def id(self) -> int:
        """The number by which the checkpoint names it."""
        ...

    @property
    def data(self) -> bytes | None:
        """The bytes, unless they are in a file."""
        ...

    @property
    def path(self) -> str | None:
        """The file, unless the bytes are here."""
        ...

    @property
    def base(self) -> int:
        """Where the data begins in the file."""
        ...

    @property
    def size(self) -> int:
        """How many bytes there are, unpacked."""
        ...

    @property
    def is_packed(self) -> bool:
        """Whether the file is compressed."""
        ...


class RemoteData(Protocol):
    """The elements of a block in the object stores of a cluster. Elements are counted, not bytes."""

    def message(self, first: int, count: int, size: int) -> bytes:
        """Return the message that hands ``count`` elements from ``first`` on to a worker."""
        ...

    def read(self, first: int, count: int) -> bytes:
        """Fetch these elements into this process."""
        ...

    def free(self) -> None:
        """Let the cluster drop the data."""
        ...


class _File:
    """A file that blocks refer to: plain in shared memory, as a worker wrote it, or packed on disk."""

    __slots__ = ("place", "references", "size")

    def __init__(self, path: str, size: int, is_packed: bool, references: int) -> None:
        self.place = path, is_packed  # replaced atomically, since other threads read a side input's blocks
        self.size = size
        self.references = references

    @property
    def is_packed(self) -> bool:
        return self.place[1]


class Content:
    """The data that blocks have in common after they were cut or shared."""

    __slots__ = ("base", "data", "file", "number", "on_free", "pins", "references", "remote", "token")

    def __init__(self, data: bytes, file: _File | None, on_free: Callable[[], None] | None, token: bytes = b"") -> None:
        self.number = 0  # in the checkpoint; 0 if it is in none
        self.token = token  # of the large group to which the elements refer
        self.data = data
        self.file = file  # has the data if it is not in ``data``
        self.remote: RemoteData | None = None  # has the data if neither of the two has it
        self.base = 0  # where the data starts in the file
        self.on_free = on_free
        self.pins = 0  # running bundles, whose workers open the file where it is now
        self.references = 1


class Block:
    """Several encoded elements, stored and moved as one unit: bytes, or a range of a file.

    A :class:`BlockStore` makes blocks. The holder of a block calls :meth:`release` once. ``hold`` (microseconds) is
    the earliest timestamp that output of the elements may have: no watermark that depends on them passes it.
    ``weight`` counts the block's bytes and those that its elements refer to. ``home`` is the id of the worker that may
    have a reader open for the elements. Only the loop's thread changes blocks; any thread may call :meth:`data`.
    """

    __slots__ = ("_content", "_start", "_store", "count", "hold", "home", "partition", "size", "weight")

    def __init__(
        self, store: BlockStore, content: Content, start: int, size: int, count: int, hold: int, weight: int
    ) -> None:
        self._store = store
        self._content = content
        self._start = start
        self.size = size
        self.count = count
        self.hold = hold
        self.home = ""
        self.partition = -1  # of a grouping, in which all keys of its elements are; -1: not known
        self.weight = weight

    def message(self) -> bytes:
        """Return the message that hands the block to a worker."""
        file, remote = self._content.file, self._content.remote
        if remote is not None:
            return remote.message(self._start, self.count, self.size)
        if file is None or not self._store.sends_files:
            return wire.pack_bytes(self.count, self.data())
        return wire.pack_span(self.count, self._span(*file.place))

    def data(self) -> bytes:
        """Return the encoded elements. Reads the file, or fetches the object, if they are not in memory."""
        if self._content.remote is not None:
            return self._content.remote.read(self._start, self.count)
        data, file = self._content.data, self._content.file  # in this order: spilling sets the file first
        if file is None:
            return data[self._start : self._start + self.size]
        while True:
            place = file.place
            try:
                return wire.read_span(self._span(*place))
            except FileNotFoundError:
                if file.place == place:
                    raise

    def _span(self, path: str, is_packed: bool) -> wire.FileSpan:
        return wire.FileSpan(path, self._content.base + self._start, self.size, is_packed)

    def pin(self) -> None:
        """Keep the data where it is until :meth:`unpin`, since a worker reads it there."""
        self._content.pins += 1

    def unpin(self) -> None:
        """Undo one :meth:`pin`."""
        self._content.pins -= 1

    def share(self) -> Block:
        """Return another reference to the same elements."""
        self._content.references += 1
        return Block(self._store, self._content, self._start, self.size, self.count, self.hold, self.weight)

    def cut(self, codec: ElementCodec, count: int) -> tuple[Block, Block]:
        """Cut this block after ``count`` elements. The two blocks that are returned take its place."""
        is_remote = self._content.remote is not None  # then the data need not be here
        size = self.size * count // self.count if is_remote else codec.offset_after(self.data(), count)
        rest = self.share()
        head = Block(self._store, self._content, self._start, size, count, self.hold, size)
        rest._start += count if is_remote else size
        rest.size -= size
        rest.weight = rest.size
        rest.count -= count
        return head, rest

    def release(self) -> None:
        """Drop this reference. The data is freed with the last one."""
        self._store.drop(self._content)

    @property
    def has_references(self) -> bool:
        """Whether the elements refer to data elsewhere, such as the values of a large group."""
        return self._content.on_free is not None

    @property
    def can_spill(self) -> bool:
        """Whether the data is in memory and may be moved to disk.

        Elements that refer to data elsewhere stay: they are small, and must notify the owner when they are freed.
        """
        content = self._content
        if content.remote is not None:
            return False  # the cluster's stores spill their objects themselves
        return not self.has_references and not content.pins and (content.file is None or not content.file.is_packed)

    @property
    def token(self) -> bytes:
        """The token of the large group to which the elements refer; empty if there is none."""
        return self._content.token

    @property
    def content(self) -> Content:
        """The shared data, for the store and for checkpoints."""
        return self._content

    @property
    def start(self) -> int:
        """Where the elements begin in the content: a byte, or the number of an element if they are remote."""
        return self._start


class BlockStore:
    """Makes a run's blocks, counts those in memory, and moves them to disk. Only the loop's thread uses it."""

    def __init__(self, spill_folder: str, ledger: Ledger) -> None:
        self._spill_folder = spill_folder
        self.ledger = ledger
        self.files: set[str] = set()  # paths that some block refers to
        self._restored_files: dict[str, _File] = {}
        self.kept: set[str] = set()  # paths that a checkpoint refers to, which stay until it does not
        self.sends_files = True  # whether workers see this process's files
        self.find_remote: Callable[[str], RemoteData] | None = None  # by key, on a cluster
        # Takes over a large group that a worker has grouped, by its token. Returns what frees it.
        self.adopt_group: Callable[[bytes], Callable[[], None]] | None = None

    def of_bytes(
        self,
        data: bytes,
        count: int,
        hold: int,
        *,
        weight: int | None = None,
        on_free: Callable[[], None] | None = None,
        token: bytes = b"",
    ) -> Block:
        """Make a block of bytes in memory.

        If the elements refer to data elsewhere, ``weight`` counts that data too, ``on_free`` is called once no block
        refers to it any more, and ``token`` names the large group that they refer to.
        """
        self.ledger.hold(len(data))
        content = Content(data, None, on_free, token)
        return Block(self, content, 0, len(data), count, hold, len(data) if weight is None else weight)

    def received(self, message: bytes, hold: int, writer: int) -> Block:
        """Make the block that a worker sent. The store takes over the file, if the worker wrote one."""
        partition, token, value_bytes, message = wire.unwrap(message)
        block = self._received(message, hold, writer)
        block.partition = partition
        if token:
            assert self.adopt_group is not None
            block.weight += value_bytes
            block.content.token, block.content.on_free = token, self.adopt_group(token)
        return block

    def _received(self, message: bytes, hold: int, writer: int) -> Block:
        count, content = wire.unpack(message)
        if isinstance(content, bytes):
            return self.of_bytes(content, count, hold)
        if isinstance(content, wire.ObjectSpan):
            assert self.find_remote is not None
            remote = Content(b"", None, None)
            remote.remote = self.find_remote(content.key)
            return Block(self, remote, 0, content.size, count, hold, content.size)
        file = self._file(content.path, content.size, content.is_packed, references=1)
        if content.is_packed:
            self.ledger.add_spilled(content.size)
        else:
            self.ledger.received(writer, content.size)
        return Block(self, Content(b"", file, None), content.start, content.size, count, hold, content.size)

    def restored(self, stored: RestoredContent, on_free: Callable[[], None] | None, token: bytes) -> Content:
        """Make the content of blocks that a checkpoint has. It has no reference until :meth:`block_of` makes one."""
        file = None
        if stored.path is None:
            self.ledger.hold(len(stored.data or b""))
        elif (file := self._restored_files.get(stored.path)) is None:
            self._restored_files[stored.path] = file = self._file(stored.path, stored.size, stored.is_packed, 1)
            if not stored.is_packed:
                self.ledger.hold(stored.size)
        else:
            file.references += 1
        content = Content(stored.data or b"", file, on_free, token)
        content.base, content.number, content.references = stored.base, stored.id, 0
        return content

    def block_of(self, content: Content, start: int, size: int, count: int, hold: int, weight: int) -> Block:
        """Make a block of a range of a restored content."""
        content.references += 1
        return Block(self, content, start, size, count, hold, weight)

    def drop(self, content: Content) -> None:
        """Drop one reference to a block's data, for :meth:`Block.release`."""
        content.references -= 1
        if content.references:
            return
        if content.remote is not None:
            content.remote.free()
        elif content.file is None:
            self.ledger.free(len(content.data))
            content.data = b""
        else:
            content.file.references -= 1
            if not content.file.references:
                self._remove(content.file.place[0])
                if not content.file.is_packed:
                    self.ledger.gone(content.file.size)
        if content.on_free is not None:
            content.on_free()

    def spill(self, blocks: Iterable[Block], wanted: int) -> int:
        """Move blocks to disk until ``wanted`` bytes of memory are free. Returns how many were freed."""
        freed = 0
        small: dict[int, Content] = {}
        small_bytes = 0
        for block in blocks:
            if freed + small_bytes >= wanted:
                break
            content = block.content
            if not block.can_spill or id(content) in small:
                continue
            if content.file is not None:
                freed += self._spill_file(content.file)
                continue
            small[id(content)] = content
            small_bytes += len(content.data)
            if small_bytes >= _PACK_BYTES:
                freed += self._spill_together(small.values())
                small, small_bytes = {}, 0
        return freed + (self._spill_together(small.values()) if small else 0)

    def _spill_file(self, file: _File) -> int:
        path, _ = file.place
        packed_path = os.path.join(self._spill_folder, os.path.basename(path) + files.SUFFIX)
        files.write_file(packed_path, wire.read_span(wire.FileSpan(path, 0, file.size)))
        self.files.add(packed_path)
        file.place = packed_path, True
        self._remove(path)
        self.ledger.gone(file.size)
        self.ledger.add_spilled(file.size)
        return file.size

    def _spill_together(self, contents: Collection[Content]) -> int:
        """Write small pieces of data into one file."""
        data = b"".join(content.data for content in contents)
        path = os.path.join(self._spill_folder, f"blocks.{next(_numbers)}{files.SUFFIX}")
        files.write_file(path, data)
        file = self._file(path, len(data), True, references=len(contents))
        base = 0
        for content in contents:
            content.base = base
            base += len(content.data)
            content.file = file
            content.data = b""
        self.ledger.free(len(data))
        self.ledger.add_spilled(len(data))
        return len(data)

    def _file(self, path: str, size: int, is_packed: bool, references: int) -> _File:
        self.files.add(path)
        return _File(path, size, is_packed, references)

    def _remove(self, path: str) -> None:
        self.files.discard(path)
        if path in self.kept:
            return
        # If the worker died, its files may have been removed before this one was received.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
