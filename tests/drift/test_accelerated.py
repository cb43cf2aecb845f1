"""The code for accelerators, run on the CPU: the fused kernel interpreted, and plain matrix products."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from luminosity.drift import RBF
from luminosity.drift.mmd.permutations import estimates, null_estimates, observed_side
from luminosity.drift.sums.accelerated import PairSums, accelerated_sums, fused_pairs, plain_pairs
from luminosity.drift.sums.bin_sums import bin_sums
from luminosity.drift.sums.bins import BinCounts


@pytest.mark.parametrize("pair_sums", [partial(fused_pairs, interpret=True), plain_pairs], ids=["fused", "plain"])
@pytest.mark.parametrize("width", [3, 50])
def test_sums_equal_those_of_the_tiles(pair_sums: PairSums, width: int) -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(500, width)), random.normal(size=(420, width))
    bins = np.concatenate([random.integers(0, 3, 500), random.integers(3, 6, 420)])  # bins of different sizes
    rows, counts, planned = np.concatenate([x, y]), np.bincount(bins).astype(float), BinCounts(3, 3)
    kernels, offsets = [RBF(width**0.5), RBF(2 * width**0.5)], [0.4, 0.8]

    expected = bin_sums(kernels, offsets, lambda numbers: rows[numbers], bins, 6)
    found = accelerated_sums(kernels, offsets, x, y, rows.mean(axis=0), bins, 6, pair_sums)
    for ours, theirs in zip(found, expected, strict=True):
        null_sd = null_estimates(theirs[None], counts, planned, 200, 0).std()
        side = observed_side(planned)[None]
        assert estimates(ours, counts, side) == pytest.approx(estimates(theirs, counts, side), abs=2e-3 * null_sd)


def test_a_row_far_away_is_similar_to_no_other() -> None:
    rows = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    rows[0] = 1e6
    bins = np.repeat([0, 1], 20)
    [sums] = accelerated_sums([RBF(1.0)], [0.0], rows[:20], rows[20:], np.zeros(2), bins, 2, plain_pairs)
    [without] = bin_sums([RBF(1.0)], [0.0], lambda numbers: rows[1:][numbers], bins[1:], 2)
    assert sums == pytest.approx(without, rel=1e-3)
