"""Scores of texts by an embedding model and a judge, and what Evaluate makes of them."""

from __future__ import annotations

import json
import re
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest

from luminosity import Handler, HttpModelHandler
from luminosity.errors import InvalidArgument, InvalidType
from luminosity.evaluation import Evaluate, Evaluation, evaluate
from luminosity.judging import Judge, ScoreTexts
from tests.inference.handlers.model_server import Said, Seen, serving

ANSWERS = {
    "question": ["Who wrote it?", "When?", "Where?", "Why?"],
    "expected": ["Ann Lee", "1999", "in Rome", "for money"],
    "short": ["Ann", "1999", "Rome", "BROKEN"],
    "long": ["It was Ann Lee.", "1998 I think", "in Rome", "for money, of course"],
}
_collected: list[Any] = []  # of the runner in this process


def collect(element: Any) -> None:
    _collected.append(element)


def run(steps: Any, table: Any = None) -> list[Any]:
    _collected.clear()
    batches = pa.table(ANSWERS if table is None else table).to_batches(max_chunksize=3)
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        _ = pipeline | beam.Create(batches) | steps | "Collect" >> beam.Map(collect)
    return list(_collected)


def rows_of(batches: list[Any]) -> list[dict[str, Any]]:
    return sorted(pa.Table.from_batches(batches).to_pylist(), key=lambda row: str(row["question"]))


def quoted(prompt: str) -> dict[str, str]:
    return json.loads(prompt[prompt.index("{") : prompt.index("\n}\n") + 2])


