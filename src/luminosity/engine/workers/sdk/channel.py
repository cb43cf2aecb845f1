"""The data channel of workers: Beam's channel, but blocks go by reference instead of as bytes through the socket."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeAlias

from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners.worker import bundle_processor, data_plane
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import PANE_INFO_UNKNOWN

from luminosity.engine.data import wire
from luminosity.engine.spill import files

__all__ = [
    "BlockChannel",
    "BlockStream",
    "BlockWriter",
    "RepeatedTimer",
    "Room",
    "Spilling",
    "TimerStream",
]

_BLOCK_SECONDS = 0.05  # how long a slow step's first element waits for the next stage
_INLINE_BYTES = 32 << 10  # below this, a file costs more than the bytes in the message
LARGE_BYTES = 256 << 10  # an element that is a block of its own: a file costs less than to copy it three times
_PART_FOR_LONG = 0.5  # of the budget: above it, blocks that stay until a grouping's input is complete go to disk
_MOST_KNOWN = 10_000  # timers of a bundle that are known without encoding them: about 3 MB
_PLAIN = frozenset([int, str, bytes])  # of these, equal keys have equal encodings; other types may hold 1, 1.0 or True

Part: TypeAlias = bytes | memoryview
"""Some of the bytes of a block."""


class Room(Protocol):
    """Says whether there is memory for a block, such as :class:`.WriterQuota`."""

    @property
    def limit(self) -> int:
        """The memory budget in bytes."""
        ...

    def reserve(self, size: int, part: float = 1.0) -> bool:
        """Count ``size`` bytes as written if ``part`` of the budget has room for them. Returns whether it had."""
        ...

    def give_back(self, size: int) -> None:
        """Undo a reservation of ``size`` bytes that were not written."""
        ...


class Spilling(Protocol):
    """What a bundle that groups needs of its worker, such as :class:`BlockWriter`."""

    @property
    def memory_budget(self) -> int:
        """The memory budget of the run in bytes."""
        ...

    def new_file(self) -> files.SpillFile:
        """Return a new file in the spill folder, which is removed if this process ends."""
        ...


class BlockWriter:
    """Writes blocks to shared memory while the run's budget has room, and compressed to disk beyond it.

    Several threads of a worker may use it at once.
    """

    def __init__(self, memory_folder: str, spill_folder: str, quota: Room, worker_id: str) -> None:
        self._memory_folder = memory_folder
        self._spill_folder = spill_folder
        self._quota = quota
        self._worker_id = worker_id
        self._numbers = itertools.count(1)  # thread-safe

    @property
    def memory_budget(self) -> int:
        """The memory budget of the run in bytes."""
        return self._quota.limit

    def new_file(self) -> files.SpillFile:
        """Return a new file in the spill folder, which is removed if this process ends."""
        return files.SpillFile(self._spill_folder, name=f"{self._worker_id}.{next(self._numbers)}.groups")

    def message(self, count: int, *parts: Part, for_long: bool = False) -> bytes:
        """Store a block of ``count`` elements, in one part or more, and return the data message that refers to it.

        If the block will stay ``for_long``, it leaves some of the budget to blocks that move.
        """
        size = sum(map(len, parts))
        if size < _INLINE_BYTES:
            return wire.pack_bytes(count, b"".join(parts))
        name = f"{self._worker_id}.{next(self._numbers)}"
        path = os.path.join(self._memory_folder, name)
        if self._quota.reserve(size, _PART_FOR_LONG if for_long else 1.0):
            if _write(path, parts):
                return wire.pack_span(count, wire.FileSpan(path, 0, size))
            self._quota.give_back(size)
        path = os.path.join(self._spill_folder, name + files.SUFFIX)
        files.write_file(path, b"".join(parts))
        return wire.pack_span(count, wire.FileSpan(path, 0, size, is_packed=True))


def _write(path: str, parts: Collection[Part]) -> bool:
    """Write a file; return False if the file system is full."""
    try:
        with open(path, "xb", buffering=0) as file:
            for part in parts:
                files.write_all(file.fileno(), part)
    except OSError as error:
        if not files.is_full_disk(error):
            raise
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return False
    return True


class BlockStream(data_plane.ClosableOutputStream):
    """Collects the elements written to it in blocks of about 1 MB or 50 ms, and counts them.

    If ``is_eager``, the first element is a block of its own: the runner learns at once that there is output.
    """

    def __init__(
        self,
        send: Callable[..., None],
        close: Callable[[], None],
        *,
        is_eager: bool = False,
        block_bytes: int = wire.BLOCK_BYTES,
    ) -> None:
        """``send`` gets the number of elements of a block, and its parts; and what wraps its message, if need be."""
        super().__init__()
        self.splits = False  # whether the bundle's output for groupings is split by key
        self.writer: Spilling | None = None  # for a bundle that groups more than fits into memory
        self._block_bytes = block_bytes
        self._is_eager = is_eager
        self._send = send
        self._on_close = close
        self._count = 0
        self._first_at = 0.0

    def maybe_flush(self) -> None:
        """Count an element: Beam's worker calls this once after each. Send the block if it is large or old enough."""
        if self._count == 0:
            self._first_at = time.monotonic()
        self._count += 1
        if self._is_eager:
            self._is_eager = False
            self.flush()
        elif self.size() >= self._block_bytes or time.monotonic() - self._first_at > _BLOCK_SECONDS:
            self.flush()

    def add_parts(self, parts: Collection[Part]) -> None:
        """Add an element whose encoding has several parts. A large one is sent at once, and not copied."""
        if sum(map(len, parts)) < LARGE_BYTES:
            self.write(b"".join(parts))
            self.maybe_flush()
            return
        self.flush()
        self._is_eager = False
        self._send(1, *parts)

    def add_block(self, count: int, parts: Collection[Part], wrap: Callable[[bytes], bytes] | None = None) -> None:
        """Send a block of its own. ``wrap`` changes its message."""
        if wrap is None:
            self._send(count, *parts)
        else:
            self._send(count, *parts, wrap=wrap)

    def flush(self) -> None:
        """Send the block that was collected so far."""
        if self._count:
            self._send(self._count, self.get())
            self._clear()
            self._count = 0

    def close(self) -> None:
        """Send the last block and the end of the stream."""
        self.flush()
        self._on_close()


