"""Sums over pairs of bins on an accelerator, with all rows in its memory.

Rows become half-precision numbers whose matrix product, kept in single precision, is the exponent of the kernel. With
rows scaled to ``z``, the RBF kernel is ``2 ** (z·z' - |z|²/2 - |z'|²/2)``. Each norm is put into three more columns,
its leading digits and what they leave, against ones on the other side: the product is then the whole exponent, and only
the power is left to compute for each pair. The norms are those of the rounded rows: rounding moves each row by less
than a thousandth of its length, whichever sample it is from, and everything after that is exact.

NVIDIA devices use a fused kernel written in Pallas. Each of its programs sums a strip of one bin against all of
another, and holds it in registers: only one number per strip leaves the chip. Other devices use plain matrix products.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from luminosity.drift.kernels import RBF, Kernel

__all__ = [
    "PairSums",
    "accelerated_sums",
    "best_for_this_device",
    "can_accelerate",
    "fused_pairs",
    "kept_on_device",
    "plain_pairs",
]

PairSums = Callable[[Any, Any, Any, Any, Any, Any, int], Any]
"""A function with the arguments of ``fused_pairs``, without ``interpret``."""
_WIDEST = 256  # columns: a strip of rows must fit on the chip
_NARROWEST = 16  # columns that a matrix product takes at least
_FARTHEST_BANDWIDTHS = 100  # from the centre: beyond it, half precision moves rows by a visible part of a bandwidth
_LOG2_E = 1.4426950408889634
_NORM_COLUMNS = 6
_FARTHEST = 60_000.0  # half of |z|², within half precision: a row so far away is similar to no other
_PIECES = 3  # of 11 bits each: more than single precision has


def can_accelerate(kernels: Sequence[Kernel], width: int, farthest: float, precision: str) -> bool:
    """Return whether an accelerator can sum these kernels: only RBF, of rows neither too wide nor too far out."""
    import jax

    if jax.local_devices()[0].platform == "cpu" or precision == "float64" or _columns(width) > _WIDEST:
        return False
    return all(
        isinstance(kernel, RBF) and farthest < _FARTHEST_BANDWIDTHS * (kernel.bandwidth or 0) for kernel in kernels
    )


def kept_on_device(values: Any) -> bool:
    """Return whether these are valid rows in an accelerator's memory, which need not be copied back to be checked."""
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(values, jax.Array) or values.ndim != 2 or values.dtype != np.float32:
        return False
    on_accelerator = all(device.platform != "cpu" for device in values.devices())
    return on_accelerator and len(values) > 1 and values.shape[1] > 0 and bool(jax.numpy.isfinite(values).all())


