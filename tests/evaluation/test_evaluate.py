"""Metrics equal those of scikit-learn, whatever the sharding."""

from __future__ import annotations

import itertools
import math
import pickle
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.testing.util import assert_that, equal_to
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import calibration as skcalibration
from sklearn import metrics as sk

from luminosity.errors import EvaluationError
from luminosity.evaluation import Describe, Evaluate, Evaluation, evaluate
from luminosity.evaluation.conclude import conclude
from luminosity.evaluation.settings import Settings
from luminosity.evaluation.state import EvaluationState
from tests.streams import Notes, run_stream, stream_of

CLOSE = 1e-9


def binary_table(rows: int = 4000, seed: int = 0, digits: int | None = None) -> pa.Table:
    random = np.random.default_rng(seed)
    label = random.integers(2, size=rows)
    score = random.beta(1 + 2 * label, 3 - 2 * label + 1e-9)
    other = np.clip(score + random.normal(0, 0.2, rows), 0, 1)
    if digits is not None:
        score, other = score.round(digits), other.round(digits)
    return pa.table(
        {
            "label": label,
            "prediction": (score > 0.5).astype(int),
            "score": score,
            "prediction_b": (other > 0.5).astype(int),
            "score_b": other,
            "country": random.choice(["de", "fr", None], rows),
            "plan": random.integers(3, size=rows),
        }
    )


def merged(table: pa.Table, cuts: list[int], order: list[int], arguments: dict[str, Any]) -> Evaluation:
    """Evaluate the table in parts that are merged in this order, each after a pickle."""
    config = Settings(**arguments)
    edges = [0, *sorted(cut % (table.num_rows + 1) for cut in cuts), table.num_rows]
    states: list[EvaluationState] = []
    for start, end in itertools.pairwise(edges):
        state = EvaluationState(config)
        for batch in table.slice(start, end - start).to_batches():
            state.add(batch)
        states.append(pickle.loads(pickle.dumps(state)))
    whole = EvaluationState(config)
    for at in sorted(range(len(states)), key=lambda at: order[at % len(order)] if order else 0):
        whole.merge(states[at])
    return conclude(whole)


