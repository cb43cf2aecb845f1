"""Places of records, such as ``reviews[3]@1204``: which record a worker is at, so that every error can name it.

A source that emits many records notes them before, and the number of each as it emits it. An exception in a step that
runs together with the source then knows its record. The notes are also in a file of the run, in which the runner finds
them when the worker has died.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import json
import mmap
import os
import re
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple

from luminosity._shared.model_sizes import RUN_FOLDER_VARIABLE

__all__ = ["RecordRun", "noting", "parse_place", "place_now", "take_left", "take_places"]

_PLACE = re.compile(r"(?P<topic>[A-Za-z0-9._-]+)\[(?P<partition>\d+)\]@(?P<offset>\d+)")
_THREADS = 16  # of one process that emit records at the same time; more are not noted
_SLOT = 4096  # bytes of a thread: the number of the record and how long the notes are, then the notes
_HEAD = 16
_WORDS = _SLOT // 8

_local = threading.local()


class RecordRun(NamedTuple):
    """Records of one partition that are emitted after each other: their offsets, and how many outputs they make.

    The number of outputs is negative if there is not one output for each offset.
    """

    topic: str
    partition: int
    first: int
    last: int
    outputs: int

    @classmethod
    def each(cls, topic: str, partition: int, offsets: Sequence[int]) -> list[RecordRun]:
        """Return the runs of records that make an output each. Their offsets may have gaps.

        >>> RecordRun.each("reviews", 0, [5, 6, 9])
        [RecordRun(topic='reviews', partition=0, first=5, last=6, outputs=2), RecordRun(topic='reviews', ...)]
        """
        first, last, count = offsets[0], offsets[-1], len(offsets)
        if last - first + 1 == count:
            return [cls(topic, partition, first, last, count)]
        starts = [0, *(i for i in range(1, count) if offsets[i] != offsets[i - 1] + 1), count]
        return [cls(topic, partition, offsets[a], offsets[b - 1], b - a) for a, b in itertools.pairwise(starts)]


def parse_place(text: str) -> tuple[str, int, int] | None:
    """Return topic, partition and offset of a record, or None if the text names none.

    >>> parse_place("reviews[3]@1204"), parse_place("reviews@1204")
    (('reviews', 3, 1204), None)
    """
    found = _PLACE.fullmatch(text.strip())
    return None if found is None else (found["topic"], int(found["partition"]), int(found["offset"]))


def _name(runs: Iterable[Sequence[Any]], number: int) -> str:
    """Return the place of the output with a number, counted from 1; of a table, those of its rows.

    >>> _name([("reviews", 0, 5, 6, 2), ("reviews", 3, 1203, 1204, 2)], 4)
    'reviews[3]@1204'
    >>> _name([("reviews", 0, 5, 9, -2)], 1)
    'reviews[0]@5 to 9'
    """
    for topic, partition, first, last, count in runs:
        if number <= abs(count):
            name = f"{topic}[{partition}]@"
            return f"{name}{first} to {last}" if count < 0 and first != last else f"{name}{first + number - 1}"
        number -= abs(count)
    return ""


class _Notes:
    """The notes of the threads of this process, in a file if the process belongs to a run."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._free = list(range(_THREADS))
        folder = os.environ.get(RUN_FOLDER_VARIABLE)
        self._bytes: mmap.mmap | None = None
        if folder is not None:
            # The disk may be full: then errors name no records.
            with contextlib.suppress(OSError), open(_path(folder, self._pid), "xb+") as file:
                file.truncate(_THREADS * _SLOT)
                self._bytes = mmap.mmap(file.fileno(), _THREADS * _SLOT)
        self._words: Any = memoryview(self._bytes).cast("Q") if self._bytes is not None else None

    def is_mine(self) -> bool:
        """Return whether these are of this process, and not of one that has forked it."""
        return self._pid == os.getpid()

    def begin(self, runs: Sequence[RecordRun]) -> tuple[Any, int, Callable[[], None]]:
        """Note what a thread emits. Return numbers, which of them is that of the record, and what ends the note."""
        with self._lock:
            slot = self._free.pop() if self._free else None
        if slot is None or self._bytes is None:
            return array.array("Q", [0]), 0, lambda: None
        encoded = json.dumps(runs).encode()
        if len(encoded) > _SLOT - _HEAD:
            first, last = runs[0], runs[-1]
            is_one = first[:2] == last[:2]
            encoded = json.dumps([(*first[:3], last.last if is_one else first.last, -(1 << 60))]).encode()
        at, words = slot * _SLOT, self._words
        self._bytes[at + _HEAD : at + _HEAD + len(encoded)] = encoded
        words[slot * _WORDS + 1] = len(encoded)

        def end() -> None:
            words[slot * _WORDS] = 0
            with self._lock:
                self._free.append(slot)

        return words, slot * _WORDS, end


_notes: _Notes | None = None
_making = threading.Lock()


def _notes_here() -> _Notes:
    global _notes
    with _making:
        if _notes is None or not _notes.is_mine():
            _notes = _Notes()
        return _notes


def noting(outputs: Iterable[Any], runs: Sequence[RecordRun]) -> Generator[Any]:
    """Yield the outputs of records, one for each, and let errors of those who take them name the record."""
    numbers, cell, end = _notes_here().begin(runs)
    _local.left = ""
    _local.at = runs, numbers, cell
    number = 0
    try:
        for output in outputs:
            number += 1
            numbers[cell] = number
            yield output
    except GeneratorExit:  # the step that took the output has raised
        _local.left = _name(runs, number)
        raise
    finally:
        numbers[cell] = 0
        _local.at = None
        end()


def place_now() -> str:
    """Return the place of the record that this thread works on; empty if it works on none."""
    at = getattr(_local, "at", None)
    return _name(at[0], at[1][at[2]]) if at is not None and at[1][at[2]] else ""


def take_left() -> str:
    """Return the place of the record at which this thread has failed, once; empty if it was at none."""
    place, _local.left = getattr(_local, "left", ""), ""
    return place


def _path(folder: str, pid: int) -> str:
    return os.path.join(folder, f"records-{pid}")


def take_places(folder: str, pid: int) -> list[str]:
    """Return the places of the records that a process was at when it ended, and remove its notes."""
    path = _path(folder, pid)
    found: list[str] = []
    with contextlib.suppress(OSError, ValueError):  # it had none, or ended while it wrote
        with open(path, "rb") as file:
            notes = file.read()
        os.unlink(path)
        for at in range(0, len(notes), _SLOT):
            number, length = (int.from_bytes(notes[at + i : at + i + 8], "little") for i in (0, 8))
            if number and (name := _name(json.loads(notes[at + _HEAD : at + _HEAD + length]), number)):
                found.append(name)
    return found
