"""A filter for log messages of Beam that a user can do nothing about."""

from __future__ import annotations

import logging

__all__ = ["quiet"]


_BEGINNINGS = (
    # Logged on import if Beam's cloud extras are not installed.
    "apitools not found",
    # Logged if an optional import next to that module's fails; the module itself is there.
    "Resource module is not available for current platform",
)


def quiet() -> None:
    """Drop these messages from the root logger, to which Beam writes them while it is imported.

    Called when ``luminosity`` is imported, so in all our processes. A script that imports Beam first gets them before.
    """
    root = logging.getLogger()
    if _says_something not in root.filters:
        root.addFilter(_says_something)


def _says_something(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_BEGINNINGS)
