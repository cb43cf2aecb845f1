"""Examples that a process passes on without looking at them: the process of an accelerator needs few of them itself."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import numpy as np

from luminosity.inference.blocks import Indices, size, take

__all__ = ["Carried", "Examples", "as_list", "carried", "joined", "taken"]

_PICKLED_TOGETHER = 256  # examples; a batch that ends in the middle of a block unpickles so many at most
_FEW = 64  # examples, which are pickled faster with the rest of their block


@dataclass(frozen=True)
class _Pickle:
    """Some examples as a pickle, and the buffers of their arrays."""

    count: int
    pickled: Any
    buffers: tuple[Any, ...]

    @classmethod
    def of(cls, examples: list[Any]) -> _Pickle:
        """Pickle the examples."""
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(examples, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
        return cls(len(examples), pickled, tuple(buffer.raw() for buffer in buffers))

    def __len__(self) -> int:
        return self.count

    def examples(self) -> list[Any]:
        """Unpickle the examples. Their arrays can be written to."""
        return pickle.loads(self.pickled, buffers=map(bytearray, self.buffers))

    @property
    def nbytes(self) -> int:
        """The bytes of the pickle and the buffers."""
        return len(self.pickled) + sum(map(len, self.buffers))


_Piece: TypeAlias = "list[Any] | _Pickle"


class Carried(Sequence[Any]):
    """A list of examples that is unpickled piece by piece, where it is looked into.

    To unpickle 4,096 texts takes a millisecond in which Python does nothing else, and no accelerator gets work.

    >>> examples = Carried.of(["a", "b"] * 1000)
    >>> len(examples), examples[1], list(examples[1:3])
    (2000, 'b', ['b', 'a'])
    """

    def __init__(self, pieces: list[_Piece]) -> None:
        self._pieces = [piece for piece in pieces if len(piece)]

    @classmethod
    def of(cls, examples: Sequence[Any]) -> Carried:
        """Return the examples as they can be pickled fast."""
        if isinstance(examples, cls):
            return examples
        listed = list(examples)
        starts = range(0, len(listed), _PICKLED_TOGETHER)
        return cls([listed[start : start + _PICKLED_TOGETHER] for start in starts])

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self._pieces)):
            yield from self._open(number)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Carried: ...
    def __getitem__(self, index: int | slice) -> Any:
        start, end, step = (index if isinstance(index, slice) else slice(index, index + 1 or None)).indices(len(self))
        if step != 1:
            raise ValueError(f"found a step of {step}, expected ranges of examples")
        if isinstance(index, int) and start == end:
            raise IndexError(f"found the place {index}, expected one of {len(self)} examples")
        pieces: list[_Piece] = []
        for number, piece in enumerate(list(self._pieces)):
            count = len(piece)
            if start < count and end > 0:
                is_whole = start <= 0 and end >= count
                pieces.append(piece if is_whole else self._open(number)[max(0, start) : end])
            start, end = start - count, end - count
        found = Carried(pieces)
        return found if isinstance(index, slice) else found._open(0)[0]

    @property
    def nbytes(self) -> int:
        """About the bytes of all examples."""
        return sum(size(piece) if isinstance(piece, list) else piece.nbytes for piece in self._pieces)

    @property
    def pieces(self) -> list[_Piece]:
        """The examples, some as lists and some as pickles."""
        return list(self._pieces)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle the pieces apart from each other, so that each can be unpickled alone."""
        pickles = (_Pickle.of(piece) if isinstance(piece, list) else piece for piece in self._pieces)
        wrap = pickle.PickleBuffer
        return _unpickled, ([(each.count, wrap(each.pickled), *map(wrap, each.buffers)) for each in pickles],)

    def _open(self, number: int) -> list[Any]:
        piece = self._pieces[number]
        if isinstance(piece, _Pickle):
            piece = self._pieces[number] = piece.examples()
        return piece


def _unpickled(pickles: list[tuple[Any, ...]]) -> Carried:
    return Carried([_Pickle(count, pickled, tuple(buffers)) for count, pickled, *buffers in pickles])


Examples: TypeAlias = "list[Any] | Carried"


def as_list(examples: Examples) -> list[Any]:
    """Return the examples as a list."""
    return examples if isinstance(examples, list) else list(examples)


def carried(examples: Examples) -> Examples:
    """Return examples as they are pickled best: few of them together with the rest of their block."""
    return examples if len(examples) < _FEW else Carried.of(examples)


def taken(examples: Examples, places: Indices) -> Examples:
    """Return the examples at these places, in this order; unpickled only if they don't follow each other.

    >>> taken(["a", "b", "c"], np.array([2, 0]))
    ['c', 'a']
    """
    if isinstance(examples, list):
        return take(examples, places)
    if len(places) and (np.diff(places) == 1).all():
        return examples[int(places[0]) : int(places[-1]) + 1]
    return take(list(examples), places)


def joined(parts: Sequence[Examples]) -> Examples:
    """Return all examples, in their order.

    >>> joined([["a"], ["b", "c"]])
    ['a', 'b', 'c']
    """
    if all(isinstance(part, list) for part in parts):
        return [example for part in parts for example in part]
    return Carried([piece for part in parts for piece in ([part] if isinstance(part, list) else part.pieces)])
