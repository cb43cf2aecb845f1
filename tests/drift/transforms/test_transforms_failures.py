"""Keys that can't be tested next to keys that can."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.testing.util import assert_that

from luminosity.drift import MMD, MMDTest, RowKernel
from luminosity.drift.transforms import plan
from luminosity.drift.transforms.plan import Cutting

X, Y = np.random.default_rng(0).uniform(1, 2, size=(2, 90, 3))
ROOTS = RowKernel(lambda x, y: jnp.sqrt(x) @ jnp.sqrt(y))  # NaN for numbers below zero


def failed(**expected: str) -> Any:
    def check(found: list[Any]) -> None:
        assert sorted(key for key, _ in found) == sorted(expected)
        for key, (kind, text, lines) in found:
            assert kind.__name__ == "DriftError"
            assert f"key={key!r}: {expected[key]}" in text
            assert "DriftError" in lines[-1]

    return check


def keys(*expected: str) -> Any:
    def check(found: list[Any]) -> None:
        assert sorted(key for key, _ in found) == sorted(expected)

    return check


def test_a_kernel_that_fails_for_a_key_fails_only_that_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key fails once, although each of its tiles fails."""
    monkeypatch.setattr(plan, "CUTTING", Cutting(few_rows=0, strip_rows=40))
    elements = [("right", Y), ("below zero", Y - 3), ("also right", Y + 1)]
    expected = failed(**{"below zero": "the kernel <lambda> gave infinity or NaN for some pairs of rows"})
    with beam.Pipeline("FnApiRunner") as pipeline:
        current: Any = pipeline | beam.Create(elements)
        tested, failures = current | MMDTest(X, ROOTS, keyed=True).with_exception_handling()
        assert_that(tested, keys("right", "also right"), label="tests")
        assert_that(failures, expected, label="failures of tests")
        measured, others = current | MMD(X, ROOTS, keyed=True).with_exception_handling()
        assert_that(measured, keys("right", "also right"), label="distances")
        assert_that(others, expected, label="failures of distances")


def test_without_exception_handling_the_key_is_named() -> None:
    pipeline = beam.Pipeline("FnApiRunner")
    _ = pipeline | beam.Create([("right", Y), ("below zero", Y - 3)]) | MMDTest(X, ROOTS, keyed=True)
    with pytest.raises(Exception, match="key='below zero': the kernel <lambda> gave infinity"):
        pipeline.run().wait_until_finish()


def test_missing_and_huge_values_fail_only_their_key() -> None:
    elements: list[Any] = [("right", Y), ("null", Y), ("null", [1.0, None, 2.0]), ("gone", None), ("large", 1e200 * Y)]
    with beam.Pipeline("FnApiRunner") as pipeline:
        current: Any = pipeline | beam.Create(elements)
        tested, failures = current | MMDTest(X, keyed=True, pca=2).with_exception_handling()
        assert_that(tested, keys("right"), label="tests")
        expected = failed(
            null="the current sample has one row that can't be compared: the row [1, nan, 2] has NaN, null or infinity",
            gone="the current sample has one row that can't be compared: the row [nan] has NaN, null or infinity",
            large="some numbers are too large for principal components",
        )
        assert_that(failures, expected, label="failures")


@pytest.mark.parametrize(
    ("element", "options", "match"),
    [
        (pa.record_batch({"v": list(Y)}), {"column": "w"}, "found no column 'w', expected one of v"),
        (pa.record_batch({"v": ["a", "b"]}), {"column": "v"}, "the column 'v' holds string"),
        (("a", "text"), {"keyed": True}, "found an element of type str that is not a vector"),
        (("a", [None, "text"]), {"keyed": True}, "found an element of type list that is not a vector"),
        (("a", [[1.0], [2.0, 3.0]]), {"keyed": True}, "found an element of type list that is not a vector"),
    ],
)
def test_errors_that_concern_all_keys_fail_the_pipeline(element: Any, options: dict[str, Any], match: str) -> None:
    pipeline = beam.Pipeline("FnApiRunner")
    _ = pipeline | beam.Create([element]) | MMDTest(X, **options).with_exception_handling()
    with pytest.raises(Exception, match=match):
        pipeline.run().wait_until_finish()
