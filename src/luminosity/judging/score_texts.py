"""``ScoreTexts``: columns of numbers for ``Evaluate``, from an embedding model and a judge."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.metrics import Metrics
from apache_beam.ml.inference.base import ModelHandler

from luminosity.errors import EvaluationError, Fix, InvalidArgument
from luminosity.evaluation.columns import column_of
from luminosity.evaluation.texts import texts_of
from luminosity.inference.enrich.column import Column
from luminosity.inference.enrich.transform import Enrich
from luminosity.judging.verdict import PAIR, Judge, read_verdict
from luminosity.tables.map_table import MapTable

__all__ = ["ScoreTexts"]

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_KEPT_CHARACTERS = 2_000  # of what a judge has said: enough for its reasons, or to see why it can't be read
_DELETED = "_deleted"  # rows that Enrich leaves out
_TEMPORARY = "_texts_"  # the beginning of the names of columns that are removed at the end
_COSINE, _JUDGE, _PREFERENCE, _SECOND, _SAID, _ORDER = "cosine", "judge", "preference", "_b", "_said", "_second_shown"
_PREFERRED = {"first": -1, "second": 1, "tie": 0}


@dataclass(frozen=True)
class _Settings:
    label: str
    prediction: str
    prediction_b: str | None
    embedder: ModelHandler[Any, Any, Any] | None
    judge: Judge | None
    skip_missing: bool
    seed: int

    @property
    def asks_for_pairs(self) -> bool:
        return self.judge is not None and self.judge.pairs and self.prediction_b is not None

    @property
    def texts(self) -> dict[str, str]:
        """The columns of texts that are scored, by the suffix of the new columns' names."""
        return {"": self.prediction, **({} if self.prediction_b is None else {_SECOND: self.prediction_b})}


