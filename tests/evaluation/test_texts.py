"""Metrics of texts: values worked out by hand, the same for any sharding, and two models row by row."""

from __future__ import annotations

import math
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.testing.util import assert_that, equal_to
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from luminosity import extras
from luminosity.errors import EvaluationError, MissingExtra
from luminosity.evaluation import Evaluate, Evaluation, Outcomes, evaluate
from luminosity.evaluation.settings import Settings
from luminosity.evaluation.texts import TEXT_METRICS, normalised
from tests.evaluation.test_evaluate import merged

WORDS = ["the", "film", "The", "film.", "is", "good", "not", "3.5", "dog's", "a"]


def of_one(expected: str, found: str) -> dict[str, float | None]:
    result = evaluate({"e": [expected], "f": [found]}, "e", "f", task="texts", resamples=0)
    return {name: metric.value for name, metric in result.metrics.items()}


@pytest.mark.parametrize(
    ("expected", "found", "values"),
    [
        # 5 of 6 words, also in order; 3 of 5 pairs; 19 of 22 characters in order, twice, of 44.
        ("the cat sat on the mat", "the cat lay on the mat", (0, 0, 40 / 44, 5 / 6, 3 / 5, 5 / 6)),
        # The examples of Lin (2004), who made ROUGE: the same pairs of words, but another order.
        ("police killed the gunman", "police kill the gunman", (0, 0, 44 / 46, 3 / 4, 1 / 3, 3 / 4)),
        ("police killed the gunman", "the gunman kill police", (0, 0, None, 3 / 4, 1 / 3, 2 / 4)),
        # A word that is said twice is found once: 2 * 1 / (1 + 2).
        ("yes", "Yes, yes!", (0, 0, 2 * 3 / 12, 2 / 3, None, 2 / 3)),
        ("Yes.", "yes", (0, 1, 2 * 2 / 7, 1, None, 1)),
        ("", "", (1, 1, 1, None, None, None)),
        ("two words", "", (0, 0, 0, 0, 0, 0)),
    ],
)
def test_metrics_equal_values_worked_out_by_hand(expected: str, found: str, values: tuple[float | None, ...]) -> None:
    got = of_one(expected, found)
    assert list(got) == list(TEXT_METRICS)
    for name, value in zip(TEXT_METRICS, values, strict=True):
        if not (name == "similarity" and value is None):
            assert got[name] == (None if value is None else pytest.approx(value)), name


def _longest(first: list[str], second: list[str]) -> int:
    if not first or not second:
        return 0
    if first[-1] == second[-1]:
        return 1 + _longest(first[:-1], second[:-1])
    return max(_longest(first[:-1], second), _longest(first, second[:-1]))


@given(st.lists(st.sampled_from(WORDS), max_size=6), st.lists(st.sampled_from(WORDS), max_size=6))
@settings(max_examples=40, deadline=None)
def test_rouge_l_and_similarity_equal_their_definitions(expected: list[str], found: list[str]) -> None:
    one, other = " ".join(expected), " ".join(found)
    got, words, others = of_one(one, other), normalised(one).split(), normalised(other).split()
    if not words:
        assert got["rougeL"] is None
        return
    assert got["rougeL"] == pytest.approx(2 * _longest(words, others) / (len(words) + len(others)))
    if len(one) + len(other) < 24:
        assert got["similarity"] == pytest.approx(2 * _longest([*one], [*other]) / (len(one) + len(other)))
    assert (got["normalised_match"] == 1) == (words == others)
    assert (got["exact_match"] == 1) == (one == other)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("The\u00a0  END\n", "the end"),
        ("don't, don\u2019t", "dont dont"),
        ("well-known (so they say): yes/no", "well known so they say yes no"),
        ("-5, 3.5 and 1,000 at 12:30 on 1/2", "-5 3.5 and 1,000 at 12:30 on 1/2"),
        ("5% of $5 + 5", "5% of $5 + 5"),
        ("STRASSE straße \ufb01lm Été", "strasse strasse film été"),
        ("¡Sí! «oui» 。", "sí oui"),
        ("...", ""),
    ],
)
def test_what_normalising_changes(text: str, plain: str) -> None:
    assert normalised(text) == plain
    assert normalised(plain) == plain


def table_of_texts(rows: int, seed: int = 0) -> pa.Table:
    random = np.random.default_rng(seed)

    def texts() -> list[str]:
        return [" ".join(random.choice(WORDS, random.integers(0, 6))) for _ in range(rows)]

    numbers = [None if each < -1 else float(each) for each in random.normal(size=rows)]
    return pa.table(
        {
            "expected": texts(),
            "first": texts(),
            "second": texts(),
            "judge": numbers,
            "judge_b": numbers[::-1],
            "preference": [None if each < 0 else each - 1 for each in random.integers(-1, 3, rows).tolist()],
            "by": random.choice(["x", "y", "z"], rows),
        }
    )


EVERYTHING: dict[str, Any] = {
    "label": "expected",
    "prediction": "first",
    "prediction_b": "second",
    "task": "texts",
    "measures": ("judge",),
    "measures_b": ("judge_b",),
    "preference": "preference",
    "slices": (("by",),),
    "resamples": 40,
}


