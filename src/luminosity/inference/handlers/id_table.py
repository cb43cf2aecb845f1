"""The token ids of many strings, in one array."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain, count, islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["IdTable", "TokenLists"]

_MOST_STRINGS = 200_000
_MOST_CHARACTERS = 8_000_000

TokenLists: TypeAlias = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]
"""The ids of all lists in a row, and how many are in each."""


class IdTable:
    """Strings are numbered as they come, and new ones are learned all at once, so that nothing is done in Python per
    token. What is full starts anew.

    >>> table = IdTable(lambda new: (np.array([len(each) for each in new], np.int32), np.ones(len(new), np.int64)))
    >>> ids, counts = table.look_up([["one", "three"], [], ["one"]])
    >>> ids.tolist(), counts.tolist()
    ([3, 5, 3], [2, 0, 1])
    """

    def __init__(self, learn: Callable[[list[str]], TokenLists]) -> None:
        self._learn = learn
        self._clear()

    def look_up(self, lists: Sequence[Sequence[str]]) -> TokenLists:
        """The ids of the strings of each list, joined."""
        if len(self._numbers) > _MOST_STRINGS or self._characters > _MOST_CHARACTERS:
            self._clear()
        sizes = np.fromiter(map(len, lists), np.int64, len(lists))
        try:
            strings = chain.from_iterable(lists)
            numbers = np.fromiter(map(self._numbers.__getitem__, strings), np.int64, int(sizes.sum()))
            self._add_new()
        except BaseException:
            self._clear()  # It has numbers without ids.
            raise
        lengths = self._lengths[numbers]
        ends = np.cumsum(lengths)
        places = np.repeat(self._starts[numbers] - ends + lengths, lengths)
        places += np.arange(len(places))
        list_ends = np.concatenate([[0], ends])[np.cumsum(sizes)]
        return self._ids[places], np.diff(list_ends, prepend=0)

    def _add_new(self) -> None:
        new = len(self._numbers) - len(self._lengths)
        if not new:
            return
        strings = list(islice(reversed(self._numbers), new))[::-1]
        ids, lengths = self._learn(strings)
        self._starts = np.concatenate([self._starts, len(self._ids) + np.cumsum(lengths) - lengths])
        self._lengths = np.concatenate([self._lengths, lengths])
        self._ids = np.concatenate([self._ids, ids])
        self._characters += sum(map(len, strings))

    def _clear(self) -> None:
        self._numbers: dict[str, int] = defaultdict(count().__next__)
        self._characters = 0
        self._ids: npt.NDArray[Any] = np.empty(0, np.int32)
        self._starts = np.empty(0, np.int64)
        self._lengths = np.empty(0, np.int64)
