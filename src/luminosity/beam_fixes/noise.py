"""What Beam logs while it is imported, and a user can do nothing about: it is dropped, and sets up no logging."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType

__all__ = ["MODULE", "quiet", "run"]

MODULE = "apache_beam.io.gcp.internal.clients.bigquery"
"""It logs by ``logging.warning``, which gives the root logger a handler if it has none."""


_BEGINNINGS = (
    # Logged on import if Beam's cloud extras are not installed.
    "apitools not found",
    # Logged if an optional import next to that module's fails; the module itself is there.
    "Resource module is not available for current platform",
)
# Logged by this module on import if a library of Google's is installed, such as the one for Pub/Sub, but not the one
# for buckets. Beam says nothing if none is installed.
_FILE_SYSTEMS = "apache_beam.io.filesystems"
_NO_BUCKETS = "cannot import name 'storage' from 'google.cloud'"


def quiet() -> None:
    """Drop these messages from the loggers to which Beam writes them while it is imported.

    Called when ``luminosity`` is imported, so in all our processes. A script that imports Beam first gets them before.
    """
    root = logging.getLogger()
    if _says_something not in root.filters:
        root.addFilter(_says_something)
    systems = logging.getLogger(_FILE_SYSTEMS)
    if _names_a_fault not in systems.filters:
        systems.addFilter(_names_a_fault)


def run(module: ModuleType, execute: Callable[[ModuleType], None]) -> None:
    """Run the code of ``MODULE`` and take its handler away: a script's ``logging.basicConfig`` would do nothing."""
    root = logging.getLogger()
    before = list(root.handlers)
    execute(module)
    for handler in [each for each in root.handlers if each not in before]:
        root.removeHandler(handler)


def _says_something(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_BEGINNINGS)


def _names_a_fault(record: logging.LogRecord) -> bool:
    return _NO_BUCKETS not in record.getMessage()
