"""What "out of memory" looks like, library by library."""

from __future__ import annotations

import gc


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "out of memory" in str(error).lower()


def release_memory() -> None:
    gc.collect()
