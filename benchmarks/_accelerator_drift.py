"""Measures a test of 1M x 50 against 1M x 50 on one accelerator: the fused kernel, and plain matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from luminosity.drift import RBF, MMDTestResult, mmd2, mmd_test
from luminosity.drift.sums import accelerated
from luminosity.drift.sums.accelerated import plain_pairs

_ROWS, _WIDTH = 1_000_000, 50
_CHECKED_ROWS = 50_000  # rows for which single precision is compared with double
_PASSES = 5


def main() -> None:
    """Print the time of both kernels, and their precision."""
    import jax

    device = jax.local_devices()[0]
    if device.platform == "cpu":
        print("Nothing to measure: JAX finds no accelerator.")
        return
    print(f"{device.device_kind}, JAX {jax.__version__}; {_ROWS:,} x {_WIDTH} against the same, 1,000 permutations")
    random = np.random.default_rng(0)
    host = tuple(random.standard_normal((_ROWS, _WIDTH), dtype=np.float32) for _ in range(2))
    on_device = jax.block_until_ready(jax.device_put(host))
    _measure("fused, rows in host memory", host)
    fused = _measure("fused, rows on the device", on_device)
    accelerated.best_for_this_device = lambda: plain_pairs
    plain = _measure("plain, rows on the device", on_device)
    print(f"the fused kernel is {plain / fused:.1f} times as fast as plain matrix products")
    _print_figure("fused, seconds", fused, 1.0)
    _print_figure("plain, seconds", plain, 5.0)


def _measure(name: str, samples: tuple[Any, Any]) -> float:
    cold, _ = _timed(lambda: mmd_test(*samples))
    passes = [_timed(lambda seed=seed: mmd_test(*samples, seed=seed)) for seed in range(_PASSES)]
    seconds = float(np.median([each for each, _ in passes]))
    print(f"{name}: {seconds:.3f} s, the first {cold:.2f} s; {passes[0][1]}", flush=True)
    _check(name, samples)
    return seconds


def _timed(call: Callable[[], MMDTestResult]) -> tuple[float, MMDTestResult]:
    start_s = time.perf_counter()
    result = call()
    return time.perf_counter() - start_s, result


def _check(name: str, samples: tuple[Any, Any]) -> None:
    x, y = (np.asarray(sample[:_CHECKED_ROWS]) for sample in samples)
    found = mmd_test(x, y)
    exact = mmd2(x, y, RBF(found.kernels[0].bandwidth), precision="float64")
    error = abs(found.mmd2 - exact) / found.null_sd
    print(f"{name}: {_CHECKED_ROWS:,} rows differ from double precision by {error:.5%} of the null's deviation")


def _print_figure(what: str, value: float, at_most: float) -> None:
    print(f"{what}: {value:.2f} (target: at most {at_most}; {'met' if value <= at_most else 'MISSED'})")
