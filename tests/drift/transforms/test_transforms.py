"""Tests in pipelines give the results of two arrays, however the rows are distributed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms import window

from luminosity.drift import MMD, PCA, RBF, FitPCA, MMDTest, MMDTestResult, RowKernel, mmd_test
from luminosity.drift.rows import Precision
from luminosity.drift.transforms import plan
from luminosity.drift.transforms.plan import Cutting
from tests.both_runners import Pipelines, counters

pytestmark = pytest.mark.thorough

_RANDOM = np.random.default_rng(0)
X, Y = _RANDOM.normal(size=(700, 5)), _RANDOM.normal(0.05, 1, size=(600, 5))
X_IDS, Y_IDS = np.arange(700), np.array([f"y{number}" for number in range(600)])
MANY_STRIPS = Cutting(few_rows=0, strip_rows=300)
_ONE_WORKER = "--cpu_workers=1"  # where rows of several batches matter, not processes: each imports JAX


def table(rows: Any, ids: Any, **more: Any) -> pa.RecordBatch:
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])
    return pa.record_batch({"embedding": vectors, "id": ids, **more})


def batches(rows: Any, ids: Any, size: int, seed: int, **more: Any) -> list[pa.RecordBatch]:
    """Return the same rows in another order, in batches of this size."""
    order = np.random.default_rng(seed).permutation(len(rows))
    return [
        table(rows[some], ids[some], **{name: values[some] for name, values in more.items()})
        for some in np.array_split(order, len(rows) // size)
    ]


def row_ids(rows: Any) -> Any:
    found = np.empty(len(rows), dtype=object)
    found[:] = [row.tobytes() for row in rows]
    return found


def same(expected: MMDTestResult) -> Any:
    def check(found: list[MMDTestResult]) -> None:
        (result,) = found
        near = 1e-9 * abs(expected.mmd2) if expected.precision == "float64" else 1e-3 * expected.null_sd
        assert result.mmd2 == pytest.approx(expected.mmd2, abs=near, rel=0)
        assert result.null_sd == pytest.approx(expected.null_sd, rel=1e-9 if expected.precision == "float64" else 1e-3)
        assert abs(result.p_value - expected.p_value) <= (0 if expected.precision == "float64" else 0.005)
        assert [each.kernel for each in result.kernels] == [each.kernel for each in expected.kernels]
        assert (result.reference_rows, result.current_rows) == (expected.reference_rows, expected.current_rows)

    return check


def test_the_distribution_of_a_table_over_files_does_not_matter(
    pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pipelines() as (pipeline, run):
        cases: list[tuple[Precision, int, Cutting]] = [
            ("float64", 40, MANY_STRIPS),
            ("float32", 100, MANY_STRIPS),
        ]
        for precision, size, cutting in cases:
            name = f"{precision} in batches of {size}"
            monkeypatch.setattr(plan, "CUTTING", cutting)
            reference = pipeline | f"X {name}" >> beam.Create(batches(X, X_IDS, size, seed=1))
            current = pipeline | f"Y {name}" >> beam.Create(batches(Y, Y_IDS, size, seed=2))
            test = MMDTest(reference, column="embedding", id="id", precision=precision)
            expected = mmd_test(X, Y, ids=(X_IDS, Y_IDS), precision=precision)
            assert_that(current | name >> test, same(expected), label=f"same {name}")
    found = counters(run.result)
    assert (found["reference_rows"], found["current_rows"]) == (1400, 1200)
    assert found["tiles"] == 2 * (5 * 6 // 2)


def test_vectors_and_several_kernels(pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's function is sent to the workers, even a lambda."""
    monkeypatch.setattr(plan, "CUTTING", MANY_STRIPS)
    kernels = [RBF(), RowKernel(lambda x, y: (x @ y + 1.0) ** 2)]
    expected = mmd_test(X, Y, kernels, ids=(row_ids(X), row_ids(Y)), precision="float64", seed=3)
    with pipelines(_ONE_WORKER) as (pipeline, _):
        current = pipeline | beam.Create([*Y[:200], Y[200:450], Y[450:].tolist()])
        assert_that(current | MMDTest(X, kernels, precision="float64", seed=3), same(expected))


