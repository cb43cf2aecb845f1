"""What Beam logs that says nothing a user could act on."""

from __future__ import annotations

import logging

_BEGINNINGS = (
    # Said on import wherever Beam's cloud extras are not installed.
    "apitools not found",
    # Said where an optional import beside that module's failed; the module is there.
    "Resource module is not available for current platform",
)


def quiet() -> None:
    """Keep it from the root logger, which is where Beam says it."""
    root = logging.getLogger()
    if _says_something not in root.filters:
        root.addFilter(_says_something)


def _says_something(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_BEGINNINGS)
