"""User state in a worker: few requests to the runner, and a quick estimate of the size of cached cells.

Beam's worker caches cells across bundles under a token that comes with each bundle. The engine sends a token for each
shard of the bundle. A shard gets a new one when it moves to another worker or an attempt fails: see ``loop/shard.py``.
"""

from __future__ import annotations

import contextlib
import gc
import math
import sys
import time
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable
from itertools import islice
from typing import Any

from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners.worker import sdk_worker, statecache

from luminosity.engine.data import wire
from luminosity.engine.spill import group_files
from luminosity.engine.spill.files import SpillFile
from luminosity.engine.workers.sdk.stream_cache import StreamCache

__all__ = ["BatchingStateHandler", "CachingHandler", "estimate_size"]

_CacheToken = beam_fn_api_pb2.ProcessBundleRequest.CacheToken

_BATCH_BYTES = 1 << 20  # writes are sent from here on: large enough to amortize a message, small beside the cache
_PAGE_BYTES = 2 << 20  # of a large group: few reads, and small beside a worker's memory
_ENTRY_BYTES = 400  # what Python needs for an entry of the cache besides its value: key, token, order
_SNAPSHOTS = 64  # at most: a worker with one slot usually has four shards of each stateful stage, or all of a stream's
_SNAPSHOT_BYTES = 16 << 20  # of all snapshots: those of a stage's shards have at most a megabyte each
_OUTDATED_CELLS = 200_000  # of all snapshots, which is about 16 MB
_UNUSED_SNAPSHOT_S = 60.0  # in a stream, a snapshot that no bundle used for this long is forgotten: its shard has moved
_OUTDATED_IN_STREAM = 50_000  # cells of expired windows are among them, so that it fills up; a new snapshot is cheap
_MISSES = 1000  # a snapshot that lacked so many cells is requested again: that costs as much as some dozens of them
_SAMPLED = 8  # members of a container that are measured; the others count as their average
_DEPTH = 4  # levels below a cell that are measured
_UNKNOWN_BYTES = 64  # of an object that does not know its size
_LEAVES = frozenset([int, float, bool, str, bytes, type(None)])
_SHARED = (type, types.ModuleType, types.FrameType, types.BuiltinFunctionType, types.FunctionType, *weakref.ProxyTypes)


class _Writes:
    """The writes of one bundle that were not sent yet: for each cell, whether it is cleared first, and what to append.

    Later writes to a cell are merged into earlier ones.
    """

    def __init__(self) -> None:
        self.cells: dict[bytes, tuple[bool, list[bytes]]] = {}
        self.size = 0

    def append(self, cell_key: bytes, data: bytes) -> None:
        if cell_key not in self.cells:
            self.cells[cell_key] = False, []
            self.size += len(cell_key)
        self.cells[cell_key][1].append(data)
        self.size += len(data)

    def clear(self, cell_key: bytes) -> None:
        if cell_key not in self.cells:
            self.size += len(cell_key)
        self.cells[cell_key] = True, []


class _Snapshot:
    """The cells of a shard as the runner had them when it made the shard's token: keys are encoded ``StateKey``s.

    A cell is taken from it once. From then on, and once the cell is written, the cell is in Beam's cache or at the
    runner. If the snapshot is complete, a cell that is not in it is empty.
    """

    def __init__(self, is_complete: bool, cells: dict[bytes, bytes]) -> None:
        self._is_complete = is_complete
        self._cells = cells
        self.size = sum(map(len, cells)) + sum(map(len, cells.values()))  # in bytes, at first
        self.used_at = 0.0
        self.is_exhausted = False  # whether to request another one, before the next bundle
        self._misses = 0
        # Hashes of cells that were taken or written. A cell with the same hash as another is read from the runner.
        self._outdated: set[int] = set()

    def content(self, cell_key: bytes) -> bytes | None:
        """Return a cell's content, or None if only the runner has it."""
        if hash(cell_key) in self._outdated:
            return None
        return self._cells.get(cell_key, b"" if self._is_complete else None)

    def miss(self) -> None:
        """Note that a cell is requested which the snapshot lacks."""
        self._misses += 1
        if self._misses >= _MISSES:
            self.is_exhausted = True

    def outdate(self, cell_key: bytes, limit: int) -> None:
        """Note that the cell was taken or written. Beyond ``limit`` cells, the snapshot forgets everything."""
        self._cells.pop(cell_key, None)
        if self._is_complete or self._cells:
            self._outdated.add(hash(cell_key))
            if len(self._outdated) > limit:
                self.is_exhausted = True
                self._is_complete = False
                self._cells.clear()
                self._outdated.clear()