@given(st.lists(st.integers(0, 700), max_size=6), st.lists(st.integers(0, 9), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None)
def test_sharding_changes_nothing(cuts: list[int], order: list[int]) -> None:
    table = binary_table(600).sort_by("country")
    arguments: dict[str, Any] = {
        "label": "label",
        "prediction": "prediction",
        "score": "score",
        "prediction_b": "prediction_b",
        "score_b": "score_b",
        "slices": (("country",), ("country", "plan")),
        "resamples": 60,
    }

    assert merged(table, cuts, order, arguments).as_dict() == merged(table, [], [], arguments).as_dict()


@given(st.lists(st.integers(0, 2500), max_size=6), st.lists(st.integers(0, 9), min_size=1, max_size=4))
@settings(max_examples=10, deadline=None)
def test_sharding_changes_nothing_beyond_the_limit(cuts: list[int], order: list[int]) -> None:
    table = binary_table(2400)
    arguments: dict[str, Any] = {"label": "label", "score": "score", "most_distinct": 1000, "resamples": 20}
    found = merged(table, cuts, order, arguments)

    assert found.as_dict() == merged(table, [], [], arguments).as_dict()
    assert "more than 1,000 distinct rows" in found.notes[0]
    assert found["auc"] == pytest.approx(sk.roc_auc_score(table["label"], table["score"]), abs=2e-3)


@given(st.lists(st.integers(0, 500), max_size=6), st.lists(st.integers(0, 9), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None)
def test_sharding_changes_no_texts_and_numbers(cuts: list[int], order: list[int]) -> None:
    random = np.random.default_rng(1)
    texts = pa.table({name: random.choice(["x", "a", "m", "b"], 500) for name in ("label", "prediction")})
    numbers = pa.table({name: random.normal(size=500) for name in ("label", "prediction", "second")})
    for table, more in ((texts, {}), (numbers, {"prediction_b": "second"})):
        arguments: dict[str, Any] = {"label": "label", "prediction": "prediction", "resamples": 30, **more}
        assert merged(table, cuts, order, arguments).as_dict() == merged(table, [], [], arguments).as_dict()


@pytest.mark.parametrize("digits", [None, 2])
def test_binary_metrics_equal_those_of_scikit_learn(digits: int | None) -> None:
    table = binary_table(digits=digits)
    found = evaluate(table, "label", "prediction", score="score", resamples=0)
    label, prediction, score = (table[name].to_numpy() for name in ("label", "prediction", "score"))

    expected = {
        "accuracy": sk.accuracy_score(label, prediction),
        "balanced_accuracy": sk.balanced_accuracy_score(label, prediction),
        "precision": sk.precision_score(label, prediction),
        "recall": sk.recall_score(label, prediction),
        "f1": sk.f1_score(label, prediction),
        "kappa": sk.cohen_kappa_score(label, prediction),
        "auc": sk.roc_auc_score(label, score),
        "average_precision": sk.average_precision_score(label, score),
        "brier": sk.brier_score_loss(label, score),
        "log_loss": sk.log_loss(label, score),
    }
    for average in ("macro", "weighted"):
        for name in ("precision", "recall", "f1"):
            expected[f"{name}_{average}"] = getattr(sk, f"{name}_score")(label, prediction, average=average)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=CLOSE), name
    assert set(expected) | {"ece"} == set(found.metrics)
    assert found.confusion is not None
    assert found.confusion.counts == sk.confusion_matrix(label, prediction).tolist()
    shares, means = skcalibration.calibration_curve(label, score, n_bins=10)
    bins = [each for each in found.calibration if each.rows]
    assert [each.share for each in bins] == pytest.approx(shares, abs=CLOSE)
    assert [each.mean_score for each in bins] == pytest.approx(means, abs=CLOSE)
    ece = sum(each.rows * abs(each.mean_score - each.share) for each in bins if each.share is not None) / len(label)  # type: ignore[operator]
    assert found["ece"] == pytest.approx(ece, abs=CLOSE)


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from("abce"), st.sampled_from("xy")),
        min_size=1,
        max_size=40,
    )
)
@settings(max_examples=12, deadline=None)
@pytest.mark.filterwarnings("ignore")
def test_class_metrics_and_slices_equal_those_of_scikit_learn(rows: list[tuple[str, str, str]]) -> None:
    label, prediction, by = map(list, zip(*rows, strict=True))
    table = pa.table({"label": label, "prediction": prediction, "by": by})
    whole = evaluate(table, "label", "prediction", slices=["by"], resamples=0)
    parts = [(whole, range(len(rows)))]
    parts += [(each, [at for at in range(len(rows)) if by[at] == key]) for key, each in whole.slices["by"].items()]

    assert sorted(set(by)) == list(whole.slices["by"])
    for found, places in parts:
        true, guess = [label[at] for at in places], [prediction[at] for at in places]
        assert found.rows == len(true)
        for average in ("macro", "weighted"):
            for name in ("precision", "recall", "f1"):
                value = getattr(sk, f"{name}_score")(true, guess, average=average, zero_division=0)
                assert found[f"{name}_{average}"] == pytest.approx(value, abs=CLOSE)
        assert found["accuracy"] == pytest.approx(sk.accuracy_score(true, guess), abs=CLOSE)
        assert found["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(true, guess), abs=CLOSE)
        assert found.confusion is not None
        assert found.confusion.counts == sk.confusion_matrix(true, guess).tolist()
        report = sk.classification_report(true, guess, output_dict=True, zero_division=0)
        for each in found.classes:
            assert (each.precision.value or 0) == pytest.approx(report[each.label]["precision"], abs=CLOSE)
            assert (each.recall.value or 0) == pytest.approx(report[each.label]["recall"], abs=CLOSE)
            assert each.rows == report[each.label]["support"]
            assert (each.precision.value is None) == (each.predicted == 0)


@given(
    st.lists(
        st.tuples(st.floats(-1e6, 1e6, allow_subnormal=False), st.floats(-1e6, 1e6, allow_subnormal=False)),
        min_size=2,
        max_size=50,
    )
)
@settings(max_examples=60, deadline=None)
def test_errors_of_numbers_equal_those_of_scikit_learn(rows: list[tuple[float, float]]) -> None:
    label, prediction = (np.array(each) for each in zip(*rows, strict=True))
    found = evaluate({"label": label, "prediction": prediction}, "label", "prediction", resamples=0)

    assert found["mae"] == pytest.approx(sk.mean_absolute_error(label, prediction), rel=CLOSE, abs=CLOSE)
    assert found["rmse"] == pytest.approx(sk.root_mean_squared_error(label, prediction), rel=CLOSE, abs=CLOSE)
    assert found["mean_error"] == pytest.approx((prediction - label).mean(), rel=1e-6, abs=1e-9)
    error = prediction - label
    for share in (5, 25, 50, 75, 95):
        assert found[f"error_q{share:02}"] == pytest.approx(np.quantile(error, share / 100), rel=1e-9, abs=1e-9)
    assert found["absolute_error_q50"] == pytest.approx(
        sk.median_absolute_error(label, prediction), rel=CLOSE, abs=CLOSE
    )
    spread = ((label - label.mean()) ** 2).sum()
    if spread > 1e-3:
        assert found["r2"] == pytest.approx(sk.r2_score(label, prediction), rel=1e-6, abs=1e-9)


@given(st.integers(0, 10_000), st.sampled_from([None, 0, 1]))
@settings(max_examples=30, deadline=None)
def test_rankings_equal_those_of_scikit_learn(seed: int, digits: int | None) -> None:
    random = np.random.default_rng(seed)
    queries = [int(random.integers(2, 12)) for _ in range(6)]
    query = np.repeat(np.arange(6), queries)
    relevance = random.integers(0, 4, len(query))
    score = random.normal(size=len(query))
    score = score if digits is None else score.round(digits)
    order = random.permutation(len(query))
    table = pa.table({"query": query[order], "relevance": relevance[order], "score": score[order]})
    found = evaluate(table, "relevance", "score", query="query", k=(1, 3))

    for name, k in (("ndcg", None), ("ndcg@1", 1), ("ndcg@3", 3)):
        each = [sk.ndcg_score([relevance[query == q]], [score[query == q]], k=k) for q in range(6)]
        assert found[name] == pytest.approx(np.mean(each), abs=CLOSE)
    recalls: list[float] = []
    for q in range(6):
        relevant, own = relevance[query == q] > 0, score[query == q]
        if relevant.any() and digits is None:
            recalls.append(relevant[np.argsort(-own)[:3]].sum() / relevant.sum())
    if recalls:
        assert found["recall@3"] == pytest.approx(np.mean(recalls), abs=CLOSE)
    assert found.rows == 6


def test_equal_scores_of_a_ranking_have_no_order() -> None:
    table = {"q": ["a"] * 4, "relevance": [1, 0, 0, 0], "score": [0.5] * 4}
    assert evaluate(table, "relevance", "score", query="q", k=[1, 2])["recall@2"] == 0.5


def test_intervals_cover_the_truth() -> None:
    """Of 40 tables, a 90% interval of each metric holds the true value about 36 times: 30 are too few by chance."""
    random = np.random.default_rng(0)
    truth = {"accuracy": 0.8, "mae": math.sqrt(2 / math.pi), "rmse": 1.0}
    covered = dict.fromkeys([*truth, "auc"], 0)
    truth["auc"] = NormalDist().cdf(1 / math.sqrt(2))
    for _ in range(40):
        label = random.integers(2, size=400)
        table = {
            "label": label,
            "prediction": np.where(random.random(400) < 0.8, label, 1 - label),
            "score": random.normal(label),
        }
        classes = evaluate(table, "label", "prediction", score="score", confidence=0.9, resamples=100)
        values = random.normal(0, 3, 4000)
        numbers = evaluate(
            {"y": values, "p": values + random.normal(size=4000)}, "y", "p", confidence=0.9, resamples=100
        )
        for name, value in truth.items():
            metric = (classes if name in classes.metrics else numbers).metrics[name]
            assert metric.low is not None
            assert metric.high is not None
            covered[name] += metric.low <= value <= metric.high
    assert min(covered.values()) >= 30, covered


def test_two_models_are_compared_on_the_same_rows() -> None:
    """The models nearly agree: the interval of their difference is much narrower than those of both."""
    table = binary_table(3000)
    found = evaluate(table, "label", "prediction", score="score", prediction_b="prediction_b", score_b="score_b")
    second = evaluate(table, "label", "prediction_b", score="score_b")

    assert list(found.metrics_b) == list(second.metrics)
    for name, metric in second.metrics.items():
        assert found.metrics_b[name].value == pytest.approx(metric.value, abs=1e-12)
    for name in ("accuracy", "f1", "auc", "brier"):
        difference = found.differences[name]
        assert difference.value == pytest.approx(second[name] - found[name], abs=1e-12)
        assert difference.low is not None
        assert difference.high is not None
        assert difference.low < difference.value < difference.high < 0 or name == "brier"
    same = evaluate(table, "label", "prediction", prediction_b="prediction")
    assert (same.differences["accuracy"].low, same.differences["accuracy"].high) == (0, 0)


def test_a_perfect_share_of_few_rows_has_an_interval() -> None:
    found = evaluate({"label": ["a"] * 5 + ["b"] * 5, "prediction": ["a"] * 5 + ["b"] * 5}, "label", "prediction")
    metric = found.metrics["accuracy"]
    assert metric.value == 1
    assert metric.low == pytest.approx(0.7225, abs=1e-3)


def test_a_replicate_without_a_class_leaves_it_out() -> None:
    """Of three rows, many replicates have none of a class, and some have no rows at all."""
    found = evaluate({"y": ["a", "b", "c"], "p": ["a", "b", "c"]}, "y", "p")
    for name in ("precision_macro", "recall_macro", "f1_macro"):
        assert (found.metrics[name].value, found.metrics[name].low, found.metrics[name].high) == (1, 1, 1)


def test_labels_of_one_class() -> None:
    found = evaluate({"y": ["a"] * 3, "p": ["a", "a", "b"], "s": [0.1, 0.2, 0.3]}, "y", "p", score="s")
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found.metrics["recall"].reason == "no row has the label 'b'"
    assert found.metrics["auc"].reason == "no label is 'b'"
    assert found.confusion is not None
    assert found.confusion.counts == [[2, 1], [0, 0]]


@pytest.mark.parametrize("second", [{}, {"prediction_b": "b"}])
def test_an_empty_table_defines_nothing(second: dict[str, Any]) -> None:
    columns = {name: pa.array([], pa.int64()) for name in ("y", "p", "b", "by")}
    for table in (pa.table(columns), pa.table(columns).to_batches(), []):
        found = evaluate(table, "y", "p", slices=["by"], **second)
        assert (found.rows, found.slices["by"], str(found)) == (0, {}, "accuracy not defined (no rows)")


NOT_DEFINED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"y": [1, 1], "p": [1, 0], "s": [0.5, 0.4]}, {"score": "s"}, "auc", "all labels are 1"),
    ({"y": [0, 0], "p": [1, 0], "s": [0.5, 0.4]}, {"score": "s"}, "average_precision", "no label is 1"),
    ({"y": [0, 0], "p": [0, 0], "s": [0.5, 0.4]}, {"score": "s"}, "auc", "no label is 1"),
    ({"y": [0, 1], "p": [0, 0]}, {}, "precision", "1 is never predicted"),
    ({"y": [0, 0], "p": [0, 1]}, {}, "recall", "no row has the label 1"),
    ({"y": [0, 1], "p": [0, 1], "s": [-3.0, 7.5]}, {"score": "s"}, "ece", "outside 0 to 1: from -3 to 7.5"),
    ({"y": ["a", "b", "c"], "p": ["a", "b", "c"], "s": [0.1, 0.2, 0.3]}, {"score": "s"}, "auc", "there are 3 classes"),
    ({"y": ["a"], "p": ["a"], "s": [0.1]}, {"score": "s"}, "auc", "only the class 'a'"),
    ({"y": [2.0, 2.0], "p": [1.0, 2.5]}, {}, "r2", "all labels are equal"),
    ({"y": [2.5], "p": [1.0]}, {}, "r2", "there is one row"),
    ({"y": [0, 0], "p": [0.5, 0.1], "q": [1, 1]}, {"query": "q"}, "recall@1", "no query has relevant rows"),
    ({"y": pa.array([], pa.int64()), "p": pa.array([], pa.int64())}, {}, "accuracy", "no rows"),
    ({"y": [None, None], "p": [1, 0]}, {"skip_missing": True}, "accuracy", "all rows have missing values"),
]


