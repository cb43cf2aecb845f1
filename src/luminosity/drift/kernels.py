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
)
from luminosity.errors import DriftError

__all__ = [
    "RBF",
    "BlockKernel",
    "Kernel",
    "Laplacian",
    "Linear",
    "Polynomial",
    "RowKernel",
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
class RowKernel(Kernel):
    """A kernel of your own: a pure JAX function of two rows that returns a number.

    The function must be symmetric. If it is also positive definite, MMD² is a distance of distributions.

    >>> import jax.numpy as jnp
    >>> cosine = RowKernel(lambda x, y: x @ y / jnp.sqrt((x @ x) * (y @ y)))
    """

    shift_invariant: ClassVar[bool] = False
    function: Callable[[Any, Any], Any]

    @property
    def name(self) -> str:
        """The name of the kernel in results and messages."""
        return getattr(self.function, "__name__", type(self.function).__name__)

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
class BlockKernel(Kernel):
    """A kernel of your own for strings, graphs or other objects: a function of two lists that returns a matrix.

    The matrix holds the kernel of each object of the first list with each object of the second. The function runs in
    plain Python.

    >>> shared = BlockKernel(lambda a, b: [[len(set(x) & set(y)) for y in b] for x in a])
    """

    shift_invariant: ClassVar[bool] = False
    function: Callable[[Sequence[Any], Sequence[Any]], Any]

    @property
    def name(self) -> str:
        """The name of the kernel in results and messages."""
        return getattr(self.function, "__name__", type(self.function).__name__)

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
