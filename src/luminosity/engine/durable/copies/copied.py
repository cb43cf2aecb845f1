"""The copy of a run's checkpoint while the run lasts, and what the checkpoint folder notes about it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from luminosity._shared.shared_files import replace_file
from luminosity.engine.data.world import World
from luminosity.engine.durable.copies.lease import Lease
from luminosity.engine.durable.copies.places import Place
from luminosity.engine.durable.copies.shipper import Shipper
from luminosity.engine.durable.place import COPY_NOTE
from luminosity.engine.durable.store import CheckpointFolder

__all__ = ["CheckpointCopy", "CopyNote"]

_LOGGER = logging.getLogger(__name__)

_LATE_S = 60.0  # a copy that lacks more than this is warned of
_WARN_EVERY_S = 600.0
_FINISH_S = 30.0  # how long the end of a run waits for the copy
_CLOSE_S = 10.0  # how long it waits for a request that goes on


@dataclass(frozen=True)
class CopyNote:
    """What a checkpoint folder notes about its copy, in a file beside the database."""

    folder: str  # the id of the folder: the lease of the copy has it, too
    address: str = ""  # of the copy
    restored_from: str = ""
    is_restoring: bool = False  # a restore has begun and not ended: what is in the folder is not complete
    saved_at: str = ""  # of the checkpoint that the copy has
    error: str = ""  # why the copy could not be written

    @classmethod
    def read(cls, folder: str) -> CopyNote | None:
        """Return the note of a folder; None if it has none that can be read."""
        try:
            return cls(**json.loads(Path(folder, COPY_NOTE).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    @classmethod
    def new(cls, world: World) -> CopyNote:
        """Return the note of a folder that has none."""
        return cls(world.token(8))

    def write(self, folder: str, *, is_synced: bool = False) -> None:
        """Put the note into a folder."""
        replace_file(os.path.join(folder, COPY_NOTE), json.dumps(asdict(self)), is_private=True, is_synced=is_synced)


class CheckpointCopy:
    """The copy of a run's checkpoint. :meth:`begin` starts to ship, :meth:`pause` and :meth:`close` end that."""

    def __init__(self, place: Place, lease: Lease, note: CopyNote, world: World) -> None:
        """Take over a lease, which :meth:`close` releases."""
        self._place = place
        self._lease = lease
        self._note = note
        self._world = world
        self._shipper: Shipper | None = None
        self._folder = ""
        self._has_finished = False
        self._warned_at: float | None = None

    def begin(self, folder: CheckpointFolder) -> None:
        """Ship what is in a folder, and then all that is written there."""
        self._folder = folder.path
        self._shipper = Shipper(self._place, self._lease, folder, self._note.folder, self._world, self._shipped)

    def check(self) -> None:
        """Raise :class:`CheckpointFailed` if this run has lost the lease. Warn if the copy is late. Does not wait.

        The loop's thread calls it often.
        """
        self._lease.check()
        lag, now = self.lag_s, self._world.clock.monotonic()
        if lag <= _LATE_S:
            if self._warned_at is not None and not lag:
                _LOGGER.warning("the copy in %s is complete again", self._place.address)
                self._warned_at = None
        elif self._warned_at is None or now - self._warned_at > _WARN_EVERY_S:
            self._warned_at = now
            error = self._shipper.error if self._shipper is not None else ""
            _LOGGER.warning(
                "the copy in %s lacks what the run did in the last %.0f s%s",
                self._place.address,
                lag,
                f": {error}" if error else ": the place is too slow",
            )

    @property
    def lag_s(self) -> float:
        """The seconds for which there has been something that the copy lacks."""
        return self._shipper.lag_s() if self._shipper is not None else 0.0

    def finish(self) -> None:
        """Wait until the copy has everything, but not long. Says so if it has not."""
        self._has_finished = True
        if self._shipper is not None and not self._shipper.finish(_FINISH_S):
            _LOGGER.warning(
                "the copy in %s lacks what the run did in its last %.0f s: it was not written within %.0f s",
                self._place.address,
                self.lag_s,
                _FINISH_S,
            )

    def pause(self) -> None:
        """Stop to ship, and keep the lease, for another plan of the same run."""
        if self._shipper is not None:
            self._shipper.close(_CLOSE_S)
            self._shipper = None

    def close(self) -> None:
        """Stop to ship, and release the lease. A run that has failed waits here until the copy has its end."""
        if self._shipper is not None and not self._has_finished and not self._shipper.error:
            self.finish()
        self.pause()
        self._lease.close()

    def _shipped(self, saved_at: str, error: str) -> None:
        if saved_at or error != self._note.error:
            self._note = replace(self._note, saved_at=saved_at or self._note.saved_at, error=error)
            with contextlib.suppress(OSError):  # It is there for people to look at.
                self._note.write(self._folder)
