"""Beam's cache of state and side inputs in the worker of a stream: entries that nothing will read again are evicted.

Beam's cache evicts an entry only if it is full. The windows of a stream expire all the time, so the cache would fill up
with entries of expired windows, old side inputs and finished bundles, and the worker's memory would grow for hours.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners.worker import statecache

__all__ = ["StreamCache"]

_MARK_S = 30.0  # between two looks at the entries that were not used since the last one
_UNUSED_S = 60.0  # a token that no bundle brought for this long is no longer in use
# Entries that were not used for this long are evicted even if they may be read again. It is that long because a key may
# come back every few minutes: the cache holds some 150,000 cells, so at most 250 a second are read once more.
_IDLE_S = 600.0
_LEAST_LOOKS = 500  # entries that a bundle looks at, which takes some milliseconds
_BUNDLES_PER_SWEEP = 50  # if bundles are few, each looks at more entries
_TIME_SHIFT = 1 << 63  # Beam's coder of interval windows adds it to the end of the window, in milliseconds


class _Mark:
    """An entry of the cache that says when it was put there: entries before it were not used since."""

    def __init__(self, at: float) -> None:
        self.at = at


class StreamCache(statecache.StateCache):
    """Beam's cache, but entries leave it that are useless, or were not used for ten minutes.

    The cache keeps entries in the order of their last use. Every half a minute a mark is put at the end of that order.
    What lies before a mark of half a minute ago is looked at, some entries with each bundle: those in expired windows,
    and those whose token is no longer in use, are evicted. An entry that is evicted in error is read again, nothing
    else. Several threads use the cache.
    """

    def __init__(self, max_weight: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(max_weight)
        self._clock = clock
        self._marks: deque[_Mark] = deque()  # the oldest first
        # When a bundle last brought a token: its own id, the token of a shard's state, or that of a side input, which
        # comes with the step and the tag.
        self._used_at: dict[Hashable, float] = {}
        self._expired_ms: dict[bytes, int | None] = {}  # by the token of a shard's state: see begin_bundle
        self._side_tokens: dict[tuple[str, str], bytes] = {}  # the last ones, by step and tag
        self._pending: list[Any] = []  # keys to look at, the least recently used last
        self._looks = 0  # how many of them a bundle looks at

    def begin_bundle(
        self,
        bundle_id: str,
        state_tokens: Iterable[bytes],
        side_tokens: Mapping[tuple[str, str], bytes],
        expired_ms: int | None,
    ) -> None:
        """Note the tokens that a bundle uses, and evict some of the entries that are useless.

        Windows of its state that end at ``expired_ms`` or earlier have expired, if it is not None.
        """
        now = self._clock()
        with self._lock:
            self._used_at[bundle_id] = now
            for side, token in side_tokens.items():
                self._side_tokens[side] = token
                self._used_at[(*side, token)] = now
            for token in state_tokens:
                self._used_at[token] = now
                self._expired_ms[token] = expired_ms
            if not self._marks or now >= self._marks[-1].at + _MARK_S:
                self._mark(now)
            self._evict_idle(now)
            self._sweep()

    def _mark(self, now: float) -> None:
        """Put a mark behind all entries. Plan to look at those that were not used since the mark before it."""
        self._pending = []
        if self._marks:
            last = self._marks[-1]
            if last in self._cache:
                for key in self._cache:
                    if key is last:
                        break
                    if not isinstance(key, _Mark):
                        self._pending.append(key)
                self._pending.reverse()
        self._looks = max(_LEAST_LOOKS, len(self._pending) // _BUNDLES_PER_SWEEP)
        mark = _Mark(now)
        self._marks.append(mark)
        self._cache[mark] = statecache.WeightedValue(None, 1)
        self._current_weight += 1
        for token in [token for token, at in self._used_at.items() if now - at >= _UNUSED_S]:
            del self._used_at[token]
            if isinstance(token, bytes):
                del self._expired_ms[token]

    def _evict_idle(self, now: float) -> None:
        """Evict entries before the marks that are ten minutes old, some of them with each bundle."""
        evicted = 0
        while self._marks and now - self._marks[0].at >= _IDLE_S and evicted < self._looks:
            if self._marks[0] in self._cache:
                key, value = self._cache.popitem(last=False)
                self._current_weight -= value.weight()
                evicted += 1
                if key is not self._marks[0]:
                    continue
            self._marks.popleft()  # reached, or evicted by the size of the cache

    def _sweep(self) -> None:
        """Look at some of the entries that were not used for a while."""
        for _ in range(min(self._looks, len(self._pending))):
            key = self._pending.pop()
            if key in self._cache and self._is_useless(*key):
                self.invalidate(key)

    def _is_useless(self, state_key: bytes, token: str | bytes) -> bool:
        if isinstance(token, str):  # the id of a bundle
            return token not in self._used_at
        parsed = beam_fn_api_pb2.StateKey.FromString(state_key)
        kind = str(parsed.WhichOneof("type"))
        if kind != "bag_user_state":
            read = getattr(parsed, kind)
            side = read.transform_id, read.side_input_id
            return (*side, token) not in self._used_at and self._side_tokens.get(side) != token
        if token not in self._used_at:
            return True
        expired_ms, window = self._expired_ms[token], parsed.bag_user_state.window
        return expired_ms is not None and int.from_bytes(window[:8], "big") - _TIME_SHIFT <= expired_ms
