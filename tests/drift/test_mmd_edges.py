"""Unusual samples: they give a clear error or a right result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from luminosity.drift import (
    RBF,
    Aggregate,
    BlockKernel,
    Laplacian,
    Linear,
    Polynomial,
    RowKernel,
    mmd2,
    mmd_test,
    witness,
)
from luminosity.drift.sums.bin_sums import bin_sums
from luminosity.drift.sums.bins import hash_ids
from luminosity.errors import DriftError

ROWS = np.random.default_rng(0).normal(size=(400, 3))
X, Y = ROWS[:200], ROWS[200:]


def with_value(value: float) -> Any:
    rows = X.copy()
    rows[7, 1] = value
    return rows


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (with_value(np.nan), "the reference has one row with NaN or infinity, the first at 7"),
        (with_value(-np.inf), "one row with NaN or infinity"),
        (np.empty((0, 3)), "has no rows, expected at least 2"),
        ([], "has no rows"),
        (X[:1], "has one row, expected at least 2"),
        (X[:, :2], "rows of 2 numbers, the current sample of 3"),
        (X[:, 0], "rows of 1 numbers, the current sample of 3"),
        (X[:, :0], "rows without numbers"),
        (X[None], r"has 3 dimensions \(\(1, 200, 3\)\)"),
        ([[1.0, 2.0, 3.0], [1.0, 2.0]], "perhaps some are shorter"),
        (pd.Series([[1.0, 2.0, 3.0], None, [1.0, 2.0, 3.0]]), "perhaps some are shorter, or missing"),
        (["a", "b"], "expected numbers; pass a BlockKernel"),
        (np.ma.masked_greater(X, 2.0), "with NaN or infinity"),
        (X.astype(complex), "holds complex128, expected numbers"),
        (X * 1e39, "too large for single precision"),
    ],
)
@pytest.mark.parametrize("function", [mmd2, mmd_test])
def test_invalid_samples_are_errors(function: Callable[..., Any], reference: Any, message: str) -> None:
    with pytest.raises(DriftError, match=message):
        function(reference, Y)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bins": 15}, "bins=15, expected a whole number from 16 to 1024"),
        ({"bins": 1025}, "bins=1025"),
        ({"bins": 20.5}, "bins=20.5"),
        ({"permutations": 18}, "expected at least 19"),
        ({"permutations": 1e3}, "permutations=1000.0, expected a whole number"),
        ({"level": 0.0}, "level=0.0"),
        ({"level": float("nan")}, "level=nan"),
        ({"seed": -1}, "seed=-1"),
        ({"precision": "float16"}, "precision='float16'"),
        ({"kernel": []}, "an empty list of kernels"),
        ({"kernel": RBF}, "expected one such as RBF()"),
        ({"kernel": [lambda x, y: x @ y]}, "wrap a function of your own in RowKernel or BlockKernel"),
        ({"ids": (range(200), range(199))}, "200 and 199 ids for 200 and 200 rows"),
        ({"ids": (np.zeros((200, 1), int), range(200))}, r"ids of shape \(200, 1\)"),
    ],
)
def test_invalid_settings_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DriftError, match=message):
        mmd_test(X, Y, **settings)


@pytest.mark.parametrize(
    "convert",
    [
        lambda rows: rows.astype(np.float16),
        lambda rows: rows.astype(np.float32),
        lambda rows: jnp.asarray(rows, dtype=jnp.bfloat16),
        lambda rows: rows.tolist(),
        lambda rows: pd.DataFrame(rows),
        lambda rows: pd.Series(list(rows)),
        lambda rows: pa.array(rows.tolist()),
        lambda rows: pa.chunked_array([rows.tolist()]),
    ],
)
def test_rows_come_in_many_forms(convert: Callable[[Any], Any]) -> None:
    assert mmd2(convert(X), convert(Y + 1), RBF(2.0)) == pytest.approx(mmd2(X, Y + 1, RBF(2.0)), abs=2e-3)


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint64, np.float16])
def test_numbers_of_any_type_show_drift(dtype: Any) -> None:
    random = np.random.default_rng(1)
    rows, more_often = (random.random((300, 4)) < 0.3).astype(dtype), (random.random((300, 4)) < 0.6).astype(dtype)
    assert not mmd_test(rows[:150], rows[150:]).drift
    assert mmd_test(rows, more_often).drift


def test_a_list_of_numbers_is_one_column() -> None:
    assert mmd2(X[:, 0], Y[:, 0]) == mmd2(X[:, :1], Y[:, :1])


@pytest.mark.parametrize("kernel", [RBF(), Laplacian(), Linear(), [RBF(), Laplacian()]])
def test_constant_columns(kernel: Any) -> None:
    constant = np.full((100, 3), 0.1)
    found = mmd_test(constant, constant[:50], kernel)
    assert (found.mmd2, found.p_value) == (0, 1)
    assert mmd_test(constant, constant + 1e-3, kernel).drift
    assert mmd_test(np.hstack([constant, X[:100]]), np.hstack([constant, X[100:]]), kernel).p_value == pytest.approx(
        mmd_test(X[:100], X[100:], kernel).p_value, abs=0.02
    )


def test_mostly_equal_rows_need_a_bandwidth() -> None:
    rows = np.zeros((5000, 2))
    rows[17] = 1
    with pytest.raises(DriftError, match=r"sampled rows are all equal.*pass the kernel a bandwidth"):
        mmd_test(rows, rows)
    assert not mmd_test(rows, rows, RBF(1.0)).drift


def test_many_equal_rows_are_no_drift() -> None:
    few = np.random.default_rng(2).integers(0, 2, size=(1000, 2))
    assert not mmd_test(few[:500], few[500:]).drift
    assert mmd_test(few[:500], np.zeros((500, 2))).drift


@pytest.mark.parametrize(("scale", "offset"), [(1.0, 1e6), (1e20, 0.0), (1e-20, 0.0), (1e-3, -1e3)])
@pytest.mark.parametrize("kernel", [RBF(), Laplacian()])
def test_offset_and_scale_of_rows_do_not_matter(scale: float, offset: float, kernel: Any) -> None:
    plain, moved = (mmd_test(a, b, kernel) for a, b in ((X, Y), (X * scale + offset, Y * scale + offset)))
    assert moved.mmd2 == pytest.approx(plain.mmd2, abs=1e-3 * plain.null_sd)
    assert moved.p_value == pytest.approx(plain.p_value, abs=2e-3)


@pytest.mark.parametrize("kernel", [Linear(), Polynomial(3)])
def test_values_too_large_for_single_precision_are_errors(kernel: Any) -> None:
    with pytest.raises(DriftError, match=r"gave infinity or NaN .* pass precision='float64'"):
        mmd_test(X * 1e20, Y * 1e20, kernel)
    assert not mmd_test(X * 1e20, Y * 1e20, kernel, precision="float64").drift


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (RowKernel(lambda x, y: x * y), r"gave an array of shape \(3,\) for two rows, expected a number"),
        (RowKernel(lambda x, y: jnp.log(x @ y)), "gave infinity or NaN"),
        (BlockKernel(lambda x, y: np.zeros((len(x), 1))), r"shape \(400, 1\) for lists of 400 and 400"),
        (BlockKernel(lambda x, y: np.full((len(x), len(y)), np.nan)), "gave infinity or NaN"),
        ([BlockKernel(lambda x, y: np.ones((len(x), len(y)))), RBF()], "a BlockKernel among other kernels"),
    ],
)
def test_kernels_of_ones_own_are_checked(kernel: Any, message: str) -> None:
    with pytest.raises(DriftError, match=message):
        mmd_test(X, Y, kernel)


def test_the_same_seed_gives_the_same_result() -> None:
    assert mmd_test(X, Y, seed=3).as_dict() == mmd_test(X, Y, seed=3).as_dict()
    assert mmd_test(X, Y, seed=3).p_value != mmd_test(X, Y, seed=4).p_value


def test_two_rows_are_enough() -> None:
    assert mmd_test(X[:2], Y[:2]).p_value > 0.05


@pytest.mark.parametrize("function", [mmd2, witness])
def test_several_kernels_are_refused_for_a_single_value(function: Callable[..., Any]) -> None:
    with pytest.raises(DriftError, match=r"expected a single kernel; use mmd_test or MMDTest for several"):
        function(X, Y, Aggregate())


def test_rows_far_from_zero_next_to_a_kernel_that_is_not_shift_invariant() -> None:
    beside, alone = mmd_test(X + 1e4, Y + 1e4, [RBF(2.0), Polynomial(2)]).kernels[0], mmd_test(X, Y, RBF(2.0))
    assert beside.mmd2 == pytest.approx(alone.mmd2, abs=0.02 * alone.null_sd)
    assert beside.null_sd == pytest.approx(alone.null_sd, rel=0.01)


@pytest.mark.parametrize(
    "ids",
    [
        [2**63 + number * 2**20 for number in range(50)],
        [number - 25 for number in range(49)] + [2**63 + 5],
        [(number << 64) + 5 for number in range(50)],  # like UUIDs of one machine
        [b"a" + b"\0" * number for number in range(50)],
        np.array([f"{number}" for number in range(50)], dtype=np.dtypes.StringDType()),
    ],
)
def test_different_ids_have_different_hashes(ids: Any) -> None:
    assert len(set(hash_ids(ids, seed=0).tolist())) == 50


def test_the_type_that_holds_ids_does_not_matter() -> None:
    texts, numbers = ["a", "bc", "ü"], [1, 2**63, 2**64 - 1]
    held = (np.array(texts), np.array(texts, dtype=object), np.array(texts, dtype=np.dtypes.StringDType()))
    assert all((hash_ids(each, 3) == hash_ids(texts, 3)).all() for each in held)
    assert (hash_ids(np.array(numbers, dtype=np.uint64), 3) == hash_ids(numbers, 3)).all()


@pytest.mark.parametrize("kernel", [RBF(), [RBF(2.0), Linear()], Laplacian()], ids=["RBF", "with Linear", "Laplacian"])
def test_a_single_huge_number_hides_nothing(kernel: Any) -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(120, 4)), random.normal(1, 1, size=(120, 4))
    found: list[float] = []
    for outlier in (1e3, 1e6, 1e12):
        y[3, 2] = outlier
        result = mmd_test(x, y, kernel)
        assert result.drift
        found.append(result.kernels[0].mmd2)
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)


def test_a_huge_number_in_the_last_row_hides_nothing() -> None:
    rows = np.random.default_rng(0).normal(size=(65, 3)).astype(np.float32)
    rows[-1] = 1e8
    bins = np.repeat([0, 1], [32, 33])
    (found,) = bin_sums([RBF(2.0)], [0.0], rows.__getitem__, bins, 2)
    values = np.exp(-((rows[:, None] - rows[None, :]).astype(np.float64) ** 2).sum(axis=2) / 8) - np.eye(65)
    expected = [[values[bins == x][:, bins == y].sum() for y in (0, 1)] for x in (0, 1)]
    assert found == pytest.approx(np.array(expected), rel=1e-5)
    (_, scores), (_, exact) = (witness(X, rows, RBF(2.0), precision=each) for each in ("float32", "float64"))
    assert scores == pytest.approx(exact, abs=1e-5)


def test_the_kernel_of_equal_rows_far_from_others_is_at_most_one() -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 100, 3))
    x[:10] = y[:10] = 1e12
    result = mmd_test(x, y, RBF(1.0))
    assert not result.drift
    assert abs(result.mmd2) < 0.1
    assert mmd_test(x, y + 1, RBF(1.0)).drift


@pytest.mark.parametrize(
    ("reference", "current", "smallest", "verdict"),
    [(2, 2, 1 / 3, "too few rows"), (3, 3, 1 / 10, "too few rows"), (4, 4, 1 / 35, "drift"), (2, 40, 1 / 861, "drift")],
)
def test_few_rows_that_can_not_give_drift_are_too_few(
    reference: int, current: int, smallest: float, verdict: str
) -> None:
    """Even samples far from each other: too few rows have too few permutations."""
    near, far = np.arange(reference)[:, None] * 0.01, 5 + np.arange(current)[:, None] * 0.01
    result = mmd_test(near, far, permutations=10_000)
    assert result.smallest_p_value == pytest.approx(smallest)
    assert result.p_value == pytest.approx(smallest)  # All permutations were tried.
    assert result.permutations == math.comb(reference + current, reference) - 1
    assert result.p_value_interval == (result.p_value, result.p_value)
    assert result.verdict == result.as_dict()["verdict"] == verdict
    assert str(result).startswith("too few rows to tell: " if verdict == "too few rows" else "drift: p = ")
    assert mmd_test(near, far, permutations=10_000, level=0.5).verdict == "drift"


def test_hashed_bins_without_rows_do_not_count() -> None:
    """All rows of a sample have one id: its one bin can be exchanged with few others."""
    result = mmd_test(X[:20], 9 + X[:20], ids=([1] * 20, [2] * 20))
    assert result.smallest_p_value > 0.2
    assert result.verdict == "too few rows"
