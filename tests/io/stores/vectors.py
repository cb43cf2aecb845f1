"""Small tables with vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa


def vectors(rows: Any, size: int | None = None) -> pa.Array:
    """Return a column of float32 vectors of one size; None is null."""
    size = size or len(next(row for row in rows if row is not None))
    return pa.array(rows, pa.list_(pa.float32(), size))


def numbered(first: int, count: int, size: int = 4) -> pa.RecordBatch:
    """Return rows whose id, text and vector depend on their number; no two vectors have the same direction."""
    numbers = np.arange(first, first + count)
    directions = np.stack([np.cos(numbers * 0.01 + k) for k in range(size)], axis=1).astype(np.float32)
    return pa.record_batch(
        {
            "id": pa.array(numbers, pa.uint64()),
            "text": [f"text {number}" for number in numbers],
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(directions.ravel()), size),
        }
    )
