"""The folder of ``--late_elements``: what groupings dropped because it came later than its windows allow."""

from __future__ import annotations

import base64
import json
import logging
import pickle
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

from apache_beam.transforms.window import BoundedWindow

from luminosity.engine.debugging.letter_files import LetterFiles
from luminosity.engine.workers.failure import describe_element

__all__ = ["LateElements"]

_LOGGER = logging.getLogger(__name__)

_MOST_SHOWN = 10_000  # characters of an element
_MOST_PICKLED = 100_000  # bytes of an element; of a larger one, a line has only the description


class LateElements:
    """Writes late elements, as lines of JSON, on the loop's thread. All groupings of a run share it."""

    def __init__(self, folder: str) -> None:
        self._files = LetterFiles(folder, "late")
        self._is_full = False

    def of(self, step: str, decode: Callable[[bytes], Any]) -> Callable[[Sequence[tuple[bytes, Any, int]]], None]:
        """Return a function that writes late elements of a grouping, given its step and what decodes an element.

        It gets tuples of an encoded element, the windows that it is too late for, and the watermark in microseconds.
        They are on the disk when it returns.
        """

        def write(late: Sequence[tuple[bytes, Sequence[BoundedWindow], int]]) -> None:
            self._write(step, b"".join(_line(step, decode, *each) for each in late))

        return write

    def _write(self, step: str, lines: bytes) -> None:
        """Write lines. The run goes on without what can't be written: the elements are counted in any case."""
        files = self._files
        if self._is_full:
            return
        try:
            if files.has_room(lines):
                files.append(lines)
                return
            reason = "there are too many"
        except OSError as error:
            reason = error.strerror or str(error)
        self._is_full = True
        _LOGGER.warning(
            "the late elements of step %r and all that follow are not written to %s: %s; they are still counted",
            step,
            files.folder,
            reason,
        )


def _line(
    step: str, decode: Callable[[bytes], Any], encoded: bytes, windows: Sequence[BoundedWindow], watermark: int
) -> bytes:
    try:
        windowed = decode(encoded)
        element, at = windowed.value, _time(windowed.timestamp.micros)
        shown = describe_element(element, _MOST_SHOWN)
        pickled = pickle.dumps(element, 5)
    except Exception as error:  # coder and element are the user's
        shown, at, pickled = f"<can't be decoded: {type(error).__name__}>", None, b""
    line = {
        "step": step,
        "time": at,
        "windows": [str(window) for window in windows],
        "watermark": _time(watermark),
        "element": shown,
        "pickle": base64.b64encode(pickled).decode() if 0 < len(pickled) <= _MOST_PICKLED else None,
    }
    return json.dumps(line).encode() + b"\n"


def _time(micros: int) -> str | None:
    """Return a time in UTC, or None for one that a calendar does not have, such as the end of time."""
    try:
        return datetime.fromtimestamp(micros / 1e6, timezone.utc).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return None
