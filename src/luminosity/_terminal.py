"""Whether there is somebody to look at a stream."""

from __future__ import annotations

from typing import TextIO


def is_terminal(stream: TextIO | None) -> bool:
    """Also where a program has closed its standard streams, or never had any."""
    return stream is not None and not stream.closed and stream.isatty()
