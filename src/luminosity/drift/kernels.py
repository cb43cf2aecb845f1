"""How alike two rows are. The test asks whether rows of one sample are more alike than rows of different samples.

A kernel is a small frozen object. Its numbers (a bandwidth, say) are passed to compiled code apart from its form, so
that another bandwidth compiles nothing again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from luminosity.errors import DriftError

__all__ = [
    "RBF",
    "BlockKernel",
    "Kernel",
    "KernelOfDistance",
    "Laplacian",
    "Linear",
    "Polynomial",
    "RowKernel",
    "values_of_all",
]


class Kernel(ABC):
    """What all kernels have. ``values`` runs inside compiled code, on JAX arrays; see RowKernel for one of your own."""

    shift_invariant: ClassVar[bool] = True
    """Whether moving all rows by one vector leaves MMD² as it is: then rows are centred first, which keeps digits."""

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def scale(self) -> float | None:
        """The bandwidth, for kernels that have one."""
        return None

    def resolved(self, sample: Any) -> Kernel:
        """With everything that was left open decided from a sample of all rows."""
        return self

    def resolved_all(self, sample: Any) -> list[Kernel]:
        """As an Aggregate has it, which stands for several."""
        return [self.resolved(sample)]

    def parameters(self) -> tuple[float, ...]:
        return ()

    def form(self) -> Kernel:
        """What compiled code depends on: this without its numbers."""
        return self

    @abstractmethod
    def values(self, parameters: Sequence[Any], x: Any, y: Any) -> Any:
        """The kernel of each row of ``x`` with each row of ``y``."""


@dataclass(frozen=True)
class KernelOfDistance(Kernel):
    """``exp(-(distance / bandwidth) ** power)``, but for a factor."""

    power: ClassVar[int]
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        if self.bandwidth is not None and not (np.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise DriftError(
                f"Found a bandwidth of {self.bandwidth}, expected a positive number, or None for the median."
            )

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({'median' if self.bandwidth is None else format(self.bandwidth, '.4g')})"

    @property
    def scale(self) -> float | None:
        return self.bandwidth

    def resolved(self, sample: Any) -> Kernel:
        return self if self.bandwidth is not None else replace(self, bandwidth=self.median_distance(sample))

    def median_distance(self, sample: Any) -> float:
        from luminosity.drift.distances import median_of

        return median_of(self.distances(sample))

    @abstractmethod
    def distances(self, sample: Any) -> Any:
        """Of each pair of rows, in the sense of this kernel."""

    @abstractmethod
    def exponents(self, bandwidth: Any, x: Any, y: Any) -> Any:
        """The logarithms of the values. They are found once for all kernels that differ in their bandwidths alone."""

    def values(self, parameters: Sequence[Any], x: Any, y: Any) -> Any:
        import jax.numpy as jnp

        (bandwidth,) = parameters
        return jnp.exp(self.exponents(bandwidth, x, y))

    def form(self) -> Kernel:
        return type(self)()

    def parameters(self) -> tuple[float, ...]:
        assert self.bandwidth is not None, "resolved() comes first"
        return (self.bandwidth,)


@dataclass(frozen=True)
class RBF(KernelOfDistance):
    """``exp(-|x - y|² / (2 bandwidth²))``; without a bandwidth, the median distance of the pooled rows."""

    power: ClassVar[int] = 2

    def exponents(self, bandwidth: Any, x: Any, y: Any) -> Any:
        import jax.numpy as jnp

        from luminosity.drift.distances import minus_half_squared, near_middle

        middle = near_middle(x)  # Beside kernels that are not shift-invariant, rows may lie far from zero.
        found = minus_half_squared((x - middle) / bandwidth, (y - middle) / bandwidth)
        return jnp.minimum(found, 0)  # Equal rows far from all others would be nearer than near, by rounding.

    def distances(self, sample: Any) -> Any:
        from luminosity.drift.distances import euclidean_pairs

        return euclidean_pairs(sample)


@dataclass(frozen=True)
class Laplacian(KernelOfDistance):
    """``exp(-|x - y|₁ / bandwidth)``: sums of absolute differences, so outliers weigh less; slower than RBF."""

    power: ClassVar[int] = 1

    def exponents(self, bandwidth: Any, x: Any, y: Any) -> Any:
        from luminosity.drift.distances import manhattan

        return -manhattan(x, y) / bandwidth

    def distances(self, sample: Any) -> Any:
        from luminosity.drift.distances import manhattan_pairs

        return manhattan_pairs(sample)


@dataclass(frozen=True)
class Linear(Kernel):
    """``x · y``: sees shifts of the mean, nothing else."""

    def values(self, parameters: Sequence[Any], x: Any, y: Any) -> Any:
        import jax.numpy as jnp

        return jnp.matmul(x, y.T, precision="highest")


@dataclass(frozen=True)
class Polynomial(Kernel):
    """``(x · y / width + offset) ** degree``: sees the first ``degree`` moments."""

    shift_invariant: ClassVar[bool] = False
    degree: int = 3
    offset: float = 1.0

    def __post_init__(self) -> None:
        if self.degree < 1 or self.degree != int(self.degree):
            raise DriftError(f"Found a degree of {self.degree}, expected a whole number from 1 on.")

    @property
    def name(self) -> str:
        return f"Polynomial({self.degree})"

    def values(self, parameters: Sequence[Any], x: Any, y: Any) -> Any:
        import jax.numpy as jnp

        return (jnp.matmul(x, y.T, precision="highest") / x.shape[1] + self.offset) ** self.degree


@dataclass(frozen=True)
class RowKernel(Kernel):
    """Your own: a pure JAX function of two rows that gives a number, symmetric and positive definite.

    >>> import jax.numpy as jnp
    >>> cosine = RowKernel(lambda x, y: x @ y / jnp.sqrt((x @ x) * (y @ y)))
    """

    shift_invariant: ClassVar[bool] = False
    function: Callable[[Any, Any], Any]

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def values(self, parameters: Sequence[Any], x: Any, y: Any) -> Any:
        import jax

        found = jax.vmap(lambda row: jax.vmap(lambda other: self.function(row, other))(y))(x)
        if found.shape != (len(x), len(y)):
            raise DriftError(
                f"The kernel {self.name} gave an array of shape {found.shape[2:]} for two rows, expected a number."
            )
        return found


@dataclass(frozen=True)
class BlockKernel(Kernel):
    """Your own, for strings, graphs or anything else: a function of two lists that gives their matrix of kernel values.

    >>> shared = BlockKernel(lambda a, b: [[len(set(x) & set(y)) for y in b] for x in a])
    """

    shift_invariant: ClassVar[bool] = False
    function: Callable[[Sequence[Any], Sequence[Any]], Any]

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def values(self, parameters: Sequence[Any], x: Any, y: Any) -> Any:
        found = np.asarray(self.function(x, y), dtype=np.float64)
        if found.shape != (len(x), len(y)):
            raise DriftError(
                f"The kernel {self.name} gave an array of shape {found.shape} for lists of {len(x)} and {len(y)}. "
                f"Expected {(len(x), len(y))}: a value for each pair."
            )
        return found


def values_of_all(forms: Sequence[Kernel], parameters: Sequence[Sequence[Any]], x: Any, y: Any) -> Iterator[Any]:
    """For each kernel a matrix: ``x`` with ``y``. To find distances takes longer than what is then done with them."""
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
        # The largest: divided by it, no number of a row grows.
        self._bandwidth = jnp.max(jnp.stack([bandwidth for (bandwidth,) in parameters]))
        self._exponents = form.exponents(self._bandwidth, x, y)

    def exponents(self, bandwidth: Any) -> Any:
        return self._exponents * (self._bandwidth / bandwidth) ** self._power
