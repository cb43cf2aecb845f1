"""A language model that takes prompts as they come: a thread fills the slots, takes steps and gives answers.

This module imports torch, and is imported where a model is loaded.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from luminosity.errors import InvalidArgument, ModelDied
from luminosity.extras import require
from luminosity.inference.handlers.text.slots.choosing import Sampled, allow_only, choose
from luminosity.inference.handlers.text.slots.decoder import Decoder
from luminosity.inference.handlers.text.slots.device_slots import EVERY, Slots
from luminosity.inference.handlers.text.slots.prefixes import Prefixes
from luminosity.inference.handlers.text.slots.rows import Decode, Row
from luminosity.inference.handlers.text.slots.settings import Answer, Matcher, RowSettings, request_of, settings_of

__all__ = ["MakeSlots", "SlotModel"]

torch = require("torch", "torch")
_LOGGER = logging.getLogger(__name__)

_FEW = 16  # free slots; to read fewer prompts at once takes almost as long
_MOST_READ = 16_384  # tokens of prompts that are read at once; more only take memory, and rows under way wait
_LONG_ROWS = 8  # slots for rows that are too long for the others
MakeSlots: TypeAlias = Callable[[int, int, bool], Slots]
"""Makes slots: gets their number, their length, and whether steps may be recorded."""


class _Pool:
    """Slots with the rows in them, and those that wait for one."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.live: dict[int, Row] = {}
        self.taken: list[Row] = []
        """Rows whose prompts are about to be read."""

    def free(self) -> list[int]:
        """Return the free slots, the first ones first, so that few slots are in use at the front."""
        return [number for number in range(self.slots.count) if number not in self.live]


