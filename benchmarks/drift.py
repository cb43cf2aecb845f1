"""Measures a test of 10,000 rows against 10,000, next to scikit-learn's kernel matrices; then 100,000 against 100,000.

Both sides run in one process, alternately, once to warm up and then five times. The memory is the peak of a process
that runs nothing but the test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from luminosity.drift import RBF, MMDTestResult, mmd2, mmd_test

_WIDTH = 50
_ROWS = int(os.environ.get("ROWS", "10000"))
_MANY_ROWS = int(os.environ.get("MANY_ROWS", "100000"))
_PERMUTATIONS = 10_000
_CHUNK = 1000  # rows of scikit-learn's kernel matrix that are held at a time
_ROUNDS = 5
_TIMEOUT_S = 900


def samples(rows: int) -> tuple[Any, Any]:
    """Draw two samples of one distribution."""
    random = np.random.default_rng(0)
    x, y = (random.standard_normal((rows, _WIDTH), dtype=np.float32) for _ in range(2))
    return x, y


def ours(x: Any, y: Any) -> MMDTestResult:
    """Run the test of Luminosity."""
    return mmd_test(x, y, permutations=_PERMUTATIONS)


def scikit_learns(x: Any, y: Any, gamma: float) -> float:
    """Compute the same estimate from scikit-learn's kernel matrices, without permutations."""
    from sklearn.metrics.pairwise import rbf_kernel

    def total(a: Any, b: Any) -> float:
        parts = range(0, len(a), _CHUNK)
        return sum(float(rbf_kernel(a[at : at + _CHUNK], b, gamma=gamma).sum(dtype=np.float64)) for at in parts)

    m, n = len(x), len(y)
    return (total(x, x) - m) / (m * (m - 1)) + (total(y, y) - n) / (n * (n - 1)) - 2 * total(x, y) / (m * n)


def seconds(run: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def peak_mb() -> float:
    """Return the peak memory of a separate process, including everything that it imports."""
    child = subprocess.run(
        [sys.executable, __file__, "memory"], stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=True
    )
    return json.loads(child.stdout)


def _own_peak_mb() -> float:
    """Read the peak memory from Linux. ``getrusage`` would include the memory of the parent process at the start."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1.024 / 1e3


def compare() -> None:
    """Compare time, memory and precision of both sides."""
    import _measure  # It imports Beam, which the test does not need.

    x, y = samples(_ROWS)
    first_s = seconds(lambda: ours(x, y))
    found = ours(x, y)
    (kernel,) = found.kernels
    assert kernel.bandwidth is not None
    gamma = 1 / (2 * kernel.bandwidth**2)
    theirs = scikit_learns(x, y, gamma)
    rounds = [(seconds(lambda: ours(x, y)), seconds(lambda: scikit_learns(x, y, gamma))) for _ in range(_ROUNDS)]
    our_s, their_s = (median(side) for side in zip(*rounds, strict=True))
    exact = mmd2(x, y, RBF(kernel.bandwidth), precision="float64")
    memory_mb = peak_mb()
    _measure.print_table(
        {
            "Luminosity": {"seconds": our_s, "peak MB": memory_mb, "first call, s": first_s},
            "scikit-learn": {"seconds": their_s},
        }
    )
    error, their_error = (abs(value - exact) / found.null_sd for value in (found.mmd2, theirs))
    print(f"{found}; scikit-learn is {100 * their_error:.2g}% of the null's standard deviation from double precision")
    _measure.print_figure("scikit-learn's time / ours", their_s / our_s, at_least=4)
    _measure.print_figure("peak memory, in MB", memory_mb, at_most=400)
    print(f"error, in % of the null's standard deviation: {100 * error:.2g} (target: at most 0.1)")


def many() -> None:
    """Time a test of many rows."""
    x, y = samples(_MANY_ROWS)

    def progress(done: int, of: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{100 * done / of:.0f}%", end="\r", file=sys.stderr)

    start_s = time.perf_counter()
    found = mmd_test(x, y, permutations=_PERMUTATIONS, progress=progress)
    print(f"{_MANY_ROWS:,} rows against {_MANY_ROWS:,}: {time.perf_counter() - start_s:.1f} s; {found}")


if __name__ == "__main__":
    if sys.argv[1:] == ["memory"]:
        ours(*samples(_ROWS))
        print(_own_peak_mb())
    else:
        compare()
        if _MANY_ROWS:
            many()
