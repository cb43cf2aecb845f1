"""User state, side inputs and large groups, as workers read and write them.

Only the bundle that writes state sees it, until the bundle commits. A bundle that fails leaves nothing behind.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apache_beam.coders import coder_impl, coders
from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.data import wire
from luminosity.engine.data.wire import StateKeys
from luminosity.engine.spill import group_files
from luminosity.engine.spill.diskmap import Cell, Cells
from luminosity.engine.spill.files import Chunk, MemoryChunk, SpillFile, StoredChunk
from luminosity.engine.spill.quota import Ledger
from luminosity.errors import UnsupportedPipeline

__all__ = ["BundleShards", "SideInputReader", "StateStore"]

# Reads a side input: returns the chunks of an encoded window and, for a multimap, key. See complete_side_input.py.
SideInputReader = Callable[[beam_fn_api_pb2.StateKey], Sequence[Chunk]]

_RESPONSE_BYTES = 4 << 20  # a page: large enough to amortize a request, small beside a worker's memory
_SNAPSHOT_BYTES = 1 << 20  # of a shard's cells: about ten thousand small ones, in the time of some dozens of requests
_COMPACT_CHUNKS = 64  # chunks of a bag with more of them are joined when it is committed
_COMPACT_BYTES = 1 << 20  # as far as each has at most this size, so that they still fit into pages
_ORDERED_ENTRY: Any = coders.TupleCoder(
    [coders.VarIntCoder(), coders.LengthPrefixCoder(coders.BytesCoder())]
).get_impl()
_SIDE_INPUT_TYPES = frozenset(
    [
        "iterable_side_input",
        "multimap_side_input",
        "multimap_keys_side_input",
        "multimap_keys_values_side_input",
    ]
)


@dataclass(frozen=True)
class BundleShards:
    """The shards of one bundle, by their index among the ``total`` shards of their stage."""

    total: int
    members: Mapping[int, Hashable]

    def cells_by_shard(self, cells: dict[bytes, Cell]) -> dict[Hashable, dict[bytes, Cell]]:
        """Return the cells of each shard. A key that is in none of the shards belongs to the first."""
        first = next(iter(self.members.values()))
        if len(self.members) == 1:
            return {first: cells}
        found: dict[Hashable, dict[bytes, Cell]] = {}
        key_of = StateKeys().read
        for cell_key, cell in cells.items():
            shard = self.members.get(wire.shard_index(key_of(cell_key), self.total), first)
            found.setdefault(shard, {})[cell_key] = cell
        return found


_NO_SHARDS = BundleShards(1, {0: None})


class _Overlay:
    """The uncommitted writes of one bundle of ``shards``, and the pages that it is reading."""

    def __init__(self, shards: BundleShards, side_inputs: Mapping[tuple[str, str], SideInputReader]) -> None:
        self.shards = shards
        self.side_inputs = side_inputs  # by step and tag, those that change
        self.cells: dict[bytes, Cell] = {}
        self.readings: dict[bytes, tuple[Sequence[Chunk], int]] = {}  # by token: chunks, and the first not sent yet
        self.error: Exception | None = None


class StateStore:
    """All state of a run.

    The server's threads call :meth:`handle`, the loop's thread everything else. The loop makes sure that a key belongs
    to one bundle at a time. Call :meth:`release` when the run ends.
    """

    def __init__(self, folder: str, ledger: Ledger) -> None:
        self._lock = threading.Lock()
        self._folder = folder
        self._ledger = ledger
        self._cells = Cells(folder, ledger)
        self._overlays: dict[str, _Overlay] = {}
        self._side_inputs: dict[tuple[str, str], SideInputReader] = {}
        self._groups: dict[bytes, list[Chunk]] = {}
        self._adopted: dict[str, SpillFile] = {}  # files of groups that workers wrote, by path
        self._tokens = itertools.count()
        self._changed: set[bytes] | None = None  # with checkpoints: the cells that changed since the last one

    def track(self) -> None:
        """Note changes from now on, for :meth:`take_changed`."""
        self._changed = set()

    def take_changed(self) -> list[tuple[bytes, Cell]]:
        """Return the cells that changed since the last call. One that is gone is empty."""
        changed, self._changed = self._changed or set[bytes](), set()
        with self._lock:
            return [(cell_key, self._cells.get(cell_key)) for cell_key in changed]

    def restore(self, cells: Mapping[bytes, Cell], shard: Hashable) -> None:
        """Put back cells of a shard, as a checkpoint has them. No cell comes twice."""
        with self._lock:
            self._cells.fill(cells, shard)

    def restore_group(self, token: bytes, chunks: list[Chunk]) -> None:
        """Serve a large group under the token that it had before a restart."""
        self._groups[token] = chunks
        for file in _files(chunks):
            file.share()
        self._tokens = itertools.count(max(next(self._tokens), int(token) + 1))

    def add_side_input(self, transform_id: str, tag: str, reader: SideInputReader) -> None:
        """Serve a side input. Call it before the first bundle runs."""
        self._side_inputs[transform_id, tag] = reader

    def add_group(self, chunks: list[Chunk]) -> bytes:
        """Serve a large group's values, which workers read page by page. Returns the token that names the group."""
        token = b"%d" % next(self._tokens)
        self._groups[token] = chunks
        self._ledger.hold(_in_memory(chunks))
        for file in _files(chunks):
            file.share()
        return token

    def adopt_group(self, token: bytes) -> Callable[[], None]:
        """Serve a group whose values a worker wrote to a file. Returns what ends that, for the last block of the group.

        The file is removed with the last of its groups.
        """
        path = group_files.path_of(token, self._folder)
        is_new = path not in self._adopted
        file = SpillFile(self._folder, path) if is_new else self._adopted[path].share()
        self._adopted[path] = file
        self._groups[token] = list(group_files.chunks_of(token, file))
        return lambda: self.remove_group(token)

    def adopted_files(self) -> set[str]:
        """Return the files of groups that workers wrote."""
        return set(self._adopted)

    def remove_group(self, token: bytes) -> None:
        """Release a group's values."""
        chunks = self._groups.pop(token)
        self._ledger.free(_in_memory(chunks))
        for file in _files(chunks):
            file.release()
            if file.is_released:
                self._adopted.pop(file.path, None)

    @property
    def memory_bytes(self) -> int:
        """The size of the cells in memory, all of which can be spilled."""
        return self._cells.memory_bytes

    def spill(self, wanted: int) -> int:
        """Move cells to disk until ``wanted`` bytes are free. Returns how many were freed."""
        with self._lock:
            return self._cells.spill(wanted)

    def release(self) -> None:
        """Release all groups and cells, once no worker runs."""
        for token in list(self._groups):
            self.remove_group(token)
        with self._lock:
            self._cells.release()

    def group_data(self, token: bytes) -> Iterator[bytes]:
        """Yield a group's encoded values."""
        return (chunk.read() for chunk in self._groups[token])

    def cells_of(self, transform_ids: Collection[str], keys: Collection[bytes]) -> list[tuple[bytes, bytes]]:
        """Return the committed cells of these steps and keys: each cell's ``StateKey`` and content, both encoded."""
        found: list[tuple[bytes, bytes]] = []
        with self._lock:
            state_keys = StateKeys()
            for cell_key, cell in self._cells.items():
                if state_keys.read(cell_key) in keys and state_keys.step in transform_ids:
                    chunks = [chunk if isinstance(chunk, bytes) else chunk[1] for chunk in cell]
                    found.append((cell_key, b"".join(chunks)))
        return found

    def begin(
        self,
        instruction_id: str,
        shards: BundleShards = _NO_SHARDS,
        side_inputs: Mapping[tuple[str, str], SideInputReader] | None = None,
    ) -> None:
        """Allow requests of a bundle that starts now. It touches no cells but those of its ``shards``.

        ``side_inputs`` serve those side inputs, by step and tag, of which each bundle reads a version of its own.
        """
        self._overlays[instruction_id] = _Overlay(shards, side_inputs or {})

    def error(self, instruction_id: str) -> Exception | None:
        """Return the exception that a request of this bundle raised. Workers ignore errors in responses to writes."""
        return self._overlays[instruction_id].error

    def commit(self, instruction_id: str) -> Mapping[Hashable, Mapping[bytes, Cell]]:
        """Apply the writes of a bundle. Returns the cells that it wrote, by their shards and keys."""
        overlay = self._overlays.pop(instruction_id)
        for cell in overlay.cells.values():
            if len(cell) > _COMPACT_CHUNKS and isinstance(cell[0], bytes):
                cell[:] = _compact(cell)
        by_shard = overlay.shards.cells_by_shard(overlay.cells)
        with self._lock:
            for shard, cells in by_shard.items():
                self._cells.put(cells, shard)
        if self._changed is not None:
            self._changed.update(overlay.cells)
        return by_shard

    def remove(self, cell_keys: Iterable[bytes], shard: Hashable) -> None:
        """Remove cells of a shard, whose windows have expired."""
        if self._changed is not None:
            cell_keys = list(cell_keys)
            self._changed.update(cell_keys)
        with self._lock:
            self._cells.put({cell_key: [] for cell_key in cell_keys}, shard)

    def discard(self, instruction_id: str) -> None:
        """Drop the writes of a bundle."""
        self._overlays.pop(instruction_id, None)

    def handle(self, request: beam_fn_api_pb2.StateRequest) -> beam_fn_api_pb2.StateResponse:
        """Respond to a request of a running bundle. Called on the server's threads; reads from disk if need be."""
        overlay = self._overlays.get(request.instruction_id)
        if overlay is None:
            error = f"bundle {request.instruction_id} is not running"
            return beam_fn_api_pb2.StateResponse(id=request.id, error=error)
        try:
            return self._respond(overlay, request)
        except Exception as error:
            overlay.error = error
            return beam_fn_api_pb2.StateResponse(id=request.id, error=f"{type(error).__name__}: {error}")

    def _respond(self, overlay: _Overlay, request: beam_fn_api_pb2.StateRequest) -> beam_fn_api_pb2.StateResponse:
        kind = request.WhichOneof("request")
        response = beam_fn_api_pb2.StateResponse(id=request.id)
        if kind == "get" and request.state_key.runner.key.startswith(wire.STATE_SNAPSHOT):
            index = int(request.state_key.runner.key.removeprefix(wire.STATE_SNAPSHOT))
            response.get.data = self._snapshot(overlay, overlay.shards.members[index])
        elif kind == "get":
            token = request.get.continuation_token
            response.get.data, response.get.continuation_token = self._page(overlay, request.state_key, token)
        elif kind == "append" and request.state_key.runner.key == wire.STATE_WRITES:
            self._write(overlay, wire.unpack_writes(request.append.data))
            response.append.SetInParent()
        elif kind == "append":
            self._append(overlay, request.state_key, request.append.data)
            response.append.SetInParent()
        elif kind == "clear":
            self._clear(overlay, request.state_key)
            response.clear.SetInParent()
        else:
            raise UnsupportedPipeline(f"found a state request {kind!r}, expected get, append or clear")
        return response

    def _snapshot(self, overlay: _Overlay, shard: Hashable) -> bytes:
        """Return the bags of a shard, except those that the bundle wrote; only some of them if they are large."""
        with self._lock:
            cells, is_complete = self._cells.group(shard, _SNAPSHOT_BYTES)
        bags = {
            key: b"".join(cell)
            for key, cell in cells.items()
            if isinstance(cell[0], bytes) and key not in overlay.cells
        }
        return wire.pack_snapshot(is_complete and not overlay.cells, bags)

    def _page(self, overlay: _Overlay, key: beam_fn_api_pb2.StateKey, token: bytes) -> tuple[bytes, bytes]:
        """Return one page of what was requested, and the token of the next, which is empty after the last page."""
        kind = key.WhichOneof("type")
        if kind == "bag_user_state":
            # Workers keep the token of a bag across bundles. Meanwhile chunks may be added and joined, but unless the
            # bag is cleared, the bytes up to here stay the same.
            start = int(token or 0)
            chunks = _from_byte(self._read(overlay, key), start)
            end = _page_end(chunks, 0)
            page = b"".join(chunk.read() for chunk in chunks[:end])
            return page, b"%d" % (start + len(page)) if end < len(chunks) else b""
        if kind in _SIDE_INPUT_TYPES or kind == "runner":
            # They don't change. Tokens of side inputs outlive the bundle, since workers keep them.
            chunks, first = self._read(overlay, key), int(token or 0)
        else:
            chunks, first = overlay.readings[token] if token else (self._read(overlay, key), 0)
        end = _page_end(chunks, first)
        page = b"".join(chunk.read() for chunk in chunks[first:end])
        if end == len(chunks):
            return page, b""
        if kind in _SIDE_INPUT_TYPES or kind == "runner":
            return page, b"%d" % end
        next_token = b"%d" % next(self._tokens)
        overlay.readings[next_token] = chunks, end
        return page, next_token

    def _read(self, overlay: _Overlay, key: beam_fn_api_pb2.StateKey) -> Sequence[Chunk]:
        kind = key.WhichOneof("type")
        if kind in _SIDE_INPUT_TYPES:
            side_input = getattr(key, kind)
            address = side_input.transform_id, side_input.side_input_id
            return (overlay.side_inputs.get(address) or self._side_inputs[address])(key)
        if kind == "runner":
            return self._groups[key.runner.key]
        if kind == "ordered_list_user_state":
            cell, first, last = self._range(overlay, key)
            return [MemoryChunk(entry) for _, entry in cell[first:last]]
        _require_bag(kind)
        cell_key = key.SerializeToString()
        if cell_key in overlay.cells:
            return list(map(MemoryChunk, overlay.cells[cell_key]))
        with self._lock:
            return list(map(MemoryChunk, self._cells.get(cell_key)))

    def _write(self, overlay: _Overlay, writes: dict[bytes, tuple[bool, list[bytes]]]) -> None:
        """Apply a batch of writes to bags."""
        for cell_key, (is_cleared, chunks) in writes.items():
            if is_cleared:
                overlay.cells[cell_key] = []
            if chunks:
                self._writable(overlay, cell_key).append(b"".join(chunks))

    def _append(self, overlay: _Overlay, key: beam_fn_api_pb2.StateKey, data: bytes) -> None:
        if key.WhichOneof("type") == "ordered_list_user_state":
            cell, _, _ = self._range(overlay, key)
            stream = coder_impl.create_InputStream(data)
            while stream.size() > 0:
                start = len(data) - stream.size()
                sort_key, _ = _ORDERED_ENTRY.decode_from_stream(stream, True)
                cell.append((sort_key, data[start : len(data) - stream.size()]))
            cell.sort(key=lambda entry: entry[0])  # stable: equal keys stay in the order of their arrival
            return
        _require_bag(key.WhichOneof("type"))
        self._writable(overlay, key.SerializeToString()).append(data)

    def _clear(self, overlay: _Overlay, key: beam_fn_api_pb2.StateKey) -> None:
        if key.WhichOneof("type") == "ordered_list_user_state":
            cell, first, last = self._range(overlay, key)
            del cell[first:last]
            return
        _require_bag(key.WhichOneof("type"))
        overlay.cells[key.SerializeToString()] = []

    def _writable(self, overlay: _Overlay, cell_key: bytes) -> Cell:
        if cell_key not in overlay.cells:
            with self._lock:
                overlay.cells[cell_key] = self._cells.get(cell_key)
        return overlay.cells[cell_key]

    def _range(self, overlay: _Overlay, key: beam_fn_api_pb2.StateKey) -> tuple[Cell, int, int]:
        """Return the cell of an ordered list, and the start and end of the key's range in it."""
        whole = beam_fn_api_pb2.StateKey()
        whole.CopyFrom(key)
        whole.ordered_list_user_state.ClearField("range")
        cell = self._writable(overlay, whole.SerializeToString())
        requested = key.ordered_list_user_state.range
        first = bisect_left(cell, requested.start, key=lambda entry: entry[0])
        return cell, first, bisect_left(cell, requested.end, key=lambda entry: entry[0])