class SlotModel:
    """A decoder behind slots. Answers are :class:`Answer`; requests may come from any thread."""

    def __init__(
        self,
        decoder: Decoder,
        make_slots: MakeSlots,
        count: int,
        length: int,
        *,
        defaults: Mapping[str, Any],
        decode: Decode,
        fallback: Callable[[list[int], Mapping[str, Any]], Any],
        make_matcher: Callable[[], Matcher] | None = None,
        shares_prefixes: bool = True,
    ) -> None:
        """Start the thread.

        Args:
            decoder: the model.
            make_slots: makes slots on the model's device.
            count: how many slots there are, or fewer if memory is short.
            length: how many tokens a row in them may have; longer ones get slots of their own when they come.
            defaults: arguments of ``generate`` that hold unless a request says otherwise.
            decode: returns the text of tokens, for stop strings.
            fallback: answers prompts that are longer than what the slots compute as transformers does.
            make_matcher: limits what each row may write; None for no limit.
            shares_prefixes: whether tokens with which several prompts begin are computed once.
        """
        self.decoder = decoder
        self._make_slots = make_slots
        self._defaults = dict(defaults)
        self._decode = decode
        self._make_matcher = make_matcher
        self._fallback = fallback
        self._others = ThreadPoolExecutor(1, "slots-fallback")
        self._stream = torch.cuda.Stream(decoder.device) if decoder.device.type == "cuda" else None
        with self._on_device():
            self._main = _Pool(self._most_slots(count, length, recorded=True))
            if self._stream is not None:
                self._stream.synchronize()
        self._long: _Pool | None = None
        self._prefixes = Prefixes(self._main.slots.prefix_of) if shares_prefixes else None
        self._lock = threading.Condition()
        self._waiting: deque[Row] = deque()
        self._waiting_long: deque[Row] = deque()
        self._ended: list[tuple[Row, Answer]] = []
        """Rows whose answers are complete, but not handed out yet."""
        self._closed = False
        self._died: BaseException | None = None
        self._settings = lru_cache(maxsize=1024)(_settings_of_items)
        self._thread = threading.Thread(target=self._run, name="model-slots", daemon=True)
        self._thread.start()

    @property
    def capacity(self) -> int:
        """How many prompts it wants at once: those in slots, and as many that follow them."""
        return 2 * self._main.slots.count

    @property
    def waiting(self) -> int:
        """How many prompts wait for a slot."""
        return len(self._waiting) + len(self._waiting_long)

    @property
    def slots(self) -> Slots:
        """The slots for rows of usual length."""
        return self._main.slots

    def parameters(self) -> Iterator[Any]:
        """Yield all tensors of the model."""
        yield from self.decoder.parameters()

    def submit(self, example: Any, inference_args: Mapping[str, Any] | None = None) -> Future[Any]:
        """Return the future answer to a prepared prompt; ``inference_args`` are those of ``generate``."""
        ids, own = request_of(example)
        arguments = {**(inference_args or {}), **own}
        settings = self._settings_of({**self._defaults, **arguments})
        row = Row(np.asarray(ids, np.int32), settings, self._decode)
        if int(row.ids.max()) >= self.decoder.shape.vocabulary or int(row.ids.min()) < 0:
            raise ValueError(f"found the token {row.ids.max()}, expected one of the {self.decoder.shape.vocabulary:,}")
        if row.most > self.decoder.shape.longest:
            if self._make_matcher is not None:
                raise InvalidArgument(
                    f"found a prompt that may have {row.most:,} tokens with its answer, expected at most "
                    f"{self.decoder.shape.longest:,} for answers that have a format"
                )
            return self._others.submit(self._fallback, list(ids), arguments)
        row.matcher = None if self._make_matcher is None else self._make_matcher()
        with self._lock:
            if self._died is not None:
                raise ModelDied("the thread of the slots has failed") from self._died
            if self._closed:
                row.future.cancel()
                return row.future
            (self._waiting if row.most <= self._main.slots.length else self._waiting_long).append(row)
            self._lock.notify_all()
        return row.future

    def _settings_of(self, arguments: Mapping[str, Any]) -> RowSettings:
        try:
            return self._settings(tuple(sorted((name, _hashable(value)) for name, value in arguments.items())))
        except TypeError:  # a value that can't be part of a key
            return settings_of(arguments)

    def close(self) -> None:
        """Cancel all requests, end the thread and free the slots."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._others.shutdown(wait=False, cancel_futures=True)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _on_device(self) -> ExitStack:
        """Return the context in which this model computes."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode())
        if self._stream is not None:
            stack.enter_context(torch.cuda.device(self.decoder.device))
            stack.enter_context(torch.cuda.stream(self._stream))
        return stack

    def _most_slots(self, count: int, length: int, recorded: bool) -> Slots:
        """Make slots, or half of them if they don't fit into memory."""
        while True:
            try:
                return self._make_slots(count, length, recorded)
            except torch.OutOfMemoryError:
                if count <= 1:
                    raise
            _free_memory()
            count //= 2
            _LOGGER.warning("Memory is short: the model gets %d slots of %d tokens.", count, length)

    # What the thread does.

    def _run(self) -> None:
        try:
            with self._on_device():
                while self._wait_for_rows():
                    self._work_on(self._main, self._waiting)
                    self._work_on_long_rows()
        except BaseException as error:
            _LOGGER.exception("The slots of a model have failed")
            with self._lock:
                self._died = error
        self._end()

    def _end(self) -> None:
        """Hand out what is complete, fail or cancel what is left, and free the slots."""
        self._hand_out()
        with self._lock:
            pools = [self._main, *([self._long] if self._long else [])]
            left = [*self._waiting, *self._waiting_long]
            left += [row for pool in pools for row in (*pool.live.values(), *pool.taken) if not row.future.done()]
            self._waiting.clear()
            self._waiting_long.clear()
        for row in dict.fromkeys(left):
            if self._died is None:
                row.future.cancel()
            else:
                _fail(row, ModelDied(f"the model died: {self._died!r}"))
        for pool in pools:
            pool.live.clear()
            pool.slots.free()
        if self._prefixes is not None:
            self._prefixes.clear()

    def _wait_for_rows(self) -> bool:
        with self._lock:
            while not self._closed:
                pools = (self._main, self._long)
                if self._waiting or self._waiting_long or any(pool is not None and pool.live for pool in pools):
                    return True
                self._lock.wait()
            return False

    def _work_on(self, pool: _Pool, waiting: deque[Row]) -> None:
        for slot in [slot for slot, row in pool.live.items() if row.future.cancelled()]:
            del pool.live[slot]
        pool.taken = taken = self._next_rows(pool, waiting)
        for prefix, places in self._grouped(taken):
            self._read(pool, [taken[place] for place in places], prefix)
        pool.taken = []
        if pool.live:
            self._step(pool)
        if self._stream is None or not pool.live:
            self._hand_out()

    def _work_on_long_rows(self) -> None:
        """Give rows that are too long for the slots some of their own, which are freed afterwards."""
        if self._long is None and self._waiting_long:
            with self._lock:
                first = list(self._waiting_long)[:_LONG_ROWS]
            try:
                slots = self._most_slots(len(first), max(row.most for row in first), recorded=False)
            except torch.OutOfMemoryError as error:
                with self._lock:
                    self._waiting_long.popleft()
                _fail(first[0], error)
                return
            self._long = _Pool(slots)
        if self._long is None:
            return
        self._work_on(self._long, self._waiting_long)
        if not self._long.live:
            self._long = None
            _free_memory()

    def _next_rows(self, pool: _Pool, waiting: deque[Row]) -> list[Row]:
        """Take rows for free slots: for many at once, or for all that wait."""
        free = pool.free()
        with self._lock:
            if pool.live and len(waiting) > len(free) and len(free) < min(_FEW, pool.slots.count // 4):
                return []
            taken: list[Row] = []
            while waiting and len(taken) < len(free) and waiting[0].most <= pool.slots.length:
                row = waiting.popleft()
                if not row.future.cancelled():
                    taken.append(row)
        for slot, row in zip(free, taken, strict=False):
            row.slot = slot
        return taken

    def _grouped(self, rows: list[Row]) -> list[tuple[Any, list[int]]]:
        if self._prefixes is None:
            return [(None, list(range(len(rows))))] if rows else []
        try:
            return self._prefixes.group([row.ids for row in rows])
        except torch.OutOfMemoryError:
            self._prefixes.clear()
            return [(None, list(range(len(rows))))]

    def _read(self, pool: _Pool, rows: list[Row], prefix: Any) -> None:
        """Read prompts into their slots; fewer at once if memory is short."""
        before = 0 if prefix is None else len(prefix.ids)
        for part in _parts(rows, before):
            try:
                self._read_part(pool, part, prefix)
            except torch.OutOfMemoryError as error:
                _free_memory()
                if len(part) == 1:
                    _fail(part[0], error)
                else:
                    self._read(pool, part[: len(part) // 2], prefix)
                    self._read(pool, part[len(part) // 2 :], prefix)

    def _read_part(self, pool: _Pool, rows: list[Row], prefix: Any) -> None:
        slots = [row.slot for row in rows]
        scores = pool.slots.read([row.ids for row in rows], slots, prefix)
        penalties = {row.slot: row.settings.penalty for row in rows if row.settings.penalty != 1}
        for row in rows:
            if row.slot in penalties:
                pool.slots.forget(row.slot, row.ids)
        if penalties:
            pool.slots.penalise(scores, [place for place, slot in enumerate(slots) if slot in penalties], penalties)
        masked = _masks_of(dict(enumerate(rows)), self.decoder.shape.vocabulary)
        if masked is not None:
            allow_only(scores, *masked)
        chosen = choose(scores, _sampled_of(dict(enumerate(rows)), 1, self.decoder.device))
        pool.slots.start(slots, chosen, [len(row.ids) for row in rows])
        if penalties:
            pool.slots.remember(list(penalties))
        self._hand_out()
        for row, token in zip(rows, chosen.tolist(), strict=True):
            pool.live[row.slot] = row
            self._give(pool, row, [token])

    def _step(self, pool: _Pool) -> None:
        live = pool.live
        masked = _masks_of(live, self.decoder.shape.vocabulary)
        # A row with a mask needs a new one after each token.
        count = 1 if masked is not None else min(EVERY, max(row.left for row in live.values()))
        # The last token of each row is not yet among its keys.
        longest = max(row.length for row in live.values())
        sampled = _sampled_of(live, count, self.decoder.device)
        penalties = {slot: row.settings.penalty for slot, row in live.items() if row.settings.penalty != 1}
        enqueued = pool.slots.steps(count, longest, max(live) + 1, sampled, masked, penalties)
        self._hand_out()
        found = enqueued.cpu().numpy()
        for slot, row in list(live.items()):
            self._give(pool, row, found[: row.left, slot].tolist())

    def _give(self, pool: _Pool, row: Row, tokens: list[int]) -> None:
        """Hand a row its next tokens; if its text ends, its slot is free. A row that fails fails alone."""
        try:
            answer = row.take(tokens)
        except Exception as error:
            del pool.live[row.slot]
            _fail(row, error)
            return
        if answer is not None:
            del pool.live[row.slot]
            self._ended.append((row, answer))

    def _hand_out(self) -> None:
        """Hand out complete answers; on a GPU, call it when the next work is enqueued.

        Other threads then decode them and submit new prompts while this one waits for the device. Before, they would
        take turns with it at Python's lock, and each of the hundreds of kernels of a read waits for a turn.
        """
        for row, answer in self._ended:
            if row.future.set_running_or_notify_cancel():
                row.future.set_result(answer)
        self._ended.clear()


def _fail(row: Row, error: BaseException) -> None:
    if not row.future.cancelled() and row.future.set_running_or_notify_cancel():
        row.future.set_exception(error)


def _free_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _parts(rows: list[Row], before: int) -> Iterator[list[Row]]:
    """Yield rows whose prompts are read at once."""
    part: list[Row] = []
    tokens = 0
    for row in rows:
        new = len(row.ids) - before
        if part and tokens + new > _MOST_READ:
            yield part
            part, tokens = [], 0
        part.append(row)
        tokens += new
    if part:
        yield part


def _sampled_of(rows: Mapping[int, Row], steps: int, device: Any) -> Sampled | None:
    """Return the rows whose tokens are drawn, with numbers for so many steps."""
    drawn = {place: row for place, row in rows.items() if row.settings.is_sampled}
    if not drawn:
        return None
    draws = np.stack([row.draw(steps) for row in drawn.values()], axis=1)
    return Sampled.of(list(drawn), [row.settings for row in drawn.values()], draws, device)


def _masks_of(rows: Mapping[int, Row], vocabulary: int) -> tuple[list[int], Any] | None:
    """Return the rows that may not have every token, and the bits of those that they may have."""
    limited = {place: row.matcher for place, row in rows.items() if row.matcher is not None}
    if not limited:
        return None
    masks = np.zeros((len(limited), -(-vocabulary // 32)), np.int32)
    for mask, matcher in zip(masks, limited.values(), strict=True):
        matcher.fill(mask)
    return list(limited), masks


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _settings_of_items(items: tuple[tuple[str, Any], ...]) -> RowSettings:
    return settings_of(dict(items))
