"""Kernels: functions that measure how similar two rows are.

A test asks whether rows of one sample are more similar to each other than to rows of the other sample. A kernel is a
small frozen object. Compiled code depends on its form only; its parameters, such as a bandwidth, are arguments of that
code, so that a new bandwidth compiles nothing again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from luminosity.drift.distances import (
    euclidean_pairs,
    manhattan,
    manhattan_pairs,
    median_of,
    minus_half_squared,
    near_middle,
    range_of,
)
from luminosity.drift.rows import is_whole
from luminosity.errors import DriftError

__all__ = [
    "RBF",
    "Aggregate",
    "BlockKernel",
    "Kernel",
    "Laplacian",
    "Linear",
    "Polynomial",
    "RowKernel",
    "as_kernels",
    "one_kernel",
    "values_of_all",
]


class Kernel(ABC):
    """The base class of all kernels. For a kernel of your own, see ``RowKernel``."""

    shift_invariant: ClassVar[bool] = True
    """True if adding a vector to all rows leaves MMD² unchanged. Rows are then centred first, which keeps digits."""

    @property
    def name(self) -> str:
        """The name of the kernel in results and messages."""
        return type(self).__name__

    @property
    def scale(self) -> float | None:
        """The bandwidth, or None for kernels without one."""
        return None

    def resolved(self, sample: Any) -> Kernel:
        """Return the kernel with everything that was left open chosen from a sample of the rows of both sides."""
        return self

    def resolved_all(self, sample: Any) -> list[Kernel]:
        """Return the resolved kernel as a list. An ``Aggregate`` has the same method, and returns several kernels."""
        return [self.resolved(sample)]

    def parameters(self) -> tuple[float, ...]:
        """Return the numbers that are passed to compiled code, such as a bandwidth."""
        return ()

    def form(self) -> Kernel:
        """Return the kernel without its parameters: what compiled code depends on."""
        return self

    @abstractmethod
    def values(self, parameters: Sequence[Any], x: Any, y: Any) -> Any:
        """Return the kernel of each row of ``x`` with each row of ``y``. Runs inside compiled code, on JAX arrays."""


@dataclass(frozen=True)
class KernelOfDistance(Kernel):
    """The base class of kernels ``exp(-c (distance / bandwidth) ** power)``, with a constant ``c``."""

    power: ClassVar[int]
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        if self.bandwidth is not None and not (np.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise DriftError(
                f"found a bandwidth of {self.bandwidth}, expected a positive number, or None for the median distance"
            )

    @property
    def name(self) -> str:
        """The name of the kernel in results and messages."""
        return f"{type(self).__name__}({'median' if self.bandwidth is None else format(self.bandwidth, '.4g')})"

    @property
    def scale(self) -> float | None:
        """The bandwidth, or None if it is not chosen yet."""
        return self.bandwidth

    def resolved(self, sample: Any) -> Kernel:
        """Return the kernel with a bandwidth: its own, or the median distance of the sample."""
        return self if self.bandwidth is not None else replace(self, bandwidth=self.median_distance(sample))

    def median_distance(self, sample: Any) -> float:
        """Return the median distance of rows, as this kernel measures it."""
        return median_of(self.distances(sample))

    @abstractmethod
    def distances(self, sample: Any) -> Any:
        """Return the distance of each pair of rows, as this kernel measures it."""

    @abstractmethod
    def exponents(self, bandwidth: Any, x: Any, y: Any) -> Any:
        """Return the logarithms of the values. Kernels that differ only in their bandwidth share this computation."""

    def values(self, parameters: Sequence[Any], x: Any, y: Any) -> Any:
        """Return the kernel of each row of ``x`` with each row of ``y``."""
        import jax.numpy as jnp

        (bandwidth,) = parameters
        return jnp.exp(self.exponents(bandwidth, x, y))

    def form(self) -> Kernel:
        """Return the kernel without its bandwidth."""
        return type(self)()

    def parameters(self) -> tuple[float, ...]:
        """Return the bandwidth."""
        assert self.bandwidth is not None, "call resolved() first"
        return (self.bandwidth,)


@dataclass(frozen=True)
class RBF(KernelOfDistance):
    """``exp(-|x - y|² / (2 bandwidth²))``. The default bandwidth is the median distance of the rows of both samples."""

    power: ClassVar[int] = 2

    def exponents(self, bandwidth: Any, x: Any, y: Any) -> Any:
        """Return the logarithms of the values."""
        import jax.numpy as jnp

        middle = near_middle(x)  # Next to a kernel that is not shift-invariant, rows are not centred.
        found = minus_half_squared((x - middle) / bandwidth, (y - middle) / bandwidth)
        return jnp.minimum(found, 0)  # Rounding can make the squared distance of equal rows negative.

    def distances(self, sample: Any) -> Any:
        """Return the distance of each pair of rows."""
        return euclidean_pairs(sample)


@dataclass(frozen=True)
class Laplacian(KernelOfDistance):
    """``exp(-|x - y|₁ / bandwidth)``: uses sums of absolute differences. Outliers weigh less; slower than ``RBF``."""

    power: ClassVar[int] = 1

    def exponents(self, bandwidth: Any, x: Any, y: Any) -> Any:
        """Return the logarithms of the values."""
        return -manhattan(x, y) / bandwidth

    def distances(self, sample: Any) -> Any:
        """Return the distance of each pair of rows."""
        return manhattan_pairs(sample)


@dataclass(frozen=True)
class Linear(Kernel):
    """``x · y``: detects shifts of the mean, nothing else."""

    def values(self, parameters: Sequence[Any], x: Any, y: Any) -> Any:
        """Return the kernel of each row of ``x`` with each row of ``y``."""
        import jax.numpy as jnp

        return jnp.matmul(x, y.T, precision="highest")


@dataclass(frozen=True)
class Polynomial(Kernel):
    """``(x · y / width + offset) ** degree``: detects changes of the first ``degree`` moments."""

    shift_invariant: ClassVar[bool] = False
    degree: int = 3
    offset: float = 1.0

    def __post_init__(self) -> None:
        if self.degree < 1 or self.degree != int(self.degree):
            raise DriftError(f"found a degree of {self.degree}, expected a whole number from 1 on")

    @property
    def name(self) -> str:
        """The name of the kernel in results and messages."""
        return f"Polynomial({self.degree})"

    def values(self, parameters: Sequence[Any], x: Any, y: Any) -> Any:
        """Return the kernel of each row of ``x`` with each row of ``y``."""
        import jax.numpy as jnp

        return (jnp.matmul(x, y.T, precision="highest") / x.shape[1] + self.offset) ** self.degree


@dataclass(frozen=True)
class OwnKernel(Kernel):
    """The base class of kernels that call a function of yours, and have its name."""

    shift_invariant: ClassVar[bool] = False
    function: Callable[[Any, Any], Any]

    @property
    def name(self) -> str:
        """The name of the kernel in results and messages."""
        return getattr(self.function, "__name__", type(self.function).__name__)


@dataclass(frozen=True)
class RowKernel(OwnKernel):
    """A kernel of your own: a pure JAX function of two rows that returns a number.

    The function must be symmetric. If it is also positive definite, MMD² is a distance of distributions.

    >>> import jax.numpy as jnp
    >>> cosine = RowKernel(lambda x, y: x @ y / jnp.sqrt((x @ x) * (y @ y)))
    """

    def values(self, parameters: Sequence[Any], x: Any, y: Any) -> Any:
        """Return the kernel of each row of ``x`` with each row of ``y``."""
        import jax

        found = jax.vmap(lambda row: jax.vmap(lambda other: self.function(row, other))(y))(x)
        if found.shape != (len(x), len(y)):
            raise DriftError(
                f"the kernel {self.name} gave an array of shape {found.shape[2:]} for two rows, expected a number"
            )
        return found


@dataclass(frozen=True)
class BlockKernel(OwnKernel):
    """A kernel of your own for strings, graphs or other objects: a function of two lists that returns a matrix.

    The matrix holds the kernel of each object of the first list with each object of the second. The function runs in
    plain Python.

    >>> shared = BlockKernel(lambda a, b: [[len(set(x) & set(y)) for y in b] for x in a])
    """

    function: Callable[[Sequence[Any], Sequence[Any]], Any]

    def values(self, parameters: Sequence[Any], x: Any, y: Any) -> Any:
        """Return the kernel of each object of ``x`` with each object of ``y``."""
        found = np.asarray(self.function(x, y), dtype=np.float64)
        if found.shape != (len(x), len(y)):
            raise DriftError(
                f"the kernel {self.name} gave an array of shape {found.shape} for lists of {len(x)} and {len(y)}, "
                f"expected {(len(x), len(y))}: a value for each pair"
            )
        return found


def values_of_all(forms: Sequence[Kernel], parameters: Sequence[Sequence[Any]], x: Any, y: Any) -> Iterator[Any]:
    """Yield the values of each kernel: a matrix of the rows of ``x`` with the rows of ``y``.

    Kernels that differ only in their bandwidth share the distances, which take longest to compute. Runs inside
    compiled code.
    """
    import jax.numpy as jnp

    shared: dict[Kernel, _Shared] = {
        form: _Shared(form, [numbers for other, numbers in zip(forms, parameters, strict=True) if other == form], x, y)
        for form in forms
        if isinstance(form, KernelOfDistance) and forms.count(form) > 1
    }
    for form, numbers in zip(forms, parameters, strict=True):
        yield jnp.exp(shared[form].exponents(*numbers)) if form in shared else form.values(numbers, x, y)


class _Shared:
    def __init__(self, form: KernelOfDistance, parameters: Sequence[Sequence[Any]], x: Any, y: Any) -> None:
        import jax.numpy as jnp

        self._power = form.power
        # The largest bandwidth: divided by it, the numbers of rows stay smallest.
        self._bandwidth = jnp.max(jnp.stack([bandwidth for (bandwidth,) in parameters]))
        self._exponents = form.exponents(self._bandwidth, x, y)

    def exponents(self, bandwidth: Any) -> Any:
        return self._exponents * (self._bandwidth / bandwidth) ** self._power


_KINDS: dict[str, Callable[[float], RBF | Laplacian]] = {"rbf": RBF, "laplacian": Laplacian}
_FEWEST, _MOST = 2, 50  # bandwidths of a kind; a single one would aggregate nothing


@dataclass(frozen=True)
class Aggregate:
    """Several bandwidths, from the smallest distances of rows to the largest, so that you need not guess one.

    Pass it to ``mmd_test`` as its kernel. However many bandwidths there are, the false-alarm rate stays the level you
    set (see ``mmd/permutations.py``).

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
