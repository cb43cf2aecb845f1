"""Tests of what workers print."""

from __future__ import annotations

import io
import sys

import pytest

from luminosity.engine.workers.printed import prepare_streams


class _Writes(io.RawIOBase):
    """Notes each write."""

    def __init__(self) -> None:
        self.found: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.found.append(bytes(data))
        return len(data)


def test_a_line_is_written_at_once_also_without_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    writes = _Writes()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(writes, "ascii", write_through=True))  # pyright: ignore[reportArgumentType]
    print("before", 1)
    assert len(writes.found) > 1
    writes.found.clear()
    prepare_streams()
    print("Zürich", 2)
    print("after", 3)
    assert writes.found == [b"Z\\xfcrich 2\n", b"after 3\n"]
