"""Histories of drift as JSON, and the reports that they name."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Sequence
from typing import Any

from luminosity.drift.watch.page_data import default_histories, drift_data
from luminosity.drift.watch.state import state_file
from luminosity.operate.page.replies import Packed, json_bytes
from luminosity.runs.records import FileVersion, version_of

__all__ = ["DriftFiles"]

_REPORT = "/api/drift/report"
_MOST_BYTES = 50_000_000  # of a report


class DriftFiles:
    """Histories of drift: those in the default folder, and those that the user names.

    Only reports that a history names can be read: they are asked for by a digest of their path, which is looked up.
    """

    def __init__(self, paths: Sequence[str] = ()) -> None:
        self._paths = [os.path.abspath(path) for path in paths]
        self._lock = threading.Lock()
        self._versions: dict[str, tuple[FileVersion | None, FileVersion | None]] | None = None
        self._content = Packed(b"")
        self._reports: dict[str, str] = {}

    @property
    def paths(self) -> tuple[str, ...]:
        """The files of the histories that there are now."""
        return tuple(dict.fromkeys([*self._paths, *default_histories()]))

    def data(self) -> Packed:
        """Return the series of all histories, with the address of the report behind each point, and the alerts."""
        with self._lock:
            self._look()
            return self._content

    def report(self, digest: str) -> bytes | None:
        """Return a report, or None if no history names it, or if it is gone."""
        with self._lock:
            self._look()
            path = self._reports.get(digest)
        if path is None:
            return None
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            is_page = stat.S_ISREG(status.st_mode) and status.st_size <= _MOST_BYTES
            return file.read(_MOST_BYTES) if is_page else None

    def _look(self) -> None:
        """Read the histories again if a file has changed."""
        paths = self.paths
        versions = {path: (version_of(path), version_of(state_file(path))) for path in paths}
        if versions == self._versions:
            return
        found = drift_data(paths)
        reports: dict[str, str] = {}
        for row in [row for series in found["histories"] for row in series["rows"]] + found["alerts"]:
            row["report"] = _address(row, reports)
        self._versions, self._reports = versions, reports
        self._content = Packed(json_bytes(found))


def _address(row: dict[str, Any], reports: dict[str, str]) -> str | None:
    """Return the address of a row's report, which is added to ``reports``; None if it has none."""
    path = row.get("report")
    if not path or not os.path.isabs(path) or not path.lower().endswith((".html", ".htm")):
        return None
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()
    reports[digest] = path
    return f"{_REPORT}?id={digest}"
