"""Drift on one accelerator: a test of many rows against many, distances of all pairs, and principal components."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from _accelerator_models import is_small
from _measure import Figure, print_figures

from luminosity.drift import PCA, RBF, mmd2, mmd_test, pairwise_distances

__all__ = ["drift"]

_WIDTH = 50
_ROWS = 2_000 if is_small() else 1_000_000
_CHECKED_ROWS = 1_000 if is_small() else 30_000  # for which single precision is compared with double
_PAIRED_ROWS, _COLUMNS = (500 if is_small() else 10_000), 5
_EMBEDDINGS, _COMPONENTS = ((500, 384) if is_small() else (20_000, 384)), 50
_PASSES = 2 if is_small() else 5


def drift() -> None:
    """Print the times of all of it; the first call also compiles."""
    import jax

    device = jax.local_devices()[0]
    print(f"JAX {jax.__version__} on {device.device_kind}{'' if device.platform != 'cpu' else ': needs a CUDA device'}")
    figures, failures = list[Figure](), list[Exception]()
    for part in (_test, _distances, _components):
        try:
            figures += part()
        except Exception as error:  # the next part is measured
            failures.append(error)
            print(f"FAILED: {part.__name__}: {type(error).__name__}: {error}", flush=True)
    print_figures(figures)
    if failures:
        raise RuntimeError(f"{len(failures)} parts failed") from failures[0]


def _test() -> Iterator[Figure]:
    import jax

    random = np.random.default_rng(0)
    host = tuple(random.standard_normal((_ROWS, _WIDTH), dtype=np.float32) for _ in range(2))
    on_device = jax.block_until_ready(jax.device_put(host))
    what = f"MMD test, {_ROWS:,} x {_ROWS:,} rows of {_WIDTH} numbers"
    for name, samples in (("on the device", on_device), ("in host memory", host)):
        first, seconds = _timed(lambda samples=samples: mmd_test(*samples))
        target = 0.8 if name == "on the device" else None
        yield Figure(f"{what} {name} (s)", seconds, at_most=target, note=f"the first call {first:.2f} s")
    x, y = (sample[:_CHECKED_ROWS] for sample in host)
    found = mmd_test(x, y)
    exact = mmd2(x, y, RBF(found.kernels[0].bandwidth), precision="float64")
    error = abs(found.mmd2 - exact) / found.null_sd
    yield Figure(f"{_CHECKED_ROWS:,} rows: error beside double precision, in null deviations", error, at_most=0.01)


def _distances() -> Iterator[Figure]:
    from sklearn.metrics import pairwise_distances as theirs

    rows = np.random.default_rng(0).standard_normal((_PAIRED_ROWS, _COLUMNS), dtype=np.float32)
    yield from _beside(
        f"distances, {_PAIRED_ROWS:,} x {_PAIRED_ROWS:,} rows of {_COLUMNS} numbers",
        lambda on_device: pairwise_distances(rows, on_device=on_device),
        lambda: theirs(rows),
    )


def _components() -> Iterator[Figure]:
    from sklearn.decomposition import PCA as Theirs
    from sklearn.metrics import pairwise_distances as theirs

    random = np.random.default_rng(0)
    count, width = _EMBEDDINGS
    spread = random.normal(size=(width, width)) / np.sqrt(np.arange(1, width + 1))[:, None]
    rows = (random.normal(size=_EMBEDDINGS) @ spread).astype(np.float32)
    yield from _beside(
        f"PCA to {_COMPONENTS} of {count:,} x {width}, then distances",
        lambda on_device: pairwise_distances(PCA.fit(rows, _COMPONENTS).transform(rows), on_device=on_device),
        lambda: theirs(Theirs(_COMPONENTS).fit(rows).transform(rows)),
        at_least=10,
    )


def _beside(
    what: str, ours: Callable[[bool], Any], theirs: Callable[[], Any], at_least: float | None = None
) -> Iterator[Figure]:
    """Compare with scikit-learn, which leaves its result in host memory; published figures of JAX leave theirs there.

    The target is for the result on the device, as in those figures.
    """
    import jax
    import jax.numpy as jnp

    other_first, other = _timed(theirs, passes=2)
    expected = float(theirs().mean(dtype=np.float64))
    note = f"which takes {other:.2f} s, the first call {other_first:.2f} s"
    for where, on_device in (("left on the device", True), ("copied to the host", False)):
        first, seconds = _timed(lambda on_device=on_device: jax.block_until_ready(ours(on_device)))
        found = ours(on_device)
        mean = float(jnp.mean(found) if on_device else found.mean(dtype=np.float64))
        if abs(mean / expected - 1) > 1e-4:
            raise ArithmeticError(f"{what}: the mean distances differ: {mean} and {expected}")
        yield Figure(f"{what}, {where} (s)", seconds, note=f"the first call, which compiles, {first:.2f} s")
        yield Figure(
            "  times as fast as scikit-learn", other / seconds, at_least=at_least if on_device else None, note=note
        )


def _timed(call: Callable[[], Any], passes: int = _PASSES) -> tuple[float, float]:
    """Return the seconds of the first call, and the median of those after it."""
    seconds: list[float] = []
    for _ in range(1 + passes):
        start_s = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start_s)
        del result  # some take gigabytes
    return seconds[0], float(np.median(seconds[1:]))