@given(st.lists(st.integers(0, 300), max_size=6), st.lists(st.integers(0, 9), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None)
def test_sharding_changes_nothing(cuts: list[int], order: list[int]) -> None:
    table = table_of_texts(300).sort_by("by")
    assert merged(table, cuts, order, EVERYTHING).as_dict() == merged(table, [], [], EVERYTHING).as_dict()


@given(st.lists(st.integers(0, 2500), max_size=5), st.lists(st.integers(0, 9), min_size=1, max_size=4))
@settings(max_examples=3, deadline=None, phases=[Phase.generate])
def test_sharding_changes_nothing_beyond_the_limit(cuts: list[int], order: list[int]) -> None:
    table = table_of_texts(2400)
    arguments = {**EVERYTHING, "most_distinct": 1000, "slices": ()}
    found, exact = merged(table, cuts, order, arguments), merged(table, [], [], {**EVERYTHING, "slices": ()})

    assert found.as_dict() == merged(table, [], [], arguments).as_dict()
    assert "more than 1,000 distinct rows" in found.notes[0]
    assert found.notes[1:] == exact.notes
    for name, metric in exact.metrics.items():
        assert found[name] == pytest.approx(metric.value, abs=0.05)


@given(st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_means_outcomes_and_slices_equal_those_of_the_rows(seed: int) -> None:
    table = table_of_texts(30, seed)
    rows = table.to_pylist()
    found = evaluate(table, **{**EVERYTHING, "slices": ["by"], "resamples": 0})
    parts = [(found, rows)] + [
        (each, [row for row in rows if row["by"] == key]) for key, each in found.slices["by"].items()
    ]
    for result, mine in parts:
        first, second = ([of_one(row["expected"], row[name]) for row in mine] for name in ("first", "second"))
        for name in TEXT_METRICS:
            _check(result, name, [each[name] for each in first], [each[name] for each in second])
        _check(result, "judge", [row["judge"] for row in mine], [row["judge_b"] for row in mine])
        preferred = [row["preference"] for row in mine if row["preference"] is not None]
        outcomes = result.outcomes["preference"]
        assert (outcomes.wins, outcomes.ties, outcomes.losses) == tuple(preferred.count(each) for each in (1, 0, -1))


def _check(result: Evaluation, name: str, first: list[float | None], second: list[float | None]) -> None:
    there = [each for each in first if each is not None]
    if not there:
        assert result.metrics[name].value is None
        return
    assert result[name] == pytest.approx(np.mean(there))
    apart = [b - a for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    outcomes = result.outcomes[name]
    assert (outcomes.wins, outcomes.ties, outcomes.losses) == (
        sum(each > 0 for each in apart),
        sum(each == 0 for each in apart),
        sum(each < 0 for each in apart),
    )
    if apart:
        assert outcomes.win_rate.value == pytest.approx(np.mean([(np.sign(each) + 1) / 2 for each in apart]))


def test_the_difference_of_two_models_is_of_the_same_rows() -> None:
    """Both answer hard questions badly: the interval of the difference is much narrower than theirs."""
    random = np.random.default_rng(0)
    quality = random.normal(size=1000)
    noise = random.normal(0.02, 0.05, 1000)
    texts = ["x"] * 1000
    arguments: dict[str, Any] = {"prediction_b": "t", "task": "texts", "measures": ["a"], "measures_b": ["b"]}
    found = evaluate({"t": texts, "a": quality, "b": quality + noise}, "t", "t", **arguments)

    difference, first = found.differences["a"], found.metrics["a"]
    assert difference.low is not None
    assert difference.high is not None
    assert first.low is not None
    assert first.high is not None
    assert 0 < difference.low < noise.mean() < difference.high
    assert difference.high - difference.low == pytest.approx(2 * 1.96 * noise.std() / math.sqrt(1000), rel=0.2)
    assert first.high - first.low == pytest.approx(2 * 1.96 * quality.std() / math.sqrt(1000), rel=0.2)
    same = found.differences["exact_match"]
    assert (same.value, same.low, same.high) == (0, 0, 0)
    assert found.outcomes["exact_match"].ties == 1000


def test_shares_of_few_rows_have_an_interval() -> None:
    found = evaluate({"e": ["a"] * 10, "f": ["a"] * 10, "g": ["b"] * 10}, "e", "f", prediction_b="g", task="texts")
    assert found.metrics["exact_match"].low == pytest.approx(0.7225, abs=1e-3)  # Wilson's
    assert found.metrics_b["normalised_match"].high == pytest.approx(0.2775, abs=1e-3)
    outcomes = found.outcomes["exact_match"]
    assert outcomes == Outcomes(0, 0, 10, outcomes.win_rate)
    assert outcomes.win_rate.high == pytest.approx(0.2775, abs=1e-3)


def test_what_a_mean_leaves_out_is_told() -> None:
    found = evaluate(
        {"e": ["one", "two words", ""], "f": ["one", "two", "x"], "judge": [None, 4, math.nan]},
        *("e", "f"),
        task="texts",
        measures=["judge"],
    )
    assert found["judge"] == 4
    assert list(found.notes) == [
        "2 of 3 rows have no number in 'judge', and its mean leaves them out",
        "1 of 3 expected texts have no words: rouge1 and rougeL leave them out",
        "2 of 3 expected texts have fewer than two words: rouge2 leaves them out",
    ]
    nothing = evaluate({"e": ["one"], "f": ["one"], "judge": [None]}, "e", "f", task="texts", measures=["judge"])
    assert nothing.metrics["judge"].reason == "no row has a number"
    assert nothing.metrics["rouge2"].reason == "no expected text has enough words"


def test_missing_texts_are_an_error_or_skipped() -> None:
    table = {"e": ["a", None, "c"], "f": ["a", "b", None]}
    with pytest.raises(EvaluationError, match="'e' has 1 missing or infinite values in 3 rows"):
        evaluate(table, "e", "f", task="texts")
    found = evaluate(table, "e", "f", task="texts", skip_missing=True)
    assert (found.rows, found.skipped, found["exact_match"]) == (1, 2, 1)
    empty = evaluate({"e": pa.array([], pa.string()), "f": pa.array([], pa.string())}, "e", "f", task="texts")
    assert {each.reason for each in empty.metrics.values()} == {"no rows"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"measures": ["m"]}, "found measures=.* without task='texts'"),
        ({"task": "texts", "score": "m"}, "expected a prediction, and no score"),
        ({"task": "texts", "measures_b": ["m"]}, "found measures_b or preference without prediction_b"),
        ({"task": "texts", "preference": "m"}, "found measures_b or preference without prediction_b"),
        ({"task": "texts", "measures": ["m"], "prediction_b": "f"}, "found 0 measures_b for 1 measures, expected 1"),
        ({"task": "texts", "measures": ["rouge1"]}, "expected at most 16 different columns, none of which is called"),
        ({"task": "texts", "measures": "m"}, "found measures='m', expected a list"),
        ({"task": "text"}, "expected one of classes, numbers, ranking, texts"),
    ],
)
def test_settings_that_contradict_each_other(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        evaluate({"e": ["a"], "f": ["a"], "m": [1]}, "e", "f", **arguments)


def test_numbers_are_no_texts() -> None:
    with pytest.raises(EvaluationError, match="the column 'f' holds int64, expected texts"):
        evaluate({"e": ["a"], "f": [1]}, "e", "f", task="texts")


def test_without_rapidfuzz_the_settings_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str, extra: str) -> None:
        raise MissingExtra(f"{module} is not installed", fix=extras.install_command(extra), name=module)

    monkeypatch.setattr(extras, "check", missing)
    with pytest.raises(MissingExtra, match="rapidfuzz is not installed"):
        Settings("e", "f", task="texts")


