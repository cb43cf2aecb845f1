"""Sessions of readers who have signed in: kept in memory, for a limited time, until they sign out."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["READER", "Reader", "Sessions", "may_be"]

READER = "luminosity.reader"  # the key of a request's scope with its Reader
_BYTES = 32  # random ones in names and tokens
_MOST = 1_000  # sessions; the oldest one ends


@dataclass(frozen=True)
class Reader:
    """Who asks."""

    user: str
    may_act: bool
    token: str  # actions need it in the header Authorization: no other site knows it
    ends_at: float  # of time.monotonic()
    session: str = ""  # the digest of its name; empty behind a proxy


class Sessions:
    """The sessions of one server. A restart ends them. Its methods may be called on several threads."""

    def __init__(self, lasts_s: float, most: int = _MOST) -> None:
        self._lasts_s = lasts_s
        self._most = most
        self._lock = threading.Lock()
        self._readers: OrderedDict[str, Reader] = OrderedDict()

    def begin(self, user: str, *, may_act: bool) -> str:
        """Begin a session; return its name, which only the reader's browser may know."""
        name = secrets.token_urlsafe(_BYTES)
        digest = _digest(name)
        reader = Reader(user, may_act, secrets.token_urlsafe(_BYTES), time.monotonic() + self._lasts_s, digest)
        with self._lock:
            self._readers[digest] = reader
            while len(self._readers) > self._most:
                self._readers.popitem(last=False)
        return name

    def reader(self, name: str) -> Reader | None:
        """Return whose session has this name, or None if there is none that goes on."""
        with self._lock:
            found = self._readers.get(_digest(name))
        return found if found is not None and self.goes_on(found) else None

    def goes_on(self, reader: Reader) -> bool:
        """Return whether a reader's time is not over, and the reader has not signed out."""
        if time.monotonic() >= reader.ends_at:
            self.end(reader)
            return False
        with self._lock:
            return not reader.session or reader.session in self._readers

    def end(self, reader: Reader) -> None:
        """End a reader's session. Does nothing if it has ended."""
        with self._lock:
            self._readers.pop(reader.session, None)


def may_be(user: str, patterns: Sequence[str]) -> bool:
    """Return whether one of the patterns is for a user.

    >>> may_be("ana@example.org", ["*@example.org"]), may_be("ana", ["ana"]), may_be("eve", ["*"])
    (True, True, True)
    >>> may_be("eve@example.org.evil", ["*@example.org"]), may_be("eve@evil@example.org", ["*@example.org"])
    (False, False)
    """
    for pattern in patterns:
        is_of_domain = pattern.startswith("*@") and user.count("@") == 1 and user.endswith(pattern[1:])
        if pattern in ("*", user) or (is_of_domain and not user.startswith("@")):
            return True
    return False


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()
