"""The lines of the log about brokers that are away: one every ten seconds, and one when they are back."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

__all__ = ["WARN_EVERY_S", "OutageLog"]

_LOGGER = logging.getLogger(__name__)

WARN_EVERY_S: Final = 10.0

_lock = threading.Lock()
_told_at: dict[tuple[str, str], float] = {}  # when this process wrote the last line, by brokers and what goes on later


class OutageLog:
    """Knows since when brokers are away. The readers, or the writers, of a process share its lines."""

    def __init__(self, servers: str, goes_on: str) -> None:
        """``goes_on`` is what waits for the brokers, such as "reading"."""
        self._servers = servers
        self._goes_on = goes_on
        self.since: float | None = None
        self._warn_at = 0.0

    def seconds(self) -> float:
        """Return for how long the brokers have been away; 0 if they are not."""
        return 0.0 if self.since is None else time.monotonic() - self.since

    def note_silence(self, reason: str, since: float | None = None, waiting: str = "") -> None:
        """Note that brokers don't answer, since now or ``since``. Writes a line every ten seconds.

        ``waiting`` says what waits for them.
        """
        now = time.monotonic()
        if self.since is None:
            self.since = now if since is None else since
            self._warn_at = self.since + WARN_EVERY_S
        if now < self._warn_at:
            return
        self._warn_at = now + WARN_EVERY_S
        if self._is_mine_to_tell(now):
            _LOGGER.warning(
                "the brokers at %s have not answered for %.0f s (%s)%s; %s goes on when they do",
                self._servers,
                now - self.since,
                reason,
                waiting,
                self._goes_on,
            )

    def note_answer(self) -> None:
        """Note that the brokers have answered. Writes a line if they were away for long."""
        if self.since is None:
            return
        away, self.since = time.monotonic() - self.since, None
        if away >= WARN_EVERY_S and self._is_first_to_tell():
            _LOGGER.warning(
                "the brokers at %s answer again, after %.0f s; %s goes on", self._servers, away, self._goes_on
            )

    def _is_mine_to_tell(self, now: float) -> bool:
        """Return whether none of this process has written the line of these seconds."""
        key = self._servers, self._goes_on
        with _lock:
            if now - _told_at.get(key, -WARN_EVERY_S) < WARN_EVERY_S / 2:
                return False
            _told_at[key] = now
            return True

    def _is_first_to_tell(self) -> bool:
        with _lock:
            return _told_at.pop((self._servers, self._goes_on), None) is not None
