"""Kernels of many bandwidths, chosen from the data, for one test that keeps its level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from luminosity.drift.distances import range_of
from luminosity.drift.kernels import RBF, Kernel, Laplacian
from luminosity.drift.rows import is_whole
from luminosity.errors import DriftError

__all__ = ["Aggregate", "as_kernels", "one_kernel"]

_KINDS: dict[str, Callable[[float], RBF | Laplacian]] = {"rbf": RBF, "laplacian": Laplacian}
_FEWEST, _MOST = 2, 50


@dataclass(frozen=True)
class Aggregate:
    """Where one bandwidth would have to be guessed: several, from the smallest distances of rows to the largest.

    Give it to ``mmd_test`` as its kernel. The level is kept however many bandwidths there are (see fuse.py).

    >>> import numpy as np
    >>> from luminosity.drift import mmd_test
    >>> x = np.random.default_rng(0).uniform(size=(800, 1))
    >>> wavy = x + 0.02 * np.sin(40 * x)
    >>> mmd_test(x[:400], wavy[400:]).drift, mmd_test(x[:400], wavy[400:], Aggregate()).drift
    (False, True)
    """

    shift_invariant: ClassVar[bool] = True

    kinds: tuple[str, ...] = ("rbf",)
    bandwidths: int = 10
    """Of each kind."""

    def __post_init__(self) -> None:
        if not self.kinds or not set(self.kinds) <= set(_KINDS) or len(set(self.kinds)) < len(self.kinds):
            raise DriftError(f"Found kinds={self.kinds!r}, expected some of {tuple(_KINDS)}, each once.")
        if not is_whole(self.bandwidths) or not _FEWEST <= self.bandwidths <= _MOST:
            raise DriftError(f"Found bandwidths={self.bandwidths}, expected a whole number from {_FEWEST} to {_MOST}.")

    def resolved_all(self, sample: Any) -> list[Kernel]:
        """The kernels for rows of which this is a sample, taken from both sides."""
        found: list[Kernel] = []
        for kind in self.kinds:
            make = _KINDS[kind]
            found += [make(bandwidth) for bandwidth in range_of(make(1.0).distances(sample), self.bandwidths)]
        return found


def as_kernels(kernel: Kernel | Aggregate | Sequence[Kernel | Aggregate] | None) -> list[Kernel | Aggregate]:
    """What users give as the kernel of a test, as a list; without any, RBF at the median distance."""
    given: Any = [RBF() if kernel is None else kernel] if not isinstance(kernel, Sequence) else kernel
    for each in given:
        if not isinstance(each, (Kernel, Aggregate)):
            raise DriftError(
                f"Found the kernel {each!r}, expected one such as RBF(). RowKernel and BlockKernel make one of a "
                "function."
            )
    if not given:
        raise DriftError("Found an empty list of kernels, expected at least one.")
    return list(given)


def one_kernel(kernel: Kernel | None) -> list[Kernel]:
    """The same for what has but one value."""
    found = [each for each in as_kernels(kernel) if isinstance(each, Kernel)]
    if len(found) != 1:
        raise DriftError(f"Found kernel={kernel!r}, expected a single one. mmd_test and MMDTest take several.")
    return found
