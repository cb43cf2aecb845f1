"""Finds the first tokens that several prompts share, such as instructions, so that they are computed once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["Prefixes", "common_length"]

_LEAST = 64  # tokens; fewer cost less than what sharing takes
_LEAST_ROWS, _LOOK_AT = 3, 8
"""How many of the prompts that follow each other must share a prefix: computing it for two gains nothing."""
_MOST_KEPT = 4  # prefixes; each has keys and values on the device


class _Kept(Protocol):
    @property
    def ids(self) -> npt.NDArray[np.int32]: ...


PrefixT = TypeVar("PrefixT", bound=_Kept)


def common_length(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Return how many tokens two prompts have in common from the first on, and leave each at least one of its own.

    >>> common_length(np.array([1, 2, 3, 4]), np.array([1, 2, 9])), common_length(np.array([1, 2]), np.array([1, 2]))
    (2, 1)
    """
    most = min(len(one), len(other)) - 1
    different = np.flatnonzero(one[:most] != other[:most])
    return int(different[0]) if len(different) else most


class Prefixes:
    """The prefixes that were found last, with what was computed for them."""

    def __init__(self, compute: Callable[[npt.NDArray[np.int32]], Any], least: int = _LEAST) -> None:
        self._compute = compute
        self._least = least
        self._kept: OrderedDict[bytes, Any] = OrderedDict()

    def group(self, prompts: Sequence[npt.NDArray[np.int32]]) -> list[tuple[Any, list[int]]]:
        """Return the places of the prompts by their prefix, which is None for those that share nothing.

        A prefix is looked for between prompts that follow each other: those of one step usually begin alike.
        """
        groups: dict[int, tuple[Any, list[int]]] = {}
        for place, prompt in enumerate(prompts):
            found = self._of(prompt, prompts[place + 1 : place + _LOOK_AT])
            groups.setdefault(id(found), (found, []))[1].append(place)
        return list(groups.values())

    def clear(self) -> None:
        """Forget all prefixes, and free what was computed for them."""
        self._kept.clear()

    def _of(self, prompt: npt.NDArray[np.int32], following: Sequence[npt.NDArray[np.int32]]) -> Any:
        best = max((each for each in self._kept.values() if _begins(prompt, each.ids)), key=_length, default=None)
        known = 0 if best is None else len(best.ids)
        shared = common_length(prompt, following[0]) if following else 0
        alike = sum(_begins(each, prompt[:shared]) for each in (prompt, *following)) if shared >= self._least else 0
        if shared >= known + self._least and alike >= _LEAST_ROWS:
            ids = prompt[:shared].copy()
            best = self._kept[ids.tobytes()] = self._compute(ids)
        elif best is not None:
            self._kept.move_to_end(best.ids.tobytes())
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return best


def _begins(prompt: npt.NDArray[np.int32], ids: npt.NDArray[np.int32]) -> bool:
    return len(ids) < len(prompt) and bool((prompt[: len(ids)] == ids).all())


def _length(prefix: Any) -> int:
    return len(prefix.ids)