class _ShardTokens:
    """The tokens of a bundle's shards. Each cell is cached under the token of the shard that has its key."""

    def __init__(self, packed: bytes) -> None:
        self._shards, self.by_index, self.expired_ms = wire.unpack_tokens(packed) if packed else (1, {}, None)
        # A bundle of one shard has only its keys, however they are encoded.
        self.only = next(iter(self.by_index.items())) if len(self.by_index) == 1 else None

    def of(self, state_key: beam_fn_api_pb2.StateKey) -> tuple[int, bytes]:
        """Return the index and the token of a cell's shard. The token is empty if the cell must not be cached."""
        if self.only is not None:
            return self.only
        index = wire.shard_index(state_key.bag_user_state.key, self._shards)
        return index, self.by_index.get(index, b"")


_NO_TOKENS = _ShardTokens(b"")


class CachingHandler(sdk_worker.GlobalCachingStateHandler):
    """Beam's handler, but each cell has the token of its shard, also in the :class:`BatchingStateHandler` below."""

    def __init__(self, cache: statecache.StateCache, underlying: Any) -> None:
        super().__init__(cache, underlying)
        if isinstance(cache, StreamCache) and isinstance(underlying, BatchingStateHandler):
            underlying.limit_for_stream()

    @contextlib.contextmanager
    def process_instruction_id(self, bundle_id: str, cache_tokens: Iterable[_CacheToken]) -> Generator[None]:
        """Within the context, serve the state of this bundle."""
        token = next((token.token for token in cache_tokens if token.HasField("user_state")), b"")
        with super().process_instruction_id(bundle_id, cache_tokens):
            self._context.tokens = _NO_TOKENS
            self._context.only_token = b""
            tokens = _ShardTokens(token) if token else _NO_TOKENS
            if isinstance(self._state_cache, StreamCache):
                self._begin_in(self._state_cache, bundle_id, tokens)
            if isinstance(self._underlying, BatchingStateHandler):
                self._underlying.use_tokens(tokens)
                self._context.tokens = tokens
                if tokens.only is not None and self._state_cache.is_cache_enabled():
                    self._context.only_token = tokens.only[1]  # which is quicker than to look it up
            yield

    def _begin_in(self, cache: StreamCache, bundle_id: str, tokens: _ShardTokens) -> None:
        sides: dict[tuple[str, str], bytes] = self._context.side_input_cache_tokens
        cache.begin_bundle(bundle_id, tokens.by_index.values(), sides, tokens.expired_ms)

    def _get_cache_token(self, state_key: beam_fn_api_pb2.StateKey) -> Any:
        is_bag = state_key.HasField("bag_user_state")
        if is_bag and self._context.only_token:
            return self._context.only_token
        token = super()._get_cache_token(state_key)
        if is_bag and token:
            # Without a token of its shard, a cell is cached until the bundle ends.
            return self._context.tokens.of(state_key)[1] or self._context.bundle_cache_token
        return token

    def extend(self, state_key: beam_fn_api_pb2.StateKey, coder: Any, elements: Iterable[Any]) -> Any:
        """Append to a cell. Returns a future."""
        # Beam caches what is read. Cache also a cell that is only written at first, if that takes no request.
        if isinstance(self._underlying, BatchingStateHandler) and self._underlying.has_in_snapshot(state_key):
            self.blocking_get(state_key, coder)
        return super().extend(state_key, coder, elements)


