"""Tests with many kernels or bandwidths at once, which keep the false-alarm rate of a single test."""

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
_FEWEST, _MOST = 2, 50  # bandwidths of a kind; a single one would aggregate nothing


@dataclass(frozen=True)
class Aggregate:
    """Several bandwidths, from the smallest distances of rows to the largest, so that you need not guess one.

    Pass it to ``mmd_test`` as its kernel. However many bandwidths there are, the false-alarm rate stays the level you
    set (see ``permutation/permute.py``).

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
    """The number of bandwidths of each kind."""

    def __post_init__(self) -> None:
        if not self.kinds or not set(self.kinds) <= set(_KINDS) or len(set(self.kinds)) < len(self.kinds):
            raise DriftError(f"found kinds={self.kinds!r}, expected some of {tuple(_KINDS)}, each once")
        if not is_whole(self.bandwidths) or not _FEWEST <= self.bandwidths <= _MOST:
            raise DriftError(f"found bandwidths={self.bandwidths}, expected a whole number from {_FEWEST} to {_MOST}")

    def resolved_all(self, sample: Any) -> list[Kernel]:
        """Return the kernels, with bandwidths chosen from a sample of the rows of both sides."""
        found: list[Kernel] = []
        for kind in self.kinds:
            make = _KINDS[kind]
            found += [make(bandwidth) for bandwidth in range_of(make(1.0).distances(sample), self.bandwidths)]
        return found


def as_kernels(kernel: Kernel | Aggregate | Sequence[Kernel | Aggregate] | None) -> list[Kernel | Aggregate]:
    """Return the kernels that a user passed as a list. The default is ``RBF`` with the median distance."""
    given: Any = [RBF() if kernel is None else kernel] if not isinstance(kernel, Sequence) else kernel
    for each in given:
        if not isinstance(each, (Kernel, Aggregate)):
            raise DriftError(
                f"found the kernel {each!r}, expected one such as RBF()",
                fix="wrap a function of your own in RowKernel or BlockKernel",
            )
    if not given:
        raise DriftError("found an empty list of kernels, expected at least one")
    return list(given)


def one_kernel(kernel: Kernel | None) -> list[Kernel]:
    """Return the only kernel that a user passed, as a list."""
    found = [each for each in as_kernels(kernel) if isinstance(each, Kernel)]
    if len(found) != 1:
        raise DriftError(
            f"found kernel={kernel!r}, expected a single kernel", fix="use mmd_test or MMDTest for several"
        )
    return found
