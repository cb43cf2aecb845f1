"""Sums over pairs of bins, with all rows on the device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from luminosity.drift.kernels import RBF, Kernel
from luminosity.drift.sums.gpu_kernels import STRIP, fused_pairs, plain_pairs

__all__ = [
    "FARTHEST",
    "NORM_COLUMNS",
    "PairSums",
    "accelerated_sums",
    "as_halves",
    "best_for_this_device",
    "can_accelerate",
    "kept_on_device",
]


PairSums = Callable[[Any, Any, Any, Any, Any, Any, int], Any]

_WIDEST = 256  # columns of a strip that stays on the chip
_NARROWEST = 16
_FARTHEST_BANDWIDTHS = 100  # from the centre: beyond, half precision would move rows by a visible part of a bandwidth
_LOG2_E = 1.4426950408889634

NORM_COLUMNS = 6
FARTHEST = 60_000.0  # half of |z|², and within half precision: nothing is similar to such a row
_PIECES = 3  # of 11 bits each: more than single precision has


def can_accelerate(kernels: Sequence[Kernel], width: int, farthest: float, precision: str) -> bool:
    """Whether there is an accelerator, for RBF kernels of rows that are not too wide nor too far from their centre."""
    import jax

    if jax.local_devices()[0].platform == "cpu" or precision == "float64" or _columns(width) > _WIDEST:
        return False
    return all(
        isinstance(kernel, RBF) and farthest < _FARTHEST_BANDWIDTHS * (kernel.bandwidth or 0) for kernel in kernels
    )


def kept_on_device(values: Any) -> bool:
    """Whether these are good rows that lie on an accelerator, and need not come back to be looked at."""
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(values, jax.Array) or values.ndim != 2 or values.dtype != np.float32:
        return False
    on_accelerator = all(device.platform != "cpu" for device in values.devices())
    return on_accelerator and len(values) > 1 and values.shape[1] > 0 and bool(jax.numpy.isfinite(values).all())


def best_for_this_device() -> PairSums:
    import jax

    nvidia = "nvidia" in jax.local_devices()[0].device_kind.lower()
    return fused_pairs if nvidia else plain_pairs


def accelerated_sums(
    kernels: Sequence[Kernel],
    offsets: Sequence[float],
    reference: Any,
    current: Any,
    centre: Any,
    bins: Any,
    count: int,
    pair_sums: PairSums | None = None,
) -> Any:
    """As ``block_sums``: for each kernel a symmetric matrix. Rows may lie on the device already."""
    import jax
    import jax.numpy as jnp

    pair_sums = pair_sums or best_for_this_device()
    reference, current, centre = _single(reference, current, centre)
    held = jax.device_put((reference, current, np.asarray(centre, np.float32)))  # Rows move while bins are filled.
    order, rows_of_bin = _filled_bins(bins, count)
    first, second = np.triu_indices(count)
    numbers = jax.device_put((order, first.astype(np.int32), second.astype(np.int32)))
    found: list[Any] = []
    for kernel, offset in zip(kernels, offsets, strict=True):
        (bandwidth,) = kernel.parameters()
        scale = jnp.float32(_LOG2_E**0.5 / bandwidth)
        by_strip, near = _compiled(pair_sums)(*held, *numbers, scale, jnp.float32(offset))
        sums = np.asarray(by_strip, np.float64).sum(axis=1)
        sums += offset * rows_of_bin[first] * (order.shape[1] - rows_of_bin[second])  # what fillers have put in
        sums -= np.where(
            first == second, np.asarray(near)[first] - offset * rows_of_bin[first], 0
        )  # rows with themselves
        matrix = np.zeros((count, count))
        matrix[first, second] = matrix[second, first] = sums
        found.append(matrix)
    return np.stack(found)


@cache
def _compiled(pair_sums: PairSums) -> Any:
    import jax
    import jax.numpy as jnp

    @jax.jit
    def sums(
        reference: Any, current: Any, centre: Any, order: Any, first: Any, second: Any, scale: Any, offset: Any
    ) -> Any:
        numbers = order.ravel()
        real = numbers >= 0
        of_reference = (numbers < len(reference))[:, None]
        from_reference = reference[jnp.clip(numbers, 0, len(reference) - 1)]
        from_current = current[jnp.clip(numbers - len(reference), 0, len(current) - 1)]
        z = (jnp.where(of_reference, from_reference, from_current) - centre).astype(jnp.float32) * scale
        left, right, near = as_halves(z, real, _columns(reference.shape[1]))
        by_strip = pair_sums(left, right, real.astype(jnp.float32), offset, first, second, order.shape[1])
        return by_strip, near.reshape(order.shape).sum(axis=1)

    return sums


def _single(reference: Any, current: Any, centre: Any) -> tuple[Any, Any, Any]:
    """Rows of double precision are centred before they lose digits."""
    if reference.dtype == current.dtype == np.float32:
        return reference, current, centre
    return (reference - centre).astype(np.float32), (current - centre).astype(np.float32), np.zeros_like(centre)


def _columns(width: int) -> int:
    """A power of two, as the fused kernel needs it."""
    return max(_NARROWEST, 1 << (width + NORM_COLUMNS - 1).bit_length())


def _filled_bins(bins: Any, count: int) -> tuple[Any, Any]:
    """Row numbers by bin, all bins filled up to one length with -1; and how many rows each has.

    >>> _filled_bins(np.array([1, 0, 1]), 2)[0][:, :3]
    array([[ 1, -1, -1],
           [ 0,  2, -1]], dtype=int32)
    """
    rows_of_bin = np.bincount(bins, minlength=count)
    by_bin = np.argsort(bins.astype(np.uint16), kind="stable").astype(np.int32)
    order = np.full((count, -(-int(rows_of_bin.max()) // STRIP) * STRIP), -1, np.int32)
    order[np.arange(order.shape[1]) < rows_of_bin[:, None]] = by_bin
    return order, rows_of_bin


def as_halves(z: Any, real: Any, width: int) -> tuple[Any, Any, Any]:
    """Two matrices of ``width`` columns, for the left and the right of a product, and which rows are like themselves.

    Rows that are not real, or are too far away to be like any other, have a kernel of zero with all.
    """
    import jax.numpy as jnp

    near = real & (jnp.sum(z * z, axis=1) < FARTHEST)
    rounded = jnp.where(near[:, None], z, 0).astype(jnp.float16)
    norms = -0.5 * jnp.sum(rounded.astype(jnp.float32) ** 2, axis=1)
    pieces = _pieces(jnp.where(near, norms, -FARTHEST))
    ones = jnp.ones((len(z), _PIECES), jnp.float16)

    def filled(*parts: Any) -> Any:
        columns = jnp.concatenate(parts, axis=1)
        return jnp.pad(columns, ((0, 0), (0, width - columns.shape[1])))

    return filled(rounded, pieces, ones), filled(rounded, ones, pieces), near


def _pieces(numbers: Any) -> Any:
    import jax.numpy as jnp

    found: list[Any] = []
    for _ in range(_PIECES):
        found.append(numbers.astype(jnp.float16))
        numbers = numbers - found[-1].astype(jnp.float32)
    return jnp.stack(found, axis=1)
