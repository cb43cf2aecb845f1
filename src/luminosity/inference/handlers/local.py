"""Where a model's files lie on this machine."""

from __future__ import annotations

__all__ = ["local"]


def local(path: str) -> str:
    """The path on this machine of a model's file or folder; the name of a hub's model stays as it is."""
    return path