class LongerIsBetter(Handler[Any, str, None]):
    """A judge of 1 to 5, or of pairs, that counts characters. It says nothing useful about what is broken."""

    def load_model(self) -> None:
        return None

    def predict(self, model: None, batch: Any, inference_args: Any = None) -> list[str]:
        return [self.said(messages[0]["content"]) for messages in batch]

    def said(self, prompt: str) -> str:
        texts = quoted(prompt)
        if "BROKEN" in texts.values():
            return "I can't " + "judge " * 1_000
        if "answer" in texts:
            return json.dumps({"reason": texts["answer"], "verdict": str(min(5, len(texts["answer"]) // 3))})
        apart = len(texts["second answer"]) - len(texts["first answer"])
        return json.dumps({"verdict": "second" if apart > 0 else "first" if apart < 0 else "tie"})


class FirstIsBetter(LongerIsBetter):
    """A judge that always prefers what it reads first."""

    def said(self, prompt: str) -> str:
        return '{"verdict": "first"}' if "first answer" in quoted(prompt) else '{"verdict": "3"}'


class Letters(Handler[str, Any, None]):
    """Embeds a text as the counts of a and of b."""

    output_type = pa.list_(pa.float32())

    def load_model(self) -> None:
        return None

    def predict(self, model: None, batch: Any, inference_args: Any = None) -> list[Any]:
        return [np.array([text.count("a"), text.count("b")], np.float32) for text in batch]


def test_a_judge_scores_both_texts_and_compares_them() -> None:
    judge = Judge(LongerIsBetter(), "Longer is better.", question="question")
    scores = ScoreTexts("expected", "short", prediction_b="long", judge=judge)
    when, where, who, why = rows_of(run(scores))

    assert [row["judge"] for row in (who, when, where, why)] == [1, 1, 1, None]
    assert [row["judge_b"] for row in (who, when, where, why)] == [5, 4, 2, 5]
    assert [row["preference"] for row in (who, when, where, why)] == [1, 1, 1, None]
    assert json.loads(who["judge_b_said"]) == {"reason": "It was Ann Lee.", "verdict": "5"}
    assert why["judge_said"].startswith("I can't judge"), "an answer that can't be read is kept"
    assert len(why["judge_said"]) == 2_000
    names = ["judge", "judge_said", "judge_b", "judge_b_said", "preference", "preference_said"]
    assert set(who) == {*ANSWERS, *names, "preference_second_shown"}

    measures = {"measures": ["judge"], "measures_b": ["judge_b"], "preference": "preference"}
    assert scores.measures == measures
    evaluated = scores | Evaluate("expected", "short", prediction_b="long", task="texts", **measures)
    [found] = run(evaluated)
    assert isinstance(found, Evaluation)
    assert (found["judge"], found.metrics_b["judge"].value) == (1, 4)
    assert (found.outcomes["preference"].wins, found.outcomes["preference"].losses) == (3, 0)
    assert list(found.notes)[:2] == [
        "1 of 4 rows have no number in 'judge', and its mean leaves them out",
        "1 of 4 rows have no number in 'preference', and its mean leaves them out",
    ]


def test_a_judge_that_likes_what_comes_first_prefers_no_side() -> None:
    table = {name: [f"{name} {at}" for at in range(400)] for name in ("question", "expected", "a", "b")}
    scores = ScoreTexts("expected", "a", prediction_b="b", judge=Judge(FirstIsBetter(), "Anything."), seed=3)
    rows = rows_of(run(scores, table))

    preferred = [row["preference"] for row in rows]
    assert set(preferred) == {-1, 1}
    assert abs(sum(preferred)) < 80, "200 of 400 are expected; 4 deviations are 40 more or fewer"
    assert all((row["preference"] == -1) == row["preference_second_shown"] for row in rows)
    again = rows_of(run(scores, table))
    assert again == rows, "a repeated run shows the same order"
    other = ScoreTexts("expected", "a", prediction_b="b", judge=Judge(FirstIsBetter(), "Anything."), seed=4)
    assert [row["preference"] for row in rows_of(run(other, table))] != preferred


def test_a_pass_is_true_and_a_broken_answer_null() -> None:
    class _Said(LongerIsBetter):
        def said(self, prompt: str) -> str:
            text = quoted(prompt)["answer"]
            return "hm" if text == "BROKEN" else "pass" if "Rome" in text else '{"verdict": "Fail"}'

    scores = ScoreTexts("expected", "short", judge=Judge(_Said(), "It names Rome.", scale="pass/fail"))
    rows = rows_of(run(scores))
    assert [row["judge"] for row in rows] == [False, True, False, None]
    assert scores.measures == {"measures": ["judge"]}
    found = evaluate(pa.Table.from_pylist(rows), "expected", "short", task="texts", resamples=0, **scores.measures)
    assert found["judge"] == pytest.approx(1 / 3)


def test_agreement_of_the_judge_with_people_is_an_evaluation_of_classes() -> None:
    scored = run(ScoreTexts("expected", "long", judge=Judge(LongerIsBetter(), "Longer is better.")))
    table = pa.Table.from_batches(scored)
    people = {"Who wrote it?": 5, "When?": 5, "Where?": 1, "Why?": 5}
    table = table.append_column("people", pa.array([people[each] for each in table["question"].to_pylist()]))
    found = evaluate(table, "people", "judge")

    assert found.task == "classes"
    assert found["accuracy"] == 0.5
    # Squares apart: 0 + 1 + 1 + 0 = 2. Each of 5, 5, 1, 5 against each of 5, 4, 2, 5, by 4: (3 * 10 + 42) / 4 = 18.
    assert found["kappa_quadratic"] == pytest.approx(1 - 2 / 18)
    assert found.confusion is not None
    assert found.confusion.labels == [1, 2, 4, 5]
    assert found.confusion.counts == [[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 2]]


def test_cosines_equal_values_worked_out_by_hand() -> None:
    table = {"question": ["1", "2", "3"], "e": ["ab", "a", "none"], "f": ["aab", "b", "ab"], "g": ["bbaa", "aaa", ""]}
    scores = ScoreTexts("e", "f", prediction_b="g", embedder=Letters())
    rows = rows_of(run(scores, table))

    assert [row["cosine"] for row in rows] == [pytest.approx(3 / np.sqrt(10)), 0, None]  # no vector of "none"
    assert [row["cosine_b"] for row in rows] == [pytest.approx(1), 1, None]
    assert list(rows[0]) == [*table, "cosine", "cosine_b"]
    assert scores.measures == {"measures": ["cosine"], "measures_b": ["cosine_b"]}


def test_rows_without_a_text_are_an_error_or_have_no_scores() -> None:
    table = {**ANSWERS, "short": ["Ann", None, "Rome", "money"]}
    judge = Judge(LongerIsBetter(), "Longer is better.", question="question")
    with pytest.raises(Exception, match="the column 'short' has 1 missing values in 3 rows, expected none"):
        run(ScoreTexts("expected", "short", judge=judge), table)
    scores = ScoreTexts("expected", "short", judge=judge, embedder=Letters(), skip_missing=True)
    rows = rows_of(run(scores, table))
    assert [row["judge"] for row in rows] == [None, 1, 1, 1]
    assert rows[0]["judge_said"] is None
    assert "_deleted" not in rows[0]
    [found] = run(scores | Evaluate("expected", "short", task="texts", skip_missing=True, **scores.measures), table)
    assert (found.rows, found.skipped, found["judge"]) == (3, 1, 1)


def test_a_server_judges() -> None:
    """Of four requests, one is answered with text that is cut, which can't be read."""

    def script(seen: Seen) -> Said:
        prompt = seen.json["messages"][0]["content"]
        if "BROKEN" in prompt:
            choice = {"message": {"role": "assistant", "content": '{"reason": "It is'}, "finish_reason": "length"}
            return Said({"model": "m", "choices": [choice]})
        text = json.dumps({"reason": "it is what was expected", "verdict": "5" if "1999" in prompt else "2"})
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return Said({"model": "m", "choices": [choice]})

    with serving(script) as server:
        handler = HttpModelHandler.chat(server.url, "m", allow_incomplete=True)
        rows = rows_of(run(ScoreTexts("expected", "short", judge=Judge(handler, "Right?", question="question"))))
        prompts = [seen.json["messages"][0]["content"] for seen in server.posts]
    assert [row["judge"] for row in rows] == [5, 2, 2, None]
    assert rows[3]["judge_said"] == '{"reason": "It is'
    assert sorted(quoted(each)["question"] for each in prompts) == sorted(ANSWERS["question"])
    assert all(re.match("Rubric: Right", each) for each in prompts)


def test_mistakes_are_told() -> None:
    with pytest.raises(InvalidArgument, match="neither an embedder nor a judge"):
        ScoreTexts("expected", "short")
    with pytest.raises(InvalidType, match="expected an instance"):
        ScoreTexts("expected", "short", embedder=Letters)  # pyright: ignore[reportArgumentType]
    judge = Judge(LongerIsBetter(), "Longer is better.")
    with pytest.raises(Exception, match="the table has a column 'judge' already"):
        run(ScoreTexts("expected", "short", judge=judge), {**ANSWERS, "judge": [1, 2, 3, 4]})
    with pytest.raises(Exception, match=r"found no column 'shrt'.*did you mean 'short'"):
        run(ScoreTexts("expected", "shrt", judge=judge))
