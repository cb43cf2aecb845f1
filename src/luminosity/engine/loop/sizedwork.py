"""How much of a splittable stage's work is done, by the sizes that its restrictions have."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable

from luminosity.engine.blocks import Block
from luminosity.engine.plan.codecs import ElementCodec

_SIZE = struct.Struct(">d")  # the last bytes of an element: what its restriction provider said
_MOST_ELEMENTS = 10_000


class SizedWork:
    """Sums up sizes. Where elements are too many to be looked at, nothing is known."""

    def __init__(self, codec: Callable[[str], ElementCodec]) -> None:
        self._codec = codec  # by read
        self._seen = 0
        self._total = 0.0
        self._done = 0.0

    @property
    def done(self) -> float:
        return self._done

    @property
    def total(self) -> float | None:
        """Of all that came."""
        is_known = self._seen <= _MOST_ELEMENTS and math.isfinite(self._total) and self._total > 0
        return self._total if is_known else None

    @property
    def left(self) -> float:
        """What is not done yet, as far as that is known."""
        return max(0.0, (self.total or 0.0) - self._done)

    def came(self, read_id: str, block: Block) -> None:
        self._total += self._size(read_id, (block,))

    def committed(self, taken: dict[str, list[Block]], left: Iterable[tuple[str, list[Block]]]) -> None:
        """A bundle of ``taken`` is done, but for ``left``."""
        self._done += sum(self._size(read_id, blocks) for read_id, blocks in taken.items())
        self._done -= sum(self._size(read_id, blocks) for read_id, blocks in left)

    def _size(self, read_id: str, blocks: Iterable[Block]) -> float:
        total = 0.0
        for block in blocks:
            self._seen += block.count
            if self._seen <= _MOST_ELEMENTS:
                elements = self._codec(read_id).elements(block.data())
                total += sum(_SIZE.unpack(value[-_SIZE.size :])[0] for _, value in elements)
        return total