@pytest.mark.parametrize(("table", "arguments", "name", "reason"), NOT_DEFINED)
def test_what_is_not_defined_says_why(table: dict[str, Any], arguments: dict[str, Any], name: str, reason: str) -> None:
    found = evaluate(table, "y", "p", **arguments)
    metric = found.metric(name)

    assert metric.value is None
    assert reason in metric.reason
    assert "nan" not in str(found.as_dict()).lower()
    with pytest.raises(EvaluationError, match="is not defined"):
        found[name]


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    ({"label": [1], "p": [1]}, {}, "found no column 'y', expected one of label, p"),
    (
        {"y": [1, None], "p": [1, 0]},
        {},
        "'y' has 1 missing or infinite values in 2 rows, expected none; pass skip",
    ),
    ({"y": [1.5, 2.0], "p": [1, math.nan]}, {}, "column 'p' has 1 missing or infinite values"),
    (
        {"y": [1, 0], "p": ["1", "0"]},
        {},
        "'p' holds string, but the column 'y' holds int64, expected the same",
    ),
    ({"y": [[1]], "p": [1]}, {}, "holds list<item: int64>, expected texts, numbers"),
    ({"y": [1, 0], "p": [1, 0], "s": ["a", "b"]}, {"score": "s"}, "the column 's' holds string, expected numbers"),
    ({"y": [1, 0], "p": [1, 0]}, {"bins": 0}, "found bins=0"),
    ({"y": [1, 0], "p": [1, 0]}, {"task": "x"}, "found task='x'"),
    ({"y": [1, 0], "p": [1, 0]}, {"slices": "y"}, r"pass slices=\['y'\]"),
    ({"y": [1, 0], "p": [1, 0]}, {"nonsense": 1}, "nonsense"),
    ({"y": [-1, 0], "p": [1, 0], "q": [1, 1]}, {"query": "q"}, "has the relevance -1, expected 0 or more"),
    ([{"y": 1, "p": 1}, {"y": "a", "p": 1}], {}, "values of different types"),
    ([1, 2], {}, "found an element of type int, expected a pyarrow.RecordBatch"),
    ([{"y": 1, "q": 1}], {}, "found no column 'p', expected one of y, q"),
    ([{"y": 1}, {"p": 1}], {}, "has 1 missing or infinite values in 2 rows"),
    ({"y": [1], "p": [1]}, {"slices": ["plam"]}, "found no column 'plam', expected one of y, p"),
    ({"y": [1], "p": [1], "plan": ["a"]}, {"slices": ["plam"]}, "did you mean 'plan'"),
    ({"y": [1, 0], "p": [1, 0], "s": [math.nan, 0.5]}, {"score": "s"}, "'s' has 1 missing or infinite values in 2"),
    ({"y": [1, 0], "p": [1, 0], "b": [None, 1]}, {"prediction_b": "b"}, "'b' has 1 missing or infinite values in 2"),
    ({"y": np.arange(10_001), "p": np.arange(10_001)}, {}, "more than 10,000 classes"),
    ({"y": [1] * 10_001, "p": [1] * 10_001, "c": np.arange(10_001)}, {"slices": ["c"]}, "more than 10,000 slices"),
]


