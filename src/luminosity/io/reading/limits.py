"""How much is read and emitted at once."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

__all__ = ["BATCH_BYTES", "BATCH_ROWS", "PIECE_BYTES", "TEXT_BYTES", "bounded"]

# Enough that what a batch costs beside its rows is nothing, few enough that workers can share a table's batches.
BATCH_ROWS = 65_536
# Several of them fit into any worker, even where rows are images or long texts.
BATCH_BYTES = 32 << 20
# A file is first cut into pieces of this size: some hundredths of a second of work, and more pieces than cores soon.
PIECE_BYTES = 8 << 20
# Text is read in blocks of this size, and each becomes a batch.
TEXT_BYTES = 4 << 20


def bounded(batch: pa.RecordBatch, rows: int) -> Iterator[pa.RecordBatch]:
    """Its rows, in batches that are not too large; nothing where there are none.

    >>> import pyarrow as pa
    >>> [part.num_rows for part in bounded(pa.record_batch({"a": [1, 2, 3, 4, 5]}), 2)]
    [2, 2, 1]
    """
    if batch.nbytes > BATCH_BYTES:
        rows = min(rows, max(1, BATCH_BYTES * batch.num_rows // batch.nbytes))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)
