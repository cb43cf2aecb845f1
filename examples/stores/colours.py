"""A small table with vectors: colours with their red, green and blue parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["colours"]

_COLOURS = {
    "black": 0x000000,
    "crimson": 0xDC143C,
    "forest green": 0x228B22,
    "gold": 0xFFD700,
    "navy": 0x000080,
    "orange": 0xFFA500,
    "orchid": 0xDA70D6,
    "sky blue": 0x87CEEB,
    "tomato": 0xFF6347,
    "white": 0xFFFFFF,
}


def colours() -> Any:
    """Return a ``pyarrow.RecordBatch`` with an id, a text and a column of float32 vectors, as models make them.

    >>> colours().schema.names
    ['id', 'name', 'embedding']
    """
    parts = np.array([[code >> 16, code >> 8 & 255, code & 255] for code in _COLOURS.values()], np.float32) / 255
    return pa.record_batch(
        {
            "id": pa.array(range(len(_COLOURS)), pa.int64()),
            "name": list(_COLOURS),
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(parts.ravel()), 3),
        }
    )
