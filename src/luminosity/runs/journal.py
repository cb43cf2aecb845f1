"""What a run and other processes tell each other through small files.

The journal holds the newest events of a run under way as JSON lines, beside its record. Each event has a number that
goes on over all journals of a run. The first line of a journal says up to which number the record holds the events.
When a journal has become large, the recorder writes the record and replaces the journal.

A request, such as to stop, is a file beside the record or in the checkpoint folder of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from luminosity._shared.shared_files import is_own_file, replace_file

__all__ = [
    "IN_CHECKPOINT",
    "NUMBER",
    "Action",
    "Journal",
    "JournalWriter",
    "RequestFile",
    "RequestWatcher",
    "path_beside",
    "remove_old",
    "send",
    "take_traceback",
    "with_traceback",
]
NUMBER = "event_number"
"""The key of an event's number, in journals and records."""
_SUFFIX = ".journal.jsonl"
_TRACEBACK, _TRACEBACK_OF = "traceback", "traceback_of"


def path_beside(record: Path) -> Path:
    """Return the journal of the run whose record is ``record``."""
    return record.with_name(record.name.removesuffix(".json") + _SUFFIX)


class JournalWriter:
    """Writes the journal of one run. The owner calls :meth:`close` or :meth:`remove`.

    Every line is one write, so that a process that is killed leaves at most one incomplete line, which is the last.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._texts: set[str] = set()
        self.size = 0  # bytes

    def replace(self, after: int) -> None:
        """Replace the journal by an empty one for the events after number ``after``."""
        unfinished = f"{self._path}.unfinished"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(unfinished, flags, 0o600)
        self.close()
        self._descriptor = descriptor
        self._texts.clear()
        self.size = 0
        self.append(json.dumps({"journal": 1, "after": after}))
        os.replace(unfinished, self._path)

    def append(self, line: str) -> None:
        """Write a line."""
        assert self._descriptor is not None
        data = line.encode() + b"\n"
        self.size += len(data)
        while data:
            data = data[os.write(self._descriptor, data) :]

    def append_text(self, digest: str, text: str) -> None:
        """Write a text to which events refer, once a journal."""
        if digest not in self._texts:
            self._texts.add(digest)
            self.append(json.dumps({"digest": digest, "text": text}))

    def close(self) -> None:
        """Close the file and leave it for readers."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def remove(self) -> None:
        """Close and remove the file: the record holds everything."""
        self.close()
        self._path.unlink(missing_ok=True)


