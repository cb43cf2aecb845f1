"""Blocks: several examples that move through the model host as one unit, as a list or as columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from luminosity.errors import InvalidType

__all__ = ["Block", "Indices", "as_block", "concat", "join", "part_of", "piece", "rows", "sample", "size", "take"]

Block: TypeAlias = Any  # pyarrow has no type stubs
"""Any number of examples: an Arrow array, a record batch, a numpy array (first axis) or a list."""

_SAMPLE = 64  # examples; enough to estimate the size of a long list

Indices: TypeAlias = npt.NDArray[np.int64]
"""Places of examples in a block."""


def as_block(values: Any) -> Block:
    """Return what a model's code returned for several examples as a block.

    >>> as_block(pa.chunked_array([[1], [2]])).to_pylist(), as_block(x for x in "ab")
    ([1, 2], ['a', 'b'])
    """
    if isinstance(values, list | np.ndarray | pa.Array | pa.RecordBatch):
        return values
    if isinstance(values, pa.ChunkedArray):
        return pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    if isinstance(values, pa.Table):
        return pa.RecordBatch.from_struct_array(as_block(values.to_struct_array()))
    if isinstance(values, str | bytes | dict | set | frozenset) or not hasattr(values, "__iter__"):
        raise InvalidType(f"found a {type(values).__name__}, expected a sequence with one item for each example")
    return list(values)


def take(block: Block, indices: Indices) -> Block:
    """Return the examples at these places, in this order.

    >>> take(["a", "b", "c"], np.array([2, 0]))
    ['c', 'a']
    """
    if isinstance(block, list):
        return list(map(cast("list[Any]", block).__getitem__, indices.tolist()))
    if isinstance(block, np.ndarray):
        return block[indices]
    return block.take(pa.array(indices))


def part_of(block: Block, indices: Indices) -> Block:
    """Return the examples at these places, in this order; as a view where they follow each other.

    >>> part_of(np.array([5, 6, 7]), np.array([1, 2])).base is not None
    True
    """
    if not len(indices) or (np.diff(indices) != 1).any():
        return take(block, indices)
    return block[int(indices[0]) : int(indices[-1]) + 1]


def piece(block: Block, start: int, end: int) -> Block:
    """Return a range of examples. Arrow data is copied: a slice would be pickled with the whole array.

    >>> import pickle
    >>> len(pickle.dumps(piece(pa.array(range(100_000)), 0, 10))) < 1000
    True
    """
    if isinstance(block, list | np.ndarray) or end - start == len(block):
        return block[start:end]
    return take(block, np.arange(start, end))


def concat(blocks: Sequence[Block]) -> Block:
    """Return one block of all examples; the blocks must be of one kind.

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


def join(blocks: Sequence[Block]) -> Block:
    """Return one block of all examples; a list if the blocks differ in kind or shape.

    >>> join([np.zeros((1, 2)), np.zeros((1, 3))])
    [array([0., 0.]), array([0., 0., 0.])]
    """
    if len({_form(block) for block in blocks}) == 1:
        return concat(blocks)
    return [example for block in blocks for example in rows(block)]


def rows(block: Block) -> Sequence[Any]:
    """Return the examples as a sequence of single values.

    >>> rows(pa.array([1, None]))
    [1, None]
    """
    if isinstance(block, pa.RecordBatch | pa.Array):
        return block.to_pylist()
    return block


def size(block: Block) -> int:
    """Return the bytes of a block; for a long list, an estimate from some examples.

    >>> size(np.zeros(4)), size(["text"]), size(["text"] * 1000)
    (32, 4, 4000)
    """
    if not isinstance(block, list):
        return int(block.nbytes)
    examples = sample(cast("list[Any]", block))
    return sum(_example_size(example) for example in examples) * len(block) // max(len(examples), 1)


def sample(examples: list[Any]) -> list[Any]:
    """Return evenly spaced examples if there are many, otherwise all."""
    return examples[:: -(-len(examples) // _SAMPLE)] if len(examples) > _SAMPLE else examples


def _form(block: Block) -> Any:
    """Return a value that is equal for blocks that can be concatenated."""
    if isinstance(block, np.ndarray):
        return block.shape[1:], block.dtype
    if isinstance(block, pa.RecordBatch):
        return block.schema
    return block.type if isinstance(block, pa.Array) else type(block)


def _example_size(example: Any) -> int:
    if isinstance(example, str | bytes):
        return len(example)
    return int(getattr(example, "nbytes", 0))
