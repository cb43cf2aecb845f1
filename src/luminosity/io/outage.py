"""The lines of the log about servers that are away: one every ten seconds, and one when they are back."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

__all__ = ["WARN_EVERY_S", "OutageLog"]

_LOGGER = logging.getLogger(__name__)

WARN_EVERY_S: Final = 10.0

_lock = threading.Lock()
_told_at: dict[tuple[str, str], float] = {}  # when this process wrote the last line, by servers and what goes on later


class OutageLog:
    """Knows since when servers are away. The readers, or the writers, of a process share its lines.

    Several threads may use it: an answer that one gets counts for all.
    """

    def __init__(self, servers: str, goes_on: str) -> None:
        """``servers`` names them, as "the brokers at …" does; ``goes_on`` is what waits for them, such as "reading"."""
        self._servers = servers
        self._goes_on = goes_on
        self.since: float | None = None
        self._warn_at = 0.0

    def seconds(self) -> float:
        """Return for how long the servers have been away; 0 if they are not."""
        since = self.since  # another thread may get an answer now
        return 0.0 if since is None else time.monotonic() - since

    def note_silence(self, reason: str, since: float | None = None, waiting: str = "") -> None:
        """Note that the servers don't answer, since now or ``since``. Writes a line every ten seconds.

        ``waiting`` says what waits for them.
        """
        now = time.monotonic()
        began = self.since
        if began is None:
            began = self.since = now if since is None else since
            self._warn_at = began + WARN_EVERY_S
        if now < self._warn_at:
            return
        self._warn_at = now + WARN_EVERY_S
        if self._is_mine_to_tell(now):
            _LOGGER.warning(
                "%s have not answered for %.0f s (%s)%s; %s goes on when they do",
                self._servers,
                now - began,
                reason,
                waiting,
                self._goes_on,
            )

    def note_answer(self) -> None:
        """Note that the servers have answered. Writes a line if they were away for long."""
        since, self.since = self.since, None
        away = 0.0 if since is None else time.monotonic() - since
        if away >= WARN_EVERY_S and self._is_first_to_tell():
            _LOGGER.warning("%s answer again, after %.0f s; %s goes on", self._servers, away, self._goes_on)

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
