"""The trace of a simulated run: a hash of all that its messages say, which is the same for the same seed."""

from __future__ import annotations

import hashlib
import re
from collections import deque

__all__ = ["Trace"]

_LAST = 60  # lines that are kept for a report
_NUMBERED = re.compile(r"(bundlepassing|sourcepassing|bundle|source|split|finalize|report|w)(\d+)")


class Trace:
    """Hashes lines. Ids that are numbered in the process count as in the order in which they occur.

    >>> first, second = Trace(), Trace()
    >>> first.add("bundle7 ended"), second.add("bundle9 ended")
    (None, None)
    >>> first.digest() == second.digest()
    True
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._names: dict[str, str] = {}
        self.last: deque[str] = deque(maxlen=_LAST)
        self.lines = 0

    def add(self, line: str) -> None:
        """Add a line."""
        named = _NUMBERED.sub(self._name, line)
        self._hash.update(named.encode() + b"\n")
        self.last.append(named)
        self.lines += 1

    def digest(self) -> str:
        """Return the hash of all lines so far."""
        return self._hash.hexdigest()

    def _name(self, found: re.Match[str]) -> str:
        name = self._names.get(found[0])
        if name is None:
            name = self._names[found[0]] = f"{found[1]}#{len(self._names)}"
        return name
