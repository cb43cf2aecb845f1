"""A test for terminals."""

from __future__ import annotations

from typing import TextIO

__all__ = ["is_terminal"]


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether ``stream`` is a terminal. Also works if the program closed its standard streams or has none."""
    return stream is not None and not stream.closed and stream.isatty()
