"""The settings of an evaluation: which columns it reads, and what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from luminosity.errors import EvaluationError, Fix
from luminosity.evaluation.result import Task
from luminosity.evaluation.texts import TEXT_METRICS, check_library

__all__ = ["PREFERENCE", "ScoreOf", "Settings", "Slices", "as_names", "as_slices"]

ScoreOf = Literal["positive", "prediction"]
Slices = Sequence[str | Sequence[str]]

PREFERENCE = "preference"  # the name of the outcomes that come from a column
_TASKS = ("classes", "numbers", "ranking", "texts")
_MOST_MEASURES = 16


def as_slices(slices: Slices) -> tuple[tuple[str, ...], ...]:
    """Return each slice as the columns whose values it combines.

    >>> as_slices(["country", ("country", "plan")])
    (('country',), ('country', 'plan'))
    """
    if isinstance(slices, str):
        raise EvaluationError(f"found slices={slices!r}, expected a list", fix=f"pass slices=[{slices!r}]")
    return tuple((each,) if isinstance(each, str) else tuple(each) for each in slices)


def as_names(argument: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of columns as a tuple. Raises for a single text, which is a sequence as well."""
    if isinstance(names, str):
        raise EvaluationError(f"found {argument}={names!r}, expected a list", fix=f"pass {argument}=[{names!r}]")
    return tuple(names)


@dataclass(frozen=True)
class Settings:
    """The arguments of ``Evaluate``, checked."""

    label: str
    prediction: str | None = None
    score: str | None = None
    prediction_b: str | None = None
    score_b: str | None = None
    query: str | None = None
    task: Task | None = None
    measures: tuple[str, ...] = ()
    measures_b: tuple[str, ...] = ()
    preference: str | None = None
    positive: Any = None
    score_of: ScoreOf = "positive"
    slices: tuple[tuple[str, ...], ...] = ()
    k: tuple[int, ...] = (1, 5, 10)
    bins: int = 10
    resamples: int = 500
    confidence: float = 0.95
    seed: int = 0
    skip_missing: bool = False
    most_distinct: int = 2_000_000
    most_slices: int = 10_000

    def __post_init__(self) -> None:
        if self.prediction is None and self.score is None:
            raise EvaluationError(
                "found neither a prediction nor a score, expected one of them",
                fix="pass prediction=, the column of predictions",
            )
        if self.task is not None and self.task not in _TASKS:
            raise EvaluationError(f"found task={self.task!r}, expected one of {', '.join(_TASKS)}")
        if (self.query is not None) != (self.task == "ranking") and (self.query is None or self.task is not None):
            raise EvaluationError(
                f"found task={self.task!r} and query={self.query!r}, expected query= with ranking and nothing else"
            )
        if self.score_of not in ("positive", "prediction"):
            raise EvaluationError(f"found score_of={self.score_of!r}, expected 'positive' or 'prediction'")
        if self.score_of == "prediction" and (self.score is None or self.prediction is None):
            raise EvaluationError("found score_of='prediction', expected a prediction and a score with it")
        if self.task == "numbers" and (self.prediction is None or self.score is not None):
            raise EvaluationError("found task='numbers', expected a prediction, and no score: scores are for classes")
        self._check_second()
        self._check_texts()
        for name, least in (("bins", 1), ("resamples", 0), ("seed", 0), ("most_distinct", 1000)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise EvaluationError(f"found {name}={value!r}, expected a whole number from {least:,}")
        if not 0 < self.confidence < 1:
            raise EvaluationError(f"found confidence={self.confidence!r}, expected a number between 0 and 1")
        if not self.k or any(type(each) is not int or each < 1 for each in self.k):
            raise EvaluationError(f"found k={self.k!r}, expected whole numbers from 1")
        if any(not by for by in self.slices) or len(set(self.slices)) < len(self.slices):
            raise EvaluationError(f"found slices={list(self.slices)!r}, expected each slice once, with its columns")

    def _check_second(self) -> None:
        if self.query is not None:
            if self.score_b is not None and self.prediction_b is not None:
                raise EvaluationError("found prediction_b and score_b with query, expected one of them")
            return
        for first, second in (("prediction", "prediction_b"), ("score", "score_b")):
            if getattr(self, second) is not None and getattr(self, first) is None:
                raise EvaluationError(f"found {second} without {first}, expected both: the second model is compared")
        if self.prediction is not None and self.score_b is not None and self.prediction_b is None:
            raise EvaluationError("found score_b without prediction_b, expected the second model's predictions as well")

    def _check_texts(self) -> None:
        if self.task != "texts":
            for name in ("measures", "measures_b", "preference"):
                if getattr(self, name):
                    raise EvaluationError(
                        f"found {name}={getattr(self, name)!r} without task='texts', expected both",
                        fix=Fix("pass task='texts'", command="add --task texts"),
                    )
            return
        if self.prediction is None or self.score is not None:
            raise EvaluationError(
                "found task='texts', expected a prediction, and no score",
                fix="name columns of numbers in measures= (--measure), such as the scores of a judge",
            )
        if self.prediction_b is None and (self.measures_b or self.preference is not None):
            raise EvaluationError("found measures_b or preference without prediction_b, expected the second texts")
        expected = len(self.measures) if self.prediction_b is not None else 0
        if len(self.measures_b) != expected:
            raise EvaluationError(
                f"found {len(self.measures_b)} measures_b for {len(self.measures)} measures, expected {expected}",
                fix="name the same measures of the second texts in measures_b= (--measure-b), in the same order",
            )
        known = {*TEXT_METRICS, PREFERENCE}
        names = self.measures
        if len(names) > _MOST_MEASURES or len(set(names)) < len(names) or known & set(names):
            raise EvaluationError(
                f"found measures={list(names)!r}, expected at most {_MOST_MEASURES} different columns, none of which "
                f"is called {', '.join(sorted(known))}"
            )
        check_library()

    @property
    def has_second(self) -> bool:
        """Whether two models are compared."""
        return self.prediction_b is not None or self.score_b is not None

    @property
    def ranked_by(self) -> list[str]:
        """The columns that rows of a query are ranked by: of one model, or of two."""
        first = self.score if self.score is not None else self.prediction
        second = self.score_b if self.score_b is not None else self.prediction_b
        assert first is not None, "checked above"
        return [first] if second is None else [first, second]

    @property
    def text_metrics(self) -> list[str]:
        """The names of the metrics of texts, in the order in which a row of numbers has them."""
        return [*TEXT_METRICS, *self.measures]

    @property
    def columns(self) -> list[str]:
        """All columns that are read, each once."""
        names = [self.label, self.prediction, self.score, self.prediction_b, self.score_b, self.query]
        names += [*self.measures, *self.measures_b, self.preference]
        return list(
            dict.fromkeys(name for name in [*names, *(n for by in self.slices for n in by)] if name is not None)
        )