def best_for_this_device() -> PairSums:
    """Return the fused GPU kernel on NVIDIA devices, plain matrix products elsewhere."""
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
    """Return what ``bin_sums`` returns: a symmetric matrix for each kernel. Rows may be on the device already."""
    import jax
    import jax.numpy as jnp

    pair_sums = pair_sums or best_for_this_device()
    reference, current, centre = _single(reference, current, centre)
    held = jax.device_put((reference, current, np.asarray(centre, np.float32)))
    rows_of_bin = np.bincount(bins, minlength=count)
    length = -(-int(rows_of_bin.max()) // STRIP) * STRIP
    first, second = np.triu_indices(count)
    sent = jax.device_put((bins.astype(np.uint16), rows_of_bin.astype(np.int32)))
    order = _ordering()(*sent, length)
    numbers = (order, *jax.device_put((first.astype(np.int32), second.astype(np.int32))))
    found: list[Any] = []
    for kernel, offset in zip(kernels, offsets, strict=True):
        (bandwidth,) = kernel.parameters()
        scale = jnp.float32(_LOG2_E**0.5 / bandwidth)
        by_strip, near = _compiled(pair_sums)(*held, *numbers, scale, jnp.float32(offset))
        sums = np.asarray(by_strip, np.float64).sum(axis=1)
        sums += offset * rows_of_bin[first] * (length - rows_of_bin[second])  # what fillers contributed
        sums -= np.where(
            first == second, np.asarray(near)[first] - offset * rows_of_bin[first], 0
        )  # rows paired with themselves
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
        left, right, near = _as_halves(z, real, _columns(reference.shape[1]))
        by_strip = pair_sums(left, right, real.astype(jnp.float32), offset, first, second, order.shape[1])
        return by_strip, near.reshape(order.shape).sum(axis=1)

    return sums


def _single(reference: Any, current: Any, centre: Any) -> tuple[Any, Any, Any]:
    """Return rows in single precision. Rows of double precision are centred before they lose digits."""
    if reference.dtype == current.dtype == np.float32:
        return reference, current, centre
    return (reference - centre).astype(np.float32), (current - centre).astype(np.float32), np.zeros_like(centre)


def _columns(width: int) -> int:
    """Return a power of two, which the fused kernel needs."""
    return max(_NARROWEST, 1 << (width + _NORM_COLUMNS - 1).bit_length())


@cache
def _ordering() -> Any:
    import jax
    import jax.numpy as jnp

    def ordered(bins: Any, rows_of_bin: Any, length: int) -> Any:
        """Return row numbers by bin, all bins filled up to one length with -1. The device sorts them: it is faster."""
        by_bin = jnp.argsort(bins, stable=True).astype(jnp.int32)
        places = jnp.arange(length, dtype=jnp.int32)
        starts = jnp.cumsum(rows_of_bin) - rows_of_bin
        numbers = by_bin[jnp.clip(starts[:, None] + places, 0, len(bins) - 1)]
        return jnp.where(places < rows_of_bin[:, None], numbers, -1)

    return jax.jit(ordered, static_argnums=2)


def _as_halves(z: Any, real: Any, width: int) -> tuple[Any, Any, Any]:
    """Return two matrices of ``width`` columns, for the left and the right of a product, and a mask of the near rows.

    Fillers, and rows too far away to be similar to any other, have a kernel of zero with all rows.
    """
    import jax.numpy as jnp

    near = real & (jnp.sum(z * z, axis=1) < _FARTHEST)
    rounded = jnp.where(near[:, None], z, 0).astype(jnp.float16)
    norms = -0.5 * jnp.sum(rounded.astype(jnp.float32) ** 2, axis=1)
    pieces = _pieces(jnp.where(near, norms, -_FARTHEST))
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


STRIP = 128  # rows that a program holds
_STEP = 64  # rows of the other bin that a program reads at a time
_WARPS = 4  # of a program
_MOST_VALUES = 1 << 29  # values of a strip that go through the device's memory: 2 GB


def fused_pairs(
    left: Any, right: Any, real: Any, offset: Any, first: Any, second: Any, bin_rows: int, interpret: bool = False
) -> Any:
    """Return sums of ``kernel - offset`` for each pair of bins, by strip of the first bin.

    ``left`` and ``right`` have ``bin_rows`` rows for each bin; ``real`` is 1 for rows, 0 for fillers. Fillers of the
    second bin still count.
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    strips = bin_rows // STRIP
    call = pallas.pallas_call(
        partial(_program, bin_rows, interpret),
        out_shape=jax.ShapeDtypeStruct((len(first) * strips,), jnp.float32),
        grid=(len(first) * strips,),
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=3),
        interpret=interpret,
    )
    return call(left, right, real, offset[None], first, second).reshape(len(first), strips)


def _program(
    bin_rows: int, interpret: bool, left: Any, right: Any, real: Any, offsets: Any, first: Any, second: Any, out: Any
) -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    product = triton.dot if hasattr(triton, "dot") else pallas.dot  # before JAX 0.10
    number = pallas.program_id(0)
    pair, strip = number // (bin_rows // STRIP), number % (bin_rows // STRIP)
    mine = pallas.ds(first[pair] * bin_rows + strip * STRIP, STRIP)
    begin = second[pair] * bin_rows
    x, offset = left[mine, :], offsets[0]

    def step(index: Any, sums: Any) -> Any:
        y = right[pallas.ds(begin + index * _STEP, _STEP), :]
        exponent = product(x, y, trans_b=True)
        return sums + ((jnp.exp2(exponent) if interpret else _power_of_two(exponent)) - offset)

    sums = jax.lax.fori_loop(0, bin_rows // _STEP, step, jnp.zeros((STRIP, _STEP), jnp.float32))
    out[number] = jnp.sum(sums * real[mine][:, None])


def _power_of_two(exponent: Any) -> Any:
    """Use the device's own instruction, which flushes tiny results to zero: a tenth less time in total."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas import triton

    [power] = triton.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[exponent],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(exponent.shape, jnp.float32)],
    )
    return power


def plain_pairs(left: Any, right: Any, real: Any, offset: Any, first: Any, second: Any, bin_rows: int) -> Any:
    """Return what ``fused_pairs`` returns, computed in wider strips."""
    import jax
    import jax.numpy as jnp

    most = min(bin_rows, max(1, _MOST_VALUES // bin_rows))
    strip = max(rows for rows in range(1, most + 1) if bin_rows % rows == 0)

    def sums(start: Any, other: Any) -> Any:
        x = jax.lax.dynamic_slice_in_dim(left, start, strip)
        y = jax.lax.dynamic_slice_in_dim(right, other * bin_rows, bin_rows)
        values = jnp.exp2(jnp.matmul(x, y.T, preferred_element_type=jnp.float32)) - offset
        return jnp.sum(values.sum(axis=1) * jax.lax.dynamic_slice_in_dim(real, start, strip))

    def of_pair(pair: Any) -> Any:
        starts = pair[0] * bin_rows + jnp.arange(bin_rows // strip) * strip
        return jax.lax.map(lambda start: sums(start, pair[1]), starts)

    return jax.lax.map(of_pair, (first, second))
