"""Values of several kernels at once, inside compiled code: kernels that differ in their bandwidths share distances."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from luminosity.drift.kernels import Kernel, KernelOfDistance

__all__ = ["values_of_all"]


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
