"""Measures principal components of 20,000 embeddings of 384 numbers and distances of all pairs, next to scikit-learn.

A talk claimed that JAX made this ten times as fast. Each side is measured in a fresh process, first cold, then warm;
both take and return single precision.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from typing import Any

import _measure
import numpy as np

_ROWS = int(os.environ.get("ROWS", "20000"))
_WIDTH, _COMPONENTS = 384, 50
_WARM_RUNS = 3

PROJECT, OF_PROJECTED, OF_EMBEDDINGS = "PCA", f"{_COMPONENTS} columns", f"{_WIDTH} columns"


def embeddings() -> Any:
    """Draw embeddings whose variance decreases from direction to direction, as that of a model's embeddings does."""
    random = np.random.default_rng(0)
    spread = random.normal(size=(_WIDTH, _WIDTH)) / np.sqrt(np.arange(1, _WIDTH + 1))[:, None]
    return (random.normal(size=(_ROWS, _WIDTH)) @ spread).astype(np.float32)


def ours() -> dict[str, float]:
    """Measure Luminosity."""
    from luminosity.drift import PCA, pairwise_distances

    return measure(lambda rows: PCA.fit(rows, _COMPONENTS).transform(rows), pairwise_distances)


def theirs() -> dict[str, float]:
    """Measure scikit-learn."""
    from sklearn.decomposition import PCA
    from sklearn.metrics import pairwise_distances

    return measure(lambda rows: PCA(_COMPONENTS).fit(rows).transform(rows), pairwise_distances)


def measure(project: Callable[[Any], Any], distances: Callable[[Any], Any]) -> dict[str, float]:
    """Return the seconds of the first run and of the fastest later run, and mean distances to compare the sides by."""
    rows = embeddings()
    found: dict[str, float] = {}
    projected = timed(PROJECT, lambda: project(rows), found)
    for name, of_rows in ((OF_PROJECTED, projected), (OF_EMBEDDINGS, rows)):
        matrix = timed(name, lambda of_rows=of_rows: distances(of_rows), found)
        found[f"mean, {name}"] = float(matrix.mean(dtype=np.float64))
        del matrix
    found["peak GB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return found


def timed(name: str, run: Callable[[], Any], found: dict[str, float]) -> Any:
    """Run several times, store the seconds in ``found``, and return the last result."""
    seconds: list[float] = []
    result = None
    for _ in range(1 + _WARM_RUNS):
        result = None  # Two of these matrices would take many gigabytes.
        start_s = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - start_s)
    found[f"{name}, cold"], found[name] = seconds[0], min(seconds[1:])
    return result


def report(results: _measure.Results) -> None:
    """Print the results of both sides, and whether they meet the targets."""
    us, them = results["Luminosity"], results["scikit-learn"]
    _measure.print_table({name: {c: v for c, v in side.items() if "mean" not in c} for name, side in results.items()})
    for name in (OF_PROJECTED, OF_EMBEDDINGS):
        if abs(us[f"mean, {name}"] / them[f"mean, {name}"] - 1) > 1e-5:
            print(f"FAILED: the mean distances differ: {us[f'mean, {name}']} and {them[f'mean, {name}']}")
    for kind in ("", ", cold"):
        both = [side[f"{PROJECT}{kind}"] + side[f"{OF_PROJECTED}{kind}"] for side in (them, us)]
        what = f"PCA and distances{kind}: scikit-learn's time / ours"
        _measure.print_figure(what, both[0] / both[1], at_least=10)  # the talk's claim
    ratio = them[OF_EMBEDDINGS] / us[OF_EMBEDDINGS]
    print(f"Distances of {_WIDTH} columns, without PCA: scikit-learn's time / ours: {ratio:.2f}")


if __name__ == "__main__":
    _measure.main({"Luminosity": ours, "scikit-learn": theirs}, report)