class ScoreTexts(beam.PTransform[Any, Any]):
    """Adds scores of texts to a table: how near they are to the expected texts, and what a judge says of them.

    ::

        scores = ScoreTexts("expected", "answer", embedder=SentenceEmbedder(path), judge=Judge(handler, rubric))
        table | scores | Evaluate("expected", "answer", task="texts", **scores.measures)

    The new columns are:

    - with ``embedder``, ``cosine``: the cosine of both texts' vectors;
    - with ``judge``, ``judge``: its score from 1 to 5, or true for a pass; ``judge_said``: what it has written;
    - with ``prediction_b``, the same of the second text: ``cosine_b``, ``judge_b``, ``judge_b_said``;
    - with ``prediction_b`` and a judge that compares pairs, ``preference``: 1 if the second text is better, 0 for a
      tie, -1 if the first is; ``preference_said``; and ``preference_second_shown``: whether the second text of the
      table was the second that the judge saw. A judge that likes what it reads first prefers no side: the order is
      random, but the same for the same texts and seed.

    An answer that can't be read gives null in the column of scores and stays in ``judge_said``. ``Evaluate`` counts
    these rows in its notes, and the pipeline's counter ``unreadable_verdicts`` does, too. A request that fails fails
    the step; ``HttpModelHandler.chat(…, allow_incomplete=True)`` keeps answers that a server has cut or refused, which
    then can't be read.

    Args:
        label: the column of expected texts.
        prediction: the column of texts to score.
        prediction_b: the column of other texts, from a second prompt or model.
        embedder: makes vectors of texts, such as ``SentenceEmbedder``.
        judge: the model with its rubric.
        skip_missing: give rows in which a text is null no scores; by default they are an error.
        seed: of the order in which a judge sees two texts.
    """

    def __init__(
        self,
        label: str,
        prediction: str,
        *,
        prediction_b: str | None = None,
        embedder: ModelHandler[Any, Any, Any] | None = None,
        judge: Judge | None = None,
        skip_missing: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if embedder is None and judge is None:
            raise InvalidArgument("found neither an embedder nor a judge, expected one of them, or both")
        self._settings = _Settings(label, prediction, prediction_b, embedder, judge, skip_missing, seed)
        self._models = Enrich(**_columns(self._settings))

    @property
    def measures(self) -> Mapping[str, Any]:
        """The arguments with which ``Evaluate`` takes the new columns."""
        settings = self._settings
        names = [name for name, model in ((_COSINE, settings.embedder), (_JUDGE, settings.judge)) if model is not None]
        found: dict[str, Any] = {"measures": names}
        if settings.prediction_b is not None:
            found["measures_b"] = [f"{name}{_SECOND}" for name in names]
        return {**found, _PREFERENCE: _PREFERENCE} if settings.asks_for_pairs else found

    @property
    def new_columns(self) -> Mapping[str, pa.DataType]:
        """The names and types of the new columns."""
        return _new_columns(self._settings)

    def check(self, schema: pa.Schema) -> None:
        """Raise if a table with these columns can't be scored: before models run, which takes time or money."""
        _with_prompts(pa.RecordBatch.from_pylist([], schema=schema), self._settings)

    def with_resource_hints(self, **kwargs: Any) -> ScoreTexts:
        """Ask for resources, such as an accelerator, for the steps that run models."""
        self._models.with_resource_hints(**kwargs)
        return self

    def expand(self, input_or_inputs: Any) -> Any:
        """Make prompts, run the models, and read what they say."""
        return (
            input_or_inputs
            | "Prompts" >> MapTable(_with_prompts, self._settings)
            | "Models" >> self._models
            | "Scores" >> MapTable(_with_scores, self._settings)
        )


def _columns(settings: _Settings) -> dict[str, Column]:
    """Return what models add: vectors, and what the judge says."""
    found: dict[str, Column] = {}
    if settings.embedder is not None:
        for suffix, name in {"_expected": settings.label, **settings.texts}.items():
            found[f"{_TEMPORARY}vector{suffix}"] = Column(settings.embedder, name)
    if settings.judge is not None:
        handler = settings.judge.limited_handler(settings.asks_for_pairs)
        for name in _judged(settings):
            found[f"{name}{_SAID}"] = Column(handler, f"{_TEMPORARY}{name}", pa.string())
    return found


def _judged(settings: _Settings) -> list[str]:
    if settings.judge is None:
        return []
    names = [f"{_JUDGE}{suffix}" for suffix in settings.texts]
    return [*names, _PREFERENCE] if settings.asks_for_pairs else names


def _with_prompts(batch: pa.RecordBatch, settings: _Settings) -> pa.RecordBatch:
    """Add the messages for the judge, and mark rows without a text."""
    judge = settings.judge
    question = None if judge is None else judge.question
    names = [settings.label, *settings.texts.values(), *([] if question is None else [question])]
    _check_new(batch, settings)
    texts: dict[str | None, list[Any]] = {None: [None] * batch.num_rows}
    missing = np.zeros(batch.num_rows, dtype=bool)
    for name in names:
        texts[name], is_missing = texts_of(column_of(batch, name), name)
        missing |= is_missing
        if is_missing.any() and not settings.skip_missing:
            raise EvaluationError(
                f"the column {name!r} has {int(is_missing.sum()):,} missing values in {batch.num_rows:,} rows, "
                "expected none",
                fix=Fix("pass skip_missing=True", command="add --skip-missing"),
            )
    if settings.skip_missing:
        batch = batch.append_column(_DELETED, pa.array(missing))
    if judge is None:
        return batch
    for suffix, name in settings.texts.items():
        rows = zip(texts[question], texts[settings.label], texts[name], strict=True)
        asked = pa.array([judge.ask_about(*row) for row in rows], _MESSAGES)
        batch = batch.append_column(f"{_TEMPORARY}{_JUDGE}{suffix}", asked)
    if not settings.asks_for_pairs:
        return batch
    rows = list(zip(*(texts[each] for each in (question, settings.label, *settings.texts.values())), strict=True))
    in_order = [_in_order(settings.seed, *row) for row in rows]
    asked = pa.array([judge.ask_which(*_ordered(*each)) for each in zip(rows, in_order, strict=True)], _MESSAGES)
    batch = batch.append_column(f"{_TEMPORARY}{_PREFERENCE}", asked)
    return batch.append_column(f"{_PREFERENCE}{_ORDER}", pa.array(in_order))


def _ordered(row: tuple[Any, Any, str, str], in_order: bool) -> tuple[Any, Any, str, str]:
    question, expected, first, second = row
    return row if in_order else (question, expected, second, first)


def _check_new(batch: pa.RecordBatch, settings: _Settings) -> None:
    new = [*_new_columns(settings), *([_DELETED] if settings.skip_missing else [])]
    if taken := [name for name in new if name in batch.schema.names]:
        raise EvaluationError(
            f"the table has a column {taken[0]!r} already, which ScoreTexts would add", fix="rename or drop it"
        )


def _new_columns(settings: _Settings) -> dict[str, pa.DataType]:
    found = {f"{_COSINE}{suffix}": pa.float64() for suffix in settings.texts if settings.embedder is not None}
    if settings.asks_for_pairs:
        found[f"{_PREFERENCE}{_ORDER}"] = pa.bool_()
    for name in _judged(settings):
        is_passed = name != _PREFERENCE and settings.judge is not None and settings.judge.scale == "pass/fail"
        found |= {name: pa.bool_() if is_passed else pa.int64(), f"{name}{_SAID}": pa.string()}
    return found


def _in_order(seed: int, *texts: str | None) -> bool:
    """Return whether the judge sees the texts in their order: at random, but the same in every run and attempt."""
    digest = hashlib.blake2b(repr((seed, texts)).encode(errors="surrogatepass"), digest_size=1).digest()
    return digest[0] % 2 == 0


def _with_scores(batch: pa.RecordBatch, settings: _Settings) -> pa.RecordBatch:
    """Replace vectors by cosines, and what the judge says by scores and a short text."""
    new: dict[str, Any] = {}
    if settings.embedder is not None:
        expected = batch.column(f"{_TEMPORARY}vector_expected")
        for suffix in settings.texts:
            new[f"{_COSINE}{suffix}"] = _cosines(expected, batch.column(f"{_TEMPORARY}vector{suffix}"))
    if settings.judge is not None:
        for name in _judged(settings):
            said: list[str | None] = batch.column(f"{name}{_SAID}").to_pylist()
            new[name] = _scores(name, said, batch, settings.judge)
            kept = [None if each is None else each[:_KEPT_CHARACTERS] for each in said]
            new[f"{name}{_SAID}"] = pa.array(kept, pa.string())
    own = [name for name in batch.schema.names if not name.startswith(_TEMPORARY) and name not in (*new, _DELETED)]
    if not settings.skip_missing and _DELETED in batch.schema.names:
        own.append(_DELETED)  # a column of the user's
    columns = {**{name: batch.column(name) for name in own}, **new}
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _scores(name: str, said: Sequence[str | None], batch: pa.RecordBatch, judge: Judge) -> pa.Array:
    allowed = PAIR if name == _PREFERENCE else judge.verdicts
    verdicts = [None if each is None else read_verdict(each, allowed) for each in said]
    unreadable = sum(verdict is None and each is not None for verdict, each in zip(verdicts, said, strict=True))
    if unreadable:
        Metrics.counter(ScoreTexts, "unreadable_verdicts").inc(unreadable)
    if name != _PREFERENCE:
        if judge.scale == "pass/fail":
            return pa.array([None if each is None else each == "pass" for each in verdicts], pa.bool_())
        return pa.array([None if each is None else int(each) for each in verdicts], pa.int64())
    in_order: list[bool] = batch.column(f"{_PREFERENCE}{_ORDER}").to_pylist()
    return pa.array(
        [
            None if each is None else _PREFERRED[each] * (1 if kept else -1)
            for each, kept in zip(verdicts, in_order, strict=True)
        ],
        pa.int64(),
    )


def _cosines(expected: Any, found: Any) -> pa.Array:
    """Return the cosine of each pair of vectors; null if one is missing or has no direction."""
    values = np.full(len(expected), np.nan)
    is_there = (expected.is_valid().to_numpy(zero_copy_only=False)) & found.is_valid().to_numpy(zero_copy_only=False)
    if is_there.any():
        mask = pa.array(is_there)
        first, second = (_matrix(column.filter(mask)) for column in (expected, found))
        lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
        products = (first * second).sum(axis=1)
        cosines = np.divide(products, lengths, out=np.full(len(lengths), np.nan), where=lengths > 0)
        values[is_there] = np.clip(cosines, -1.0, 1.0)
    return pa.array(values, pa.float64(), from_pandas=True)  # NaN becomes null


def _matrix(vectors: Any) -> Any:
    try:
        return np.stack(vectors.to_numpy(zero_copy_only=False)).astype(np.float64)
    except (TypeError, ValueError):
        raise EvaluationError(f"the embedder gave {vectors.type}, expected vectors of one length") from None
