"""The lease of a copy: the right of one run to write it, which the run renews as long as it lives."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
from dataclasses import asdict, dataclass, replace

from luminosity.engine.data.world import World
from luminosity.engine.durable.copies.objects import LEASE, Writer, damaged
from luminosity.engine.durable.copies.places import Place
from luminosity.errors import CheckpointError, CheckpointFailed, CopyError

__all__ = ["Lease", "LeaseNote", "read_lease"]

_LOGGER = logging.getLogger(__name__)

_RENEWALS = 6  # within the length of a lease: some may fail
_LONGEST_PAUSE_S = 10.0  # between two renewals
_GRACE = 0.5  # of the length: so far the clocks of two machines may differ
_CLOSE_S = 10.0  # how long the end of a run waits for a place that does not answer


@dataclass(frozen=True)
class LeaseNote:
    """Who may write a copy, and until when."""

    folder: str  # the id of the checkpoint folder
    holder: str  # the process, in words
    epoch: int  # how often the copy was taken over, or its run started again
    token: str  # of this start
    length_s: float
    expires: float  # in seconds since 1970, by the holder's clock
    is_released: bool = False
    last: str = ""  # the last object that was written: a copy without it has lost something

    @property
    def writer(self) -> Writer:
        """The one who holds it, as objects name their writers."""
        return Writer(self.epoch, self.token)

    def free_in(self, now: float) -> float:
        """Return after how many seconds another run may take it; 0: it may now."""
        return 0.0 if self.is_released else max(0.0, self.expires + _GRACE * self.length_s - now)


def read_lease(place: Place) -> LeaseNote | None:
    """Return who may write a copy; None if nobody has written it, or somebody has removed the lease."""
    pieces = place.read(LEASE)
    if pieces is None:
        return None
    try:
        return LeaseNote(**json.loads(b"".join(pieces)))
    except (TypeError, ValueError) as error:
        raise damaged(place.address, LEASE, f"can't be read ({error})") from error


class Lease:
    """The lease of a copy that this process has taken. A thread of its own renews it until :meth:`close`.

    Who can't renew it for its length may not write any more, since another run may take it. Any thread may ask.
    """

    def __init__(self, place: Place, folder: str, length_s: float, world: World) -> None:
        """Take the lease, whoever had it: the caller has looked at :func:`read_lease`.

        Raises :class:`CheckpointError` if another run takes it at the same moment.
        """
        self._place = place
        self._clock = world.clock
        self._lost = ""
        self._closed = threading.Event()
        before = read_lease(place)
        self._last = before.last if before is not None else ""  # until there is a base of this start
        self._note = LeaseNote(
            folder=folder,
            holder=f"process {os.getpid()} on {socket.gethostname()}",
            epoch=1 + (before.epoch if before is not None else self._newest_epoch()),
            token=world.token(4),
            length_s=length_s,
            expires=0.0,
        )
        self._length_s = length_s
        self._valid_until = 0.0
        self._write()
        found = read_lease(place)
        if found is None or found.token != self._note.token:
            raise CheckpointError(
                f"{found.holder if found else 'another run'} has taken the copy in {place.address} at the same moment",
                fix="start one run for each copy",
            )
        self._thread = world.start_thread(self._run, "luminosity-copy-lease")

    @property
    def writer(self) -> Writer:
        """What names this start in the objects that it writes."""
        return self._note.writer

    def wrote(self, name: str) -> None:
        """Note the last object, which the next renewal writes down."""
        self._last = name

    def check(self) -> None:
        """Raise :class:`CheckpointFailed` if another run has the lease, or may have it."""
        if self._lost:
            raise CheckpointFailed(
                f"the run has lost its copy in {self._place.address}: {self._lost}; this run ends, so that no two do "
                "the same work",
                fix="leave it to the other run; if there is none, start again with the same --checkpoint_dir",
            )
        if self._clock.monotonic() > self._valid_until:
            raise CheckpointFailed(
                f"the lease of the copy in {self._place.address} could not be renewed for {self._length_s:g} s, and "
                "another machine may go on with it; this run ends, so that no two do the same work",
                fix="start again with the same --checkpoint_dir once the place can be reached; --copy_lease=TIME lets "
                "a run outlast longer outages",
            )

    def close(self, *, is_released: bool = True) -> None:
        """Stop renewing the lease and, if ``is_released`` is set, let another run have it at once."""
        self._closed.set()
        self._thread.join(_CLOSE_S)
        if is_released and not self._lost:
            with contextlib.suppress(CopyError):  # It expires then.
                self._renew(is_released=True)

    def _newest_epoch(self) -> int:
        writers = [writer for name in self._place.names() if (writer := Writer.of_object(name)) is not None]
        return max((writer.epoch for writer in writers), default=0)

    def _run(self) -> None:
        pause = min(self._length_s / _RENEWALS, _LONGEST_PAUSE_S)
        has_failed = False
        while not self._closed.wait(pause) and not self._lost:
            try:
                self._renew()
                has_failed = False
            except (CopyError, CheckpointError) as error:
                if not has_failed:
                    _LOGGER.warning("the lease of the copy can't be renewed: %s", error)
                has_failed = True

    def _renew(self, *, is_released: bool = False) -> None:
        found = read_lease(self._place)
        if found is None:
            self._lost = "somebody has removed its lease"
        elif found.token != self._note.token:
            self._lost = f"{found.holder} has taken it"
        else:
            self._write(is_released=is_released)

    def _write(self, *, is_released: bool = False) -> None:
        began = self._clock.monotonic()
        note = replace(
            self._note, expires=self._clock.time() + self._length_s, is_released=is_released, last=self._last
        )
        self._place.write(LEASE, [json.dumps(asdict(note)).encode()])
        self._valid_until = began + self._length_s