def test_keys(pipelines: Pipelines) -> None:
    """Each key has its own test; keys that only one sample has are drift, and the others are tested as before."""
    x_keys, y_keys = (
        np.where(X_IDS < 693, np.array(["de", "en"])[X_IDS % 2], "it"),
        np.where(np.arange(600) < 590, np.array(["de", "en"])[np.arange(600) % 2], "fr"),
    )
    expected = {
        key: mmd_test(X[x_keys == key], Y[y_keys == key], ids=(X_IDS[x_keys == key], Y_IDS[y_keys == key]))
        for key in ("de", "en")
    }

    def check(found: list[Any]) -> None:
        results = dict(found)
        assert len(found) == len(results) == 4
        gone, new = results.pop("it"), results.pop("fr")
        assert (gone.verdict, gone.drift, gone.reference_rows, gone.current_rows) == ("gone", True, 7, 0)
        assert (new.verdict, new.drift, new.reference_rows, new.current_rows) == ("new", True, 0, 10)
        assert str(gone) == "gone: no rows in the current sample, 7 rows in the reference"
        assert results.keys() == expected.keys()
        for key, result in results.items():
            same(expected[key])([result])

    def check_shared(found: list[Any]) -> None:
        assert {key: result.reference_rows for key, result in found} == {"de": 700, "en": 700, "fr": 700}

    def check_distances(found: list[Any]) -> None:
        reasons = {key: text for key, (_, text, _) in found}
        assert reasons.keys() == {"it", "fr"}
        assert "language='it': the current sample has no rows" in reasons["it"]
        assert "language='fr': the reference has no rows" in reasons["fr"]

    with pipelines() as (pipeline, _):
        reference = pipeline | "X" >> beam.Create(batches(X, X_IDS, 100, 1, language=x_keys))
        current = pipeline | "Y" >> beam.Create(batches(Y, Y_IDS, 50, 2, language=y_keys))
        test = MMDTest(reference, column="embedding", id="id", by="language").with_exception_handling()
        results, failures = current | test
        assert_that(results, check, label="results")
        assert_that(failures, equal_to([]), label="failures")
        distances = MMD(reference, column="embedding", id="id", by="language").with_exception_handling()
        assert_that((current | distances)[1], check_distances, label="distances")
        pairs = pipeline | "Pairs" >> beam.Create(list(zip(y_keys.tolist(), Y, strict=True)))
        assert_that(pairs | "Keyed" >> MMDTest(X, keyed=True), check_shared, label="one reference for all keys")


def test_missing_keys_of_any_type_and_window() -> None:
    """Every window lacks its own keys."""
    of_reference: list[Any] = [None, 1, "a", (1, "b"), "one"]
    rows = np.arange(20.0)[:, None]

    def check(found: list[Any]) -> None:
        by_window = {
            start: {repr(key): result.verdict for (at, key), result in found if at == start}
            for start in {at for (at, _), _ in found}
        }
        here = {repr(key): "no drift" for key in of_reference}
        assert by_window == {
            0.0: here | {"1": "gone", "'one'": "too few rows"},
            60.0: here | dict.fromkeys(["None", "1", "(1, 'b')", "'one'"], "gone") | {"'c'": "new"},
        }

    def stamped(element: Any, of: Any = beam.DoFn.WindowParam) -> Any:
        return (float(of.start), element[0]), element[1]

    with beam.Pipeline("FnApiRunner") as pipeline:
        reference = pipeline | "X" >> beam.Create([(key, rows) for key in of_reference])
        first = [(key, rows[:1] if key == "one" else rows) for key in of_reference if key != 1]
        elements = [*((0, pair) for pair in first), (60, ("a", rows)), (60, ("c", rows[:1]))]
        current = (
            pipeline
            | "Y" >> beam.Create(elements)
            | beam.MapTuple(lambda time, pair: window.TimestampedValue(pair, time))
            | beam.WindowInto(window.FixedWindows(60))
        )
        results = (
            current
            | MMDTest(reference, keyed=True)
            | beam.Map(stamped)
            | "All" >> beam.WindowInto(window.GlobalWindows())
        )
        assert_that(results, check)


def test_without_current_rows_every_key_is_gone() -> None:
    with beam.Pipeline("FnApiRunner") as pipeline:
        reference = pipeline | "X" >> beam.Create([("a", X[:50]), ("b", X[50:100])])
        results = pipeline | "Y" >> beam.Create([]) | MMDTest(reference, keyed=True)
        verdicts = results | beam.MapTuple(lambda key, result: (key, result.verdict))
        assert_that(verdicts, equal_to([("a", "gone"), ("b", "gone")]))


