"""Writes the HTML reports behind the points of a history into a folder with a bounded number of files."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable

from luminosity.errors import DriftError

__all__ = ["MOST_REPORTS", "write_report_of_point"]

MOST_REPORTS = 1000  # files in a folder of reports, the newest: about 100 MB
_PREFIX = "drift-"


def write_report_of_point(folder: str, identity: str, write: Callable[[str], None]) -> str:
    """Write a report and return its path. The same identity gives the same file; the oldest reports are deleted.

    ``write`` is called with the path. It must replace a file that is there, or leave it whole.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise DriftError(f"{folder}: can't write reports there; {error}") from None
    name = f"{_PREFIX}{hashlib.sha256(identity.encode()).hexdigest()[:24]}.html"
    path = os.path.join(os.path.abspath(folder), name)
    write(path)
    _prune(folder)
    return path


def _prune(folder: str) -> None:
    with os.scandir(folder) as entries:
        names = [each.name for each in entries if each.name.startswith(_PREFIX) and each.name.endswith(".html")]
    if len(names) <= MOST_REPORTS:
        return
    ages: dict[str, float] = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # Another process prunes, too.
            ages[name] = os.stat(os.path.join(folder, name)).st_mtime
    for name in sorted(ages, key=ages.__getitem__)[: len(names) - MOST_REPORTS]:
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, name))
