"""What sources without an end have in common: their trackers, and who uses what a process holds open for them."""

from __future__ import annotations

from apache_beam.io.iobase import RestrictionProgress, RestrictionTracker

__all__ = ["EndlessTracker", "StepUsers"]


class EndlessTracker(RestrictionTracker):
    """A tracker of a source without an end: something is always left, and the reader defers it.

    Subclasses set ``_has_split`` when they hand over the rest.
    """

    _has_split = False

    def check_done(self) -> bool:
        """Raise unless the rest was handed over."""
        if not self._has_split:
            raise ValueError("found a reader of a source without an end that ended, expected that it defers the rest")
        return True

    def current_progress(self) -> RestrictionProgress:
        """Return that something is left: Beam asks no reader to stop that has nothing left."""
        return RestrictionProgress(completed=0.0, remaining=0.0 if self._has_split else 1.0)

    def is_bounded(self) -> bool:
        """Return False."""
        return False


class StepUsers:
    """Counts the copies of each step in this process. Callers hold a lock.

    >>> users = StepUsers()
    >>> users.enter("Read"), users.enter("Read"), users.leave("Read"), "Read" in users, users.leave("Read")
    (None, None, False, True, True)
    """

    def __init__(self) -> None:
        self._users: dict[str, int] = {}

    def enter(self, step: str) -> None:
        """Count one more."""
        self._users[step] = self._users.get(step, 0) + 1

    def leave(self, step: str) -> bool:
        """Count one less, and return whether it was the last one: then what was open for them can be closed."""
        self._users[step] = self._users.get(step, 1) - 1
        if self._users[step] > 0:
            return False
        del self._users[step]
        return True

    def __contains__(self, step: str) -> bool:
        return step in self._users
