"""Measures how often each test reports drift, without and with drift, next to a full permutation test.

The full test permutes rows and holds the whole kernel matrix, with the bandwidth of the test that it is compared with.
All tests of a trial get the same rows, so that differences are more certain than the figures themselves.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from typing import Any, TypeAlias

import numpy as np
from _shifts import LARGE, NONE, SMALL

from luminosity.drift import Aggregate, Laplacian, Linear, MMDTestResult, Polynomial, mmd_test, rff_mmd

_LEVEL = 0.05
_PERMUTATIONS = 199
_PROCESSES = 2
_TRIALS_AT_ONCE = 25  # trials of one task

Test: TypeAlias = Callable[[Any, Any, int], MMDTestResult]


def _mmd(kernel: Any = None, bins: int = 120, with_ids: bool = False) -> Test:
    def run(x: Any, y: Any, seed: int) -> MMDTestResult:
        ids = (np.arange(len(x)), np.arange(len(y))) if with_ids else None
        return mmd_test(x, y, kernel, bins=bins, ids=ids, permutations=_PERMUTATIONS, level=_LEVEL, seed=seed)

    return run


def _features(x: Any, y: Any, seed: int) -> MMDTestResult:
    return rff_mmd(x, y, permutations=_PERMUTATIONS, level=_LEVEL, seed=seed)


_NULLS: dict[str, tuple[Test, tuple[int, int]]] = {
    "RBF, median bandwidth": (_mmd(), (240, 240)),
    "the same, bins from hashed ids": (_mmd(with_ids=True), (240, 240)),
    "the same, 120 rows against 360": (_mmd(), (120, 360)),
    "the same, with hashed ids": (_mmd(with_ids=True), (120, 360)),
    "the same, 10 rows against 10, hashed ids": (_mmd(with_ids=True), (10, 10)),
    "the same, 500 rows a side in 20 bins": (_mmd(bins=40), (500, 500)),
    "Laplacian": (_mmd(Laplacian()), (240, 240)),
    "Linear": (_mmd(Linear()), (240, 240)),
    "Polynomial": (_mmd(Polynomial()), (240, 240)),
    "rff_mmd": (_features, (240, 240)),
    "Aggregate": (_mmd(Aggregate()), (240, 240)),
    "Aggregate, hashed ids": (_mmd(Aggregate(), with_ids=True), (240, 240)),
    "Aggregate, RBF and Laplacian": (_mmd(Aggregate(("rbf", "laplacian"), 5)), (240, 240)),
}

_POWERS: dict[str, tuple[dict[str, Any], dict[str, Test]]] = {
    "small": (
        SMALL,
        {"60 bins": _mmd(), "hashed ids": _mmd(with_ids=True), "rff_mmd": _features, "Aggregate": _mmd(Aggregate())},
    ),
    "large": (LARGE, {"20 bins": _mmd(bins=40), "60 bins": _mmd()}),
}


def full_permutation(x: Any, y: Any, bandwidth: float, seed: int) -> float:
    """Return the p-value of the unbiased MMD² among those of permuted rows."""
    rows = np.concatenate([x, y]).astype(np.float32)
    norms = (rows * rows).sum(axis=1)
    values = np.exp((rows @ rows.T - norms[:, None] / 2 - norms[None, :] / 2) / np.float32(bandwidth) ** 2)
    values -= values.mean()
    np.fill_diagonal(values, 0)
    sides = np.repeat(np.array([[1, 0]], dtype=np.float32), [len(x), len(y)], axis=1).repeat(_PERMUTATIONS + 1, axis=0)
    sides[1:] = np.random.default_rng((seed, 9)).permuted(sides[1:], axis=1)
    xx, x_all = ((sides @ values) * sides).sum(axis=1), sides @ values.sum(axis=1)
    yy = values.sum() - 2 * x_all + xx
    n, m = len(x), len(y)
    found = xx / (n * (n - 1)) + yy / (m * (m - 1)) - 2 * (x_all - xx) / (n * m)
    return float(np.mean(found >= found[0]))


def rejections(task: tuple[str, str, range]) -> tuple[str, str, dict[str, int], int]:
    """Count how often each test reports drift in some trials."""
    table, name, trials = task
    found: dict[str, int] = {}
    for trial in trials:
        for test, is_drift in _trial(table, name, trial):
            found[test] = found.get(test, 0) + is_drift
    return table, name, found, len(trials)


def _trial(table: str, name: str, trial: int) -> Iterable[tuple[str, bool]]:
    if table == "null":
        test, rows = _NULLS[name]
        yield "drift", test(*NONE.draw((trial, 1), rows), trial).drift
        return
    shifts, tests = _POWERS[table]
    x, y = shifts[name].draw((trial, 2))
    bandwidth: float | None = None
    for key, test in tests.items():
        result = test(x, y, trial)
        bandwidth = bandwidth or result.kernels[0].bandwidth
        yield key, result.drift
    assert bandwidth is not None
    yield "reference", full_permutation(x, y, bandwidth, trial) <= _LEVEL


def main() -> None:
    """Run the trials, and print the tables."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--trials", type=int, default=2000, help="trials without drift; there are fewer with drift")
    arguments.add_argument("--only", choices=["null", *_POWERS], help="print only this table")
    chosen = arguments.parse_args()
    trials = {"null": chosen.trials, "small": 3 * chosen.trials // 20, "large": 3 * chosen.trials // 40}
    names = {"null": list(_NULLS), **{table: list(shifts) for table, (shifts, _) in _POWERS.items()}}
    tasks = [
        (table, name, range(start, min(start + _TRIALS_AT_ONCE, trials[table])))
        for table in ([chosen.only] if chosen.only else names)
        for name in names[table]
        for start in range(0, trials[table], _TRIALS_AT_ONCE)
    ]
    found = _run(tasks)
    for table in dict.fromkeys(task[0] for task in tasks):
        print(_of_null(found, trials) if table == "null" else _of_power(table, found, trials), flush=True)


def _run(tasks: list[tuple[str, str, range]]) -> dict[tuple[str, str, str], int]:
    """Run two processes with one thread each: threads of small matrix products would wait for each other."""
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", JAX_PLATFORMS="cpu")
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    found: dict[tuple[str, str, str], int] = {}
    began, done, in_all = time.monotonic(), 0, sum(len(trials) for _, _, trials in tasks)
    with get_context("spawn").Pool(_PROCESSES) as processes:
        for table, name, counts, trials in processes.imap_unordered(rejections, tasks):
            done += trials
            for test, count in counts.items():
                found[table, name, test] = found.get((table, name, test), 0) + count
            line = f"\r{done:,} of {in_all:,} trials, {time.monotonic() - began:.0f} s; {table}: {name}"
            print(f"{line:<110}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def _of_null(found: dict[tuple[str, str, str], int], trials: dict[str, int]) -> str:
    lines = [f"| test | false positives of {trials['null']:,} at {_LEVEL} | target |", "|---|---|---|"]
    for name in _NULLS:
        share = found["null", name, "drift"] / trials["null"]
        lines.append(f"| {name} | {share:.4f} | .035 to .065{'' if 0.035 <= share <= 0.065 else ': missed'} |")
    return "\n".join([*lines, ""])


def _of_power(table: str, found: dict[tuple[str, str, str], int], trials: dict[str, int]) -> str:
    shifts, tests = _POWERS[table]
    rows = "/".join(f"{each:,}" for each in sorted({shift.rows for shift in shifts.values()}))
    lines = [
        f"| shift, {rows} rows a side, {trials[table]:,} trials | full permutation | {' | '.join(tests)} |",
        "|---" * (2 + len(tests)) + "|",
    ]
    for name in shifts:
        shares = [found[table, name, test] / trials[table] for test in ("reference", *tests)]
        lines.append(f"| {name} | {' | '.join(f'{share:.3f}' for share in shares)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