class Journal:
    """Reads a journal that another process may write, line by line. The owner calls :meth:`close`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._incomplete = b""
        self._texts: dict[str, str] = {}
        self.after = 0  # the number of the last event before those of the newest journal

    @property
    def is_open(self) -> bool:
        """Whether the last :meth:`read` has found a journal."""
        return self._file is not None

    def read(self) -> list[dict[str, Any]]:
        """Return the events that have come since the last call, in order, as JSON. Does not wait.

        An incomplete line is left for the next call. If the journal was replaced, the rest of the old one comes first.
        """
        events = self._lines()
        try:
            now = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            now = None
        if self._file is not None and now is not None and os.path.samestat(os.fstat(self._file.fileno()), now):
            return events
        events += self._lines()  # what was written between the last reading and the replacement
        self.close()
        if now is not None:
            with contextlib.suppress(FileNotFoundError):  # the run has ended just now
                descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                self._file = open(descriptor, "rb", buffering=0)  # noqa: SIM115
            events += self._lines()
        return events

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._incomplete = b""
        self._texts = {}

    def _lines(self) -> list[dict[str, Any]]:
        if self._file is None:
            return []
        complete, _, self._incomplete = (self._incomplete + self._file.read()).rpartition(b"\n")
        events: list[dict[str, Any]] = []
        for line in complete.splitlines():
            try:
                data: Any = json.loads(line)
            except ValueError:
                continue  # a full disk may have cut a line
            if isinstance(data, dict):
                self._take(cast("dict[str, Any]", data), events)
        return events

    def _take(self, data: dict[str, Any], events: list[dict[str, Any]]) -> None:
        if "event" in data and isinstance(data.get(NUMBER), int):
            events.append(with_traceback(data, self._texts))
        elif "digest" in data:
            self._texts[data["digest"]] = data["text"]
        elif "journal" in data:
            self.after = data["after"]


def take_traceback(data: dict[str, Any], digest: str) -> str:
    """Take the traceback out of an event; return it. The event then refers to ``digest``."""
    text = data.pop(_TRACEBACK)
    data[_TRACEBACK_OF] = digest
    return text


def with_traceback(data: dict[str, Any], texts: dict[str, str]) -> dict[str, Any]:
    """Return an event with the traceback to which it refers, if it refers to one."""
    digest = data.get(_TRACEBACK_OF)
    return data if digest is None else {**data, _TRACEBACK: texts.get(digest, "")}


Action = Literal["stop", "drain"]
IN_CHECKPOINT = "run"
"""What stands for the id of a run in the name of a request in a checkpoint folder, which belongs to one run."""
_REQUEST_SUFFIX = ".request"
_MOST_BYTES = 16  # a request is one word
_LOOK_EVERY_S = 1.0  # how late a run notices a request, at most
_OLD_AFTER_S = 3600.0  # a request that no run has taken by then is of a run that has ended


def send(folder: Path, run_id: str, action: Action) -> None:
    """Ask a run to do something. Replaces a request that the run has not seen yet. Does not wait."""
    replace_file(_path_of(folder, run_id), action, is_private=True, has_writers=True)


class RequestFile:
    """The requests to one run. The run looks for them, on any one thread."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self._path = _path_of(folder, run_id)
        self._look_at = 0.0

    def take(self, seconds: float) -> Action | None:
        """Return the request that has arrived, if there is one. Looks only if a second has passed since the last time.

        ``seconds`` is any clock that goes on, such as the time of events.
        """
        if seconds < self._look_at:
            return None
        self._look_at = seconds + _LOOK_EVERY_S
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (FileNotFoundError, PermissionError):
            return None
        with open(descriptor, "rb") as file:
            if not is_own_file(descriptor):
                return None  # another user, who can write to the folder, must not end the run
            action = file.read(_MOST_BYTES)
        self.remove()
        return "drain" if action == b"drain" else "stop"

    def remove(self) -> None:
        """Remove a request that came too late."""
        with contextlib.suppress(PermissionError):  # of another user, in a folder that several users share
            self._path.unlink(missing_ok=True)


class RequestWatcher:
    """Looks for requests in the checkpoint folder of a run, on a thread of its own: such a run may have no record.

    The owner calls :meth:`close`. Requests to an earlier start are removed.
    """

    def __init__(self, folder: Path, on_request: Callable[[Action], None]) -> None:
        """Call ``on_request`` on the thread of the watcher for each request."""
        self._file = RequestFile(folder, IN_CHECKPOINT)
        self._on_request = on_request
        self._is_closed = threading.Event()
        self._file.remove()
        self._thread = threading.Thread(target=self._run, name="luminosity-requests", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closed.wait(_LOOK_EVERY_S):
            try:
                action = self._file.take(float("inf"))
            except OSError:
                continue  # the disk is unavailable now; the checkpoint reports it
            if action is not None:
                self._on_request(action)

    def close(self) -> None:
        """End the thread, and remove a request that came too late."""
        self._is_closed.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # the next start removes it
            self._file.remove()


def remove_old(folder: Path) -> None:
    """Remove requests that no run has taken."""
    for path in folder.glob(f"*{_REQUEST_SUFFIX}*"):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # the folder may be shared with other users
            if time.time() - path.stat().st_mtime > _OLD_AFTER_S:
                path.unlink()


def _path_of(folder: Path, run_id: str) -> Path:
    return folder / f"{run_id}{_REQUEST_SUFFIX}"