def test_few_rows_against_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows of the larger sample are compared as for arrays."""
    monkeypatch.setattr(plan, "CUTTING", Cutting(few_rows=0, strip_rows=1200))
    many, few = _RANDOM.normal(size=(2200, 2)), _RANDOM.normal(size=(2, 2))
    with pytest.warns(UserWarning, match="Only 2,046 of them"):
        expected = mmd_test(many, few, ids=(row_ids(many), row_ids(few)), precision="float64")
    with beam.Pipeline("FnApiRunner") as pipeline:
        assert_that(pipeline | beam.Create([few]) | MMDTest(many, precision="float64"), same(expected))


def test_windows(pipelines: Pipelines) -> None:
    """Each window has one result, at its end, against one reference; few rows are compared with some of many."""
    places = {0: slice(0, 300), 60: slice(300, 598), 120: slice(598, 600)}
    expected = {start: mmd_test(X, Y[place], ids=(row_ids(X), row_ids(Y[place]))) for start, place in places.items()}

    def stamped(result: MMDTestResult, time: Any = beam.DoFn.TimestampParam, of: Any = beam.DoFn.WindowParam) -> Any:
        assert float(of.end - time) < 0.01
        return float(of.start), result

    def check(found: list[Any]) -> None:
        assert sorted(start for start, _ in found) == [0, 60, 120]
        for start, result in found:
            same(expected[start])([result])

    rows = [(row, start + 0.07 * number) for start, place in places.items() for number, row in enumerate(Y[place])]
    with pipelines(_ONE_WORKER) as (pipeline, _):
        reference = pipeline | "X" >> beam.Create(list(X))
        current = (
            pipeline
            | "Y" >> beam.Create(rows)
            | beam.MapTuple(window.TimestampedValue)
            | beam.WindowInto(window.FixedWindows(60))
        )
        assert_that(
            current | MMDTest(reference) | beam.Map(stamped) | "Together" >> beam.WindowInto(window.GlobalWindows()),
            check,
        )


def test_references_in_files(pipelines: Pipelines, tmp_path: Path) -> None:
    for number, batch in enumerate(batches(X, X_IDS, 300, 5)):
        pq.write_table(pa.Table.from_batches([batch]), tmp_path / f"x-{number}.parquet", row_group_size=50)
    np.save(tmp_path / "x.npy", X)
    by_id = mmd_test(X, Y, RBF(2.0), ids=(X_IDS, Y_IDS), precision="float64")
    by_bytes = mmd_test(X, Y, RBF(2.0), ids=(row_ids(X), Y_IDS), precision="float64")

    def near(expected: float) -> Any:
        def check(found: list[float]) -> None:
            assert found == pytest.approx([expected], rel=1e-9)

        return check

    settings: Any = {"kernel": RBF(2.0), "column": "embedding", "id": "id", "precision": "float64"}
    with pipelines(_ONE_WORKER) as (pipeline, _):
        current = pipeline | beam.Create(batches(Y, Y_IDS, 200, 6))
        parquet, npy = tmp_path / "x-*.parquet", tmp_path / "x.npy"
        assert_that(current | "Parquet" >> MMDTest(parquet, **settings), same(by_id), label="as parquet")
        assert_that(current | "npy" >> MMDTest(npy, **settings), same(by_bytes), label="as npy")
        assert_that(current | "MMD" >> MMD(str(npy), **settings), near(by_id.mmd2), label="as MMD")


def test_pca(pipelines: Pipelines) -> None:
    """Components are fitted to both samples together."""
    pca = PCA.fit(np.concatenate([X, Y]), 2)
    projected = [pca.transform(rows, "float64") for rows in (X, Y)]
    expected = mmd_test(*projected, ids=(row_ids(X), row_ids(Y)), precision="float64")

    def check(found: list[PCA]) -> None:
        np.testing.assert_allclose(found[0].components, pca.components, atol=1e-12)

    with pipelines(_ONE_WORKER) as (pipeline, _):
        reference = pipeline | "X" >> beam.Create([X[:100], X[100:]])
        current = pipeline | "Y" >> beam.Create(list(Y))
        assert_that(current | MMDTest(reference, pca=2, precision="float64"), same(expected), label="tested")
        assert_that((reference, current) | beam.Flatten() | FitPCA(2), check, label="fitted")


def test_a_key_with_fewer_rows_than_components_does_not_fail_the_others() -> None:
    expected = mmd_test(X[:2], Y[:2], precision="float64").mmd2  # All directions of four rows keep their distances.

    def check(found: list[tuple[str, MMDTestResult]]) -> None:
        results = dict(found)
        assert {key: result.verdict for key, result in results.items()} == {"few": "too few rows", "many": "no drift"}
        assert results["few"].mmd2 == pytest.approx(expected)

    with beam.Pipeline("FnApiRunner") as pipeline:
        reference = pipeline | "X" >> beam.Create([("few", X[:2]), ("many", X[:100])])
        current = pipeline | "Y" >> beam.Create([("few", Y[:2]), ("many", Y[:100])])
        assert_that(current | MMDTest(reference, keyed=True, pca=5, precision="float64"), check)


@pytest.mark.slow
def test_through_a_job_service() -> None:
    flags = ["--runner=PortableRunner", "--job_endpoint=embed", "--environment_type=LOOPBACK"]
    with beam.Pipeline(options=PipelineOptions(flags)) as pipeline:
        reference = pipeline | "X" >> beam.Create(list(X))
        current = pipeline | "Y" >> beam.Create(list(Y))
        expected = mmd_test(X, Y, ids=(row_ids(X), row_ids(Y)))
        assert_that(current | MMDTest(reference), same(expected))
