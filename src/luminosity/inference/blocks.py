"""Blocks: what moves through the model host. Rows or columns, one path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["Block", "concat", "rows", "size", "take"]

Block: TypeAlias = Any  # pyarrow has no types to name here
"""Any number of examples: an Arrow array, a record batch, a numpy array (first axis) or a list."""

Indices: TypeAlias = npt.NDArray[np.int64]


def take(block: Block, indices: Indices) -> Block:
    """The examples at these places, in this order.

    >>> take(["a", "b", "c"], np.array([2, 0]))
    ['c', 'a']
    """
    if isinstance(block, list):
        examples = cast("list[Any]", block)
        return [examples[index] for index in indices.tolist()]
    if isinstance(block, np.ndarray):
        return block[indices]
    return block.take(pa.array(indices))


def concat(blocks: Sequence[Block]) -> Block:
    """One block of all examples; the blocks are of one kind.

    >>> concat([["a"], ["b", "c"]])
    ['a', 'b', 'c']
    """
    if len(blocks) == 1:
        return blocks[0]
    first = blocks[0]
    if isinstance(first, list):
        return [example for block in blocks for example in block]
    if isinstance(first, np.ndarray):
        return np.concatenate(blocks)
    if isinstance(first, pa.RecordBatch):
        return pa.Table.from_batches(blocks).combine_chunks().to_batches()[0]
    return pa.concat_arrays(blocks)


def rows(block: Block) -> Sequence[Any]:
    """The examples one by one, for code that takes them so.

    >>> rows(pa.array([1, None]))
    [1, None]
    """
    if isinstance(block, pa.RecordBatch | pa.Array):
        return block.to_pylist()
    return block


def size(block: Block) -> int:
    """The bytes this block holds, as far as its examples tell.

    >>> size(np.zeros(4)), size(["text"])
    (32, 4)
    """
    if isinstance(block, list):
        return sum(_example_size(example) for example in cast("list[Any]", block))
    return int(block.nbytes)


def _example_size(example: Any) -> int:
    if isinstance(example, str | bytes):
        return len(example)
    return int(getattr(example, "nbytes", 0))