@pytest.mark.parametrize(("table", "arguments", "message"), WRONG)
def test_errors_say_what_was_found(table: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        evaluate(table, "y", "p", **arguments)


def test_missing_rows_are_skipped_and_counted() -> None:
    table = {"y": [1, None, 0, 1], "p": [1, 1, 0, None], "s": [0.9, 0.1, math.nan, 0.3]}
    found = evaluate(table, "y", "p", score="s", skip_missing=True)
    assert (found.rows, found.skipped, found["accuracy"]) == (1, 3, 1)


def test_booleans_dictionaries_and_whole_floats_are_classes() -> None:
    for label, prediction in (
        ([True, False], [1, 0]),
        (pa.array(["a", "b"]).dictionary_encode(), pa.array(["a", "b"], pa.large_string())),
        ([1, 0], pa.array([1.0, 0.0], pa.float32())),
    ):
        found = evaluate({"y": label, "p": prediction}, "y", "p", task="classes")
        assert found["accuracy"] == 1
        assert len(found.classes) == 2
    assert evaluate({"y": [True, False], "p": [1, 0]}, "y", "p").positive == 1


def test_the_score_of_the_prediction() -> None:
    table = {"y": ["neg", "pos", "pos"], "p": ["neg", "pos", "neg"], "s": [0.9, 0.8, 0.6]}
    found = evaluate(table, "y", "p", score="s", score_of="prediction")
    assert found["auc"] == sk.roc_auc_score([0, 1, 1], [0.1, 0.8, 0.4])
    three = {"y": ["a", "b", "c"], "p": ["a", "b", "a"], "s": [0.9, 0.8, 0.6]}
    assert evaluate(three, "y", "p", score="s", score_of="prediction")["auc"] == 1
    assert evaluate(three, "y", "p", score="s", positive="a")["auc"] == 1


class Row(NamedTuple):
    y: str
    p: str
    by: str


def test_rows_of_any_kind() -> None:
    rows = [("a", "a", "x"), ("b", "a", "x"), ("b", "b", "z")]
    kinds = (Row, lambda *values: beam.Row(**dict(zip(["y", "p", "by"], values, strict=True))))
    tables = [[make(*row) for row in rows] for make in kinds]
    tables.append([dict(zip(("y", "p", "by"), row, strict=True)) for row in rows])
    for table in tables:
        found = evaluate(table, "y", "p", slices=["by"])
        assert (found.rows, found["accuracy"]) == (3, pytest.approx(2 / 3))
        assert {key: each["accuracy"] for key, each in found.slices["by"].items()} == {"x": 0.5, "z": 1}


def test_a_pipeline_gives_the_same_for_each_window() -> None:
    table = binary_table(600)
    whole = evaluate(table, "label", "prediction", score="score", slices=["plan"])
    ranking = pa.table({"q": np.arange(600) % 50, "label": table["plan"], "score": table["score"]})
    ranked = evaluate(ranking, "label", "score", query="q")
    windows = [evaluate(part, "label", "prediction") for part in (table.slice(0, 300), table.slice(300))]

    def are(*expected: Evaluation) -> Any:
        def check(found: list[Evaluation]) -> None:
            in_order = sorted(found, key=lambda each: each["accuracy"]) if len(found) > 1 else found
            assert [each.as_dict() for each in in_order] == [each.as_dict() for each in expected]

        return check

    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        batches = pipeline | beam.Create(table.to_batches(max_chunksize=70), reshuffle=False)
        found = batches | "Whole" >> Evaluate("label", "prediction", score="score", slices=["plan"])
        assert_that(found, are(whole), label="Whole table")
        timed = [beam.window.TimestampedValue(row, 10 * (at // 300)) for at, row in enumerate(table.to_pylist())]
        rows = pipeline | "Rows" >> beam.Create(timed) | beam.Map(lambda each: each)
        found = rows | beam.WindowInto(beam.window.FixedWindows(10)) | "Windows" >> Evaluate("label", "prediction")
        assert_that(found, are(*sorted(windows, key=lambda each: each["accuracy"])), label="Each window")
        queries = pipeline | "Queries" >> beam.Create(ranking.to_batches(max_chunksize=90), reshuffle=False)
        assert_that(queries | "Ranking" >> Evaluate("label", "score", query="q"), are(ranked), label="Queries ranked")
        nothing = pipeline | "Nothing" >> beam.Create([]) | "Empty" >> Evaluate("label", "prediction")
        undefined = {"accuracy": {"value": None, "reason": "no rows"}}
        expected = {"task": None, "rows": 0, "skipped": 0, "metrics": undefined}
        assert_that(nothing | beam.Map(Evaluation.as_dict), equal_to([expected]), label="Nothing defined")


def test_a_stream_has_a_result_for_each_window(tmp_path: Path) -> None:
    """Of an unbounded input, a window's result comes when the watermark passes its end; late rows are dropped."""

    def row(label: str, prediction: str, number: float) -> dict[str, Any]:
        return {"y": label, "p": prediction, "n": number}

    stream = stream_of(
        [(row("a", "a", 1.0), 1), (row("b", "a", 3.0), 2)],
        10,
        [(row("a", "b", 9.0), 3), (row("a", "a", 5.0), 11)],  # the first one is late
        30,
        [(row("a", "b", 8.0), 31)],
    )

    evaluated, described = Notes(tmp_path / "evaluated"), Notes(tmp_path / "described")

    def build(pipeline: beam.Pipeline) -> None:
        rows = pipeline | stream | beam.WindowInto(beam.window.FixedWindows(10))
        found = rows | Evaluate("y", "p", resamples=0)
        _ = found | "Evaluated" >> evaluated.step(lambda each: [each.rows, each["accuracy"]])
        found = rows | Describe(["n"], reference={"n": [1.0, 3.0]})
        _ = found | "Described" >> described.step(lambda each: [each["n"].mean, each.changes[0].distance])

    run_stream(build)
    assert evaluated.read() == [[2, 0.5], [1, 1.0], [1, 0.0]]
    assert described.read() == [[2.0, 0.0], [5.0, 1.0], [8.0, 1.0]]


@pytest.mark.filterwarnings("error")
def test_errors_too_large_for_a_number_are_not_defined() -> None:
    found = evaluate({"y": [1e308, -1e308, 1.5], "p": [-1e308, 1e308, 1.5]}, "y", "p")
    assert {name: each.reason for name, each in found.metrics.items() if each.value is None} == dict.fromkeys(
        found.metrics, "it is too large for a number of 64 bits"
    )
    found = evaluate({"y": [1e200, 2e200, 1.5], "p": [1e200, 1e200, 1.5]}, "y", "p")
    assert found["mae"] == pytest.approx(1e200 / 3)
    assert {found.metrics[name].reason for name in ("rmse", "r2")} == {"it is too large for a number of 64 bits"}
    tiny = evaluate({"y": [5e-324, 1e-320], "p": [0.0, 0.0]}, "y", "p")
    assert tiny.metrics["r2"].reason == "the labels differ by too little"