def test_texts_in_a_pipeline() -> None:
    rows = [{"e": "Yes.", "f": "yes"}, {"e": "no", "f": "maybe"}]
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        found = pipeline | beam.Create(rows) | Evaluate("e", "f", task="texts", resamples=0)
        values = found | beam.Map(lambda result: (result["exact_match"], result["normalised_match"]))
        assert_that(values, equal_to([(0.0, 0.5)]))


def test_kappa_equals_a_value_worked_out_by_hand() -> None:
    """70 of 100 agree; by chance it would be 0.5 * 0.6 + 0.5 * 0.4, a half."""
    table = {"y": ["a"] * 50 + ["b"] * 50, "p": ["a"] * 40 + ["b"] * 10 + ["a"] * 20 + ["b"] * 30}
    found = evaluate(table, "y", "p")
    kappa = found.metrics["kappa"]
    assert kappa.value == pytest.approx(0.4)
    assert kappa.low is not None
    assert kappa.high is not None
    assert kappa.low < 0.3 < 0.5 < kappa.high
    assert "kappa_quadratic" not in found.metrics
    alike = evaluate({"y": ["a"], "p": ["a"]}, "y", "p")
    assert alike.metrics["kappa"].reason == "labels and predictions are all of one class"


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=2, max_size=60))
@settings(max_examples=40, deadline=None)
@pytest.mark.filterwarnings("ignore")
def test_kappas_equal_those_of_scikit_learn(rows: list[tuple[int, int]]) -> None:
    label, prediction = zip(*rows, strict=True)
    found = evaluate({"y": label, "p": prediction}, "y", "p", resamples=0, task="classes")
    expected = sk.cohen_kappa_score(label, prediction)
    assert (found.metrics["kappa"].value is None) == math.isnan(expected)
    if not math.isnan(expected):
        assert found["kappa"] == pytest.approx(expected, abs=1e-9)
    if len(set(label) | set(prediction)) > 2:
        weighted = sk.cohen_kappa_score(label, prediction, labels=[1, 2, 3, 4, 5], weights="quadratic")
        assert found["kappa_quadratic"] == pytest.approx(weighted, abs=1e-9)
