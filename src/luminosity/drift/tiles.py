"""Sums of kernel values over a tile: some rows against some rows. All large sums are made of these."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from luminosity.drift.kernels import Kernel

__all__ = ["tile_sums"]


@cache
def _compiled() -> Any:
    import jax
    import jax.numpy as jnp

    def sums(
        forms: tuple[Kernel, ...],
        group: int,
        same: bool,
        parameters: Any,
        offsets: Any,
        x: Any,
        wx: Any,
        y: Any,
        wy: Any,
    ) -> Any:
        def one(form: Kernel, numbers: Any, offset: Any) -> Any:
            values = (form.values(numbers, x, y) - offset) * wx[:, None] * wy[None, :]
            if same:
                rows = jnp.arange(x.shape[0])
                values = jnp.where(rows[:, None] == rows[None, :], 0, values)
            return values.reshape(x.shape[0] // group, group, y.shape[0] // group, group).sum((1, 3))

        return jnp.stack([one(*each) for each in zip(forms, parameters, offsets, strict=True)])

    return jax.jit(sums, static_argnums=(0, 1, 2))


def tile_sums(
    kernels: Sequence[Kernel], offsets: Sequence[float], group: int, same: bool, x: Any, wx: Any, y: Any, wy: Any
) -> Any:
    """For each kernel its values, less its offset, summed over groups of rows; ``same`` leaves out each with itself.

    An offset near the mean of the kernel leaves MMD² as it is, and keeps in single precision the digits that matter.
    """
    forms = tuple(kernel.form() for kernel in kernels)
    dtype = np.asarray(x[:0]).dtype
    parameters = tuple(tuple(dtype.type(number) for number in kernel.parameters()) for kernel in kernels)
    return _compiled()(forms, group, same, parameters, tuple(map(dtype.type, offsets)), x, wx, y, wy)