class BatchingStateHandler(sdk_worker.GrpcStateHandler):
    """Beam's connection to the runner's state, but bags are read and written in batches.

    Beam's worker reads each cell with a request, writes the cells of a bundle at its end, and waits for the response to
    every request. Here the first read under a token brings a snapshot of the shard's cells, and a bundle waits once for
    its writes: the runner handles requests in their order, and fails the bundle if one of them fails. Several threads
    use the handler, each for its own bundle.
    """

    group_folder = ""  # where workers of this machine put large groups; set before the first bundle

    def __init__(self, state_stub: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unused_s = math.inf  # after which a snapshot is forgotten
        self._snapshots: OrderedDict[bytes, _Snapshot] = OrderedDict()  # by token, the least recently used first
        self._most_outdated = _OUTDATED_CELLS  # that snapshots remember
        super().__init__(state_stub)

    @contextlib.contextmanager
    def process_instruction_id(self, bundle_id: str) -> Generator[None]:
        """Within the context, send requests for this bundle. At its end, wait until all writes have arrived."""
        with super().process_instruction_id(bundle_id):
            self._context.writes = _Writes()
            self._context.has_written = False
            self._context.tokens = _NO_TOKENS
            self._context.snapshots = {}
            yield
            if self._context.has_written:
                # Even if the batch is empty: the response comes after those to all earlier batches.
                self._blocking_request(self._batch())

    def limit_for_stream(self) -> None:
        """Forget snapshots that are not used, and remember fewer cells. Call it before the first bundle."""
        self._unused_s = _UNUSED_SNAPSHOT_S
        self._most_outdated = _OUTDATED_IN_STREAM

    def use_tokens(self, tokens: _ShardTokens) -> None:
        """Set the tokens of the shards of this thread's bundle."""
        self._context.tokens = tokens
        now = self._clock()
        with self._lock:
            for token in tokens.by_index.values():
                if (snapshot := self._snapshots.get(token)) is None:
                    continue
                if snapshot.is_exhausted:
                    del self._snapshots[token]  # a new one has what the bundles so far have written
                else:
                    snapshot.used_at = now
                    self._snapshots.move_to_end(token)
                    self._context.snapshots[token] = snapshot
            while self._snapshots and now - next(iter(self._snapshots.values())).used_at >= self._unused_s:
                self._snapshots.popitem(last=False)

    def has_in_snapshot(self, state_key: beam_fn_api_pb2.StateKey) -> bool:
        """Return whether the next read of a cell takes no request. The first call under a token blocks for one."""
        if not state_key.HasField("bag_user_state"):
            return False
        cell_key = state_key.SerializeToString()
        if cell_key in self._context.writes.cells:
            return False
        snapshot = self._snapshot(state_key)
        return snapshot is not None and snapshot.content(cell_key) is not None

    def get_raw(
        self, state_key: beam_fn_api_pb2.StateKey, continuation_token: bytes | None = None
    ) -> tuple[bytes, bytes | None]:
        """Return one page of a cell, with the writes so far, and the token of the next page. May block."""
        if state_key.HasField("bag_user_state"):
            cell_key = state_key.SerializeToString()
            if cell_key in self._context.writes.cells:
                self._request(self._batch())
            elif not continuation_token and (snapshot := self._snapshot(state_key)) is not None:
                content = snapshot.content(cell_key)
                self._outdate(snapshot, cell_key)
                if content is not None:
                    return content, None
                snapshot.miss()
        elif self.group_folder and group_files.is_stored(state_key.runner.key):
            return self._stored_page(state_key.runner.key, int(continuation_token or 0))
        return super().get_raw(state_key, continuation_token)

    def _stored_page(self, token: bytes, first: int) -> tuple[bytes, bytes | None]:
        """Return some values of a large group, from a chunk on, out of a file of this machine."""
        file = SpillFile(self.group_folder, group_files.path_of(token, self.group_folder))
        file.keep()  # the runner removes it
        try:
            chunks = group_files.chunks_of(token, file)
            size, end = 0, first
            while end < len(chunks) and size < _PAGE_BYTES:
                size += chunks[end].size
                end += 1
            page = b"".join(chunk.read() for chunk in chunks[first:end])
        finally:
            file.release()
        return page, b"%d" % end if end < len(chunks) else None

    def append_raw(self, state_key: beam_fn_api_pb2.StateKey | None, data: bytes) -> Any:
        """Append to a cell. Returns a future, which is done at once for a bag."""
        assert state_key is not None
        if not state_key.HasField("bag_user_state"):
            return super().append_raw(state_key, data)
        cell_key = state_key.SerializeToString()
        self._context.writes.append(cell_key, data)
        return self._written(state_key, cell_key)

    def clear(self, state_key: beam_fn_api_pb2.StateKey | None) -> Any:
        """Clear a cell. Returns a future, which is done at once for a bag."""
        assert state_key is not None
        if not state_key.HasField("bag_user_state"):
            return super().clear(state_key)
        cell_key = state_key.SerializeToString()
        self._context.writes.clear(cell_key)
        return self._written(state_key, cell_key)

    def _written(self, state_key: beam_fn_api_pb2.StateKey, cell_key: bytes) -> Any:
        context = self._context
        context.has_written = True
        tokens = context.tokens
        snapshot = context.snapshots.get((tokens.only or tokens.of(state_key))[1])
        if snapshot is not None:
            self._outdate(snapshot, cell_key)
        if context.writes.size >= _BATCH_BYTES:
            self._request(self._batch())
        return sdk_worker._Future.done()  # pyright: ignore[reportPrivateUsage]  # Beam's handlers return it

    def _outdate(self, snapshot: _Snapshot, cell_key: bytes) -> None:
        snapshot.outdate(cell_key, self._most_outdated // (len(self._snapshots) or 1))

    def _batch(self) -> beam_fn_api_pb2.StateRequest:
        """Return a request with all writes that were not sent yet."""
        writes, self._context.writes = self._context.writes, _Writes()
        request = beam_fn_api_pb2.StateRequest()
        request.state_key.runner.key = wire.STATE_WRITES
        request.append.data = wire.pack_writes(writes.cells)
        return request

    def _snapshot(self, state_key: beam_fn_api_pb2.StateKey) -> _Snapshot | None:
        """Return the snapshot of a cell's shard, None if the cell has no token.

        The first time under its token, and once the last one is exhausted, request it and wait.
        """
        context = self._context
        index, token = context.tokens.only or context.tokens.of(state_key)
        snapshot = context.snapshots.get(token)
        if snapshot is not None or not token:
            return snapshot
        request = beam_fn_api_pb2.StateRequest()
        request.state_key.runner.key = wire.STATE_SNAPSHOT + b"%d" % index
        request.get.SetInParent()
        snapshot = _Snapshot(*wire.unpack_snapshot(self._blocking_request(request).get.data))
        snapshot.used_at = self._clock()
        with self._lock:
            context.snapshots[token] = self._snapshots[token] = snapshot
            size = sum(other.size for other in self._snapshots.values())
            while len(self._snapshots) > 1 and (len(self._snapshots) > _SNAPSHOTS or size > _SNAPSHOT_BYTES):
                _, oldest = self._snapshots.popitem(last=False)
                size -= oldest.size
        for cell_key in context.writes.cells:  # which the runner does not know yet
            self._outdate(snapshot, cell_key)
        return snapshot


def estimate_size(*values: Any) -> int:
    """Return the size in bytes of an entry of the state cache with these values.

    Replaces Beam's exact measurement, which looks at all modules of the process, for a millisecond, each time that a
    cell is read or written, and at all elements of a bag. Here a sample of the elements stands for all.
    """
    return _ENTRY_BYTES + sum(_size(value, _DEPTH) for value in values)


def _size(value: Any, depth: int) -> int:
    size = sys.getsizeof(value, _UNKNOWN_BYTES)
    if type(value) in _LEAVES or not depth:
        return size
    count, sample = _members(value)
    measured = [_size(member, depth - 1) for member in sample if not issubclass(type(member), _SHARED)]
    if not sample:
        return size
    return size + sum(measured) * count // len(sample)


def _members(value: Any) -> tuple[int, Collection[Any]]:
    """Return how many objects ``value`` refers to, and some of them."""
    if isinstance(value, (list, tuple)):
        step = max(1, len(value) // _SAMPLED)
        return len(value), value[::step]
    if isinstance(value, (dict, set, frozenset)):
        some = list(islice(value, _SAMPLED))
        return len(value), [(key, value[key]) for key in some] if isinstance(value, dict) else some
    is_aware = isinstance(value, statecache.CacheAware)
    members = value.get_referents_for_cache() if is_aware else gc.get_referents(value)
    return len(members), members[:: max(1, len(members) // _SAMPLED)]