class TimerStream(data_plane.ClosableOutputStream):
    """Collects the timers that a bundle sets and clears, in messages of about 1 MB.

    If a timer is set to the same time again, as steps do for every element, only the last record is sent. Records that
    came in between keep their order, so the timers that are set in the end are the same.
    """

    def __init__(self, send: Callable[[bytes], None], close: Callable[[], None]) -> None:
        super().__init__()
        self._send = send
        self._on_close = close
        self._records: dict[bytes, None] = {}  # in the order of their last occurrence
        self._bytes = 0
        self._last = b""  # the record that was taken last
        self._known: dict[tuple[Any, ...], bytes] = {}  # records by what identifies them

    def maybe_flush(self) -> None:
        """Take the timer that was written: Beam's worker calls this once after each."""
        record = self.get()
        self._clear()
        self._take(record)

    def repeat(self, identity: tuple[Any, ...]) -> bool:
        """Take the record with this identity once more. Return False if it is not known."""
        record = self._known.get(identity)
        if record is None:
            return False
        self._take(record)
        return True

    def know(self, identity: tuple[Any, ...]) -> None:
        """Know the record that was taken last by this identity. Whatever has it must be encoded alike."""
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[identity] = self._last

    def _take(self, record: bytes) -> None:
        self._last = record
        if record in self._records:
            del self._records[record]
        else:
            self._bytes += len(record)
        self._records[record] = None
        if self._bytes >= wire.BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send the timers so far."""
        if self._records:
            self._send(b"".join(self._records))
            self._records.clear()
            self._bytes = 0

    def close(self) -> None:
        """Send the last timers and the end of the stream."""
        self.flush()
        self._on_close()


class RepeatedTimer(bundle_processor.OutputTimer):
    """Replaces Beam's timer in workers: one that is set to the same time again is not encoded again.

    Steps set their timer for every element, and encoding it takes as long as the rest of a small step.
    """

    def set(self, ts: Any, dynamic_timer_tag: str = "") -> None:
        """Set the timer to ``ts``, as Beam does."""
        stream, key = self._output_stream, self._key
        micros: int | None = None  # None: encode the timer
        is_alike = (
            self._paneinfo is PANE_INFO_UNKNOWN
            and type(key) in _PLAIN
            and self._time_domain == TimeDomain.WATERMARK  # in other domains, the element's timestamp is in the record
        )
        if is_alike and type(ts) is int:
            micros = ts * 1_000_000
        elif is_alike and type(ts) is Timestamp and ts.precision() == Timestamp.MICROS_PRECISION:
            micros = ts.micros
        if micros is not None and isinstance(stream, TimerStream):
            self._set_or_repeat(stream, ts, (type(key), key, self._window, micros, dynamic_timer_tag))
        else:
            super().set(ts, dynamic_timer_tag)

    def _set_or_repeat(self, stream: TimerStream, ts: Any, identity: tuple[Any, ...]) -> None:
        if not stream.repeat(identity):
            super().set(ts, identity[-1])
            stream.know(identity)


class BlockChannel(data_plane.GrpcClientDataChannel):
    """Replaces Beam's channel in workers. ``writer`` is set on the class before the first channel is made."""

    writer: BlockWriter

    def read(self, instruction_id: str, message: bytes) -> bytes:
        """Return the encoded elements of a message of a bundle."""
        return wire.read(message)

    def output_stream(self, instruction_id: str, transform_id: str) -> BlockStream:
        """Return the stream for the output of one transform in one bundle."""

        def send(count: int, *parts: Part, wrap: Callable[[bytes], bytes] | None = None) -> None:
            message = self.writer.message(count, *parts, for_long=wrap is not None)
            self.send_data(instruction_id, transform_id, message if wrap is None else wrap(message))

        stream = BlockStream(
            send,
            lambda: self.send_data(instruction_id, transform_id, is_last=True),
            is_eager=instruction_id.startswith(wire.SOURCE_PREFIX),
        )
        stream.splits = instruction_id.endswith(wire.SPLIT_SUFFIX)
        stream.writer = self.writer
        return stream

    def send_data(self, instruction_id: str, transform_id: str, data: bytes = b"", *, is_last: bool = False) -> None:
        """Send a message about a block, or the mark of the end."""
        self._enqueue_to_send(
            beam_fn_api_pb2.Elements.Data(
                instruction_id=instruction_id, transform_id=transform_id, data=data, is_last=is_last
            )
        )

    def output_timer_stream(self, instruction_id: str, transform_id: str, timer_family_id: str) -> TimerStream:
        """Return the stream for the timers of one family in one bundle."""

        def send(timers: bytes, is_last: bool = False) -> None:
            self._enqueue_to_send(
                beam_fn_api_pb2.Elements.Timers(
                    instruction_id=instruction_id,
                    transform_id=transform_id,
                    timer_family_id=timer_family_id,
                    timers=timers,
                    is_last=is_last,
                )
            )

        return TimerStream(send, lambda: send(b"", is_last=True))
