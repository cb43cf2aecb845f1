"""Side inputs: the whole of a buffer, looked up by window and key."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.blocks import Block
from luminosity.engine.plan.codecs import ElementCodec

_LENGTH = struct.Struct(">i")


class SideInputData:
    """Collects a buffer's blocks and indexes them when they are first asked for.

    One serves every step that has the buffer as a side input.
    """

    def __init__(self, codec: ElementCodec) -> None:
        self._codec = codec
        self._blocks: list[Block] = []
        self._lock = threading.Lock()
        self._values: dict[bytes, list[bytes]] | None = None
        self._multimap: dict[bytes, dict[bytes, list[bytes]]] | None = None
        self._pages: dict[tuple[str, bytes], list[bytes]] = {}

    def add(self, block: Block) -> None:
        self._blocks.append(block)

    def data(self) -> Iterator[bytes]:
        """All its elements, encoded, a block at a time."""
        return (block.data() for block in self._blocks)

    def release(self) -> None:
        for block in self._blocks:
            block.release()
        self._blocks.clear()

    def read(self, state_key: beam_fn_api_pb2.StateKey) -> list[bytes]:
        """The chunks of what ``state_key`` names. Called on the server's threads, once the buffer is complete."""
        kind = state_key.WhichOneof("type")
        if kind == "iterable_side_input":
            return self._by_window().get(state_key.iterable_side_input.window, [])
        asked = getattr(state_key, str(kind))
        entries = self._by_window_and_key().get(asked.window, {})
        if kind == "multimap_side_input":
            return entries.get(asked.key, [])
        with self._lock:  # made once: a worker asks for it page by page
            pages = self._pages.setdefault((str(kind), asked.window), [])
            if not pages and kind == "multimap_keys_side_input":
                pages.extend(entries)
            elif not pages:
                pages.extend(b"".join((key, _LENGTH.pack(len(values)), *values)) for key, values in entries.items())
            return pages

    def _by_window(self) -> dict[bytes, list[bytes]]:
        with self._lock:
            if self._values is None:
                self._values = {}
                for window, value in self._elements():
                    self._values.setdefault(window, []).append(value)
            return self._values

    def _by_window_and_key(self) -> dict[bytes, dict[bytes, list[bytes]]]:
        with self._lock:
            if self._multimap is None:
                self._multimap = {}
                for window, value in self._elements():
                    key, value = self._codec.key_and_value(value)
                    self._multimap.setdefault(window, {}).setdefault(key, []).append(value)
            return self._multimap

    def _elements(self) -> list[tuple[bytes, bytes]]:
        return [
            (self._codec.encode_window(window), value)
            for block in self._blocks
            for header, value in self._codec.elements(block.data())
            for window in header.windows
        ]