def _require_bag(kind: str | None) -> None:
    if kind != "bag_user_state":
        raise UnsupportedPipeline(f"found state of type {kind!r}, expected a bag or an ordered list")


def _in_memory(chunks: list[Chunk]) -> int:
    return sum(chunk.size for chunk in chunks if isinstance(chunk, MemoryChunk))


def _files(chunks: list[Chunk]) -> list[SpillFile]:
    return list({id(chunk.file): chunk.file for chunk in chunks if isinstance(chunk, StoredChunk)}.values())


def _page_end(chunks: Sequence[Chunk], first: int) -> int:
    """Return the end of the page that starts at chunk ``first``."""
    size = 0
    for index in range(first, len(chunks)):
        size += chunks[index].size
        if size >= _RESPONSE_BYTES:
            return index + 1
    return len(chunks)


def _from_byte(chunks: Sequence[Chunk], start: int) -> Sequence[Chunk]:
    """Return what follows the first ``start`` bytes of ``chunks``."""
    for index, chunk in enumerate(chunks):
        if start < chunk.size:
            return [MemoryChunk(chunk.read()[start:]), *chunks[index + 1 :]] if start else chunks[index:]
        start -= chunk.size
    return []


def _compact(cell: Cell) -> Cell:
    """Join neighbouring chunks of a bag up to a size that fits into a page."""
    joined: list[list[bytes]] = [[]]
    size = 0
    for chunk in cell:
        if size and size + len(chunk) > _COMPACT_BYTES:
            joined.append([])
            size = 0
        joined[-1].append(chunk)
        size += len(chunk)
    return [b"".join(chunks) for chunks in joined]
