"""Several models over the same rows, in four ways, and what each way costs.

- Branches: one collection, a RunInference for each model, joined by key. Models do not wait for each other, but the
  join shuffles all predictions.
- Sequence: each model takes the output of the one before. Use it for a model that needs another's prediction, or that
  should see only some of the rows.
- Pipelines: a job for each model, which reads everything again. They start, fail and are released independently.
- Enrich: all models in one pass over a table, without a join; models with the same tokenizer share the tokenised texts.

::

    lum run examples/talks/several_models.py
    python examples/talks/several_models.py --runner=FnApiRunner

The same reviews and the same three models go each way. The predictions are compared, and the work is counted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from _models import MINILM, train_classifier
from _reviews import reviews
from apache_beam.metrics import Metrics
from apache_beam.metrics.metric import MetricsFilter
from apache_beam.ml.inference.base import KeyedModelHandler, PredictionResult
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import Column, Enrich, RunInference, SentenceEmbedder, TextClassifier

NAMESPACE = "several_models"
PLACES = ("imdb", "rotten_tomatoes")
LEARN_FROM = 1000
MAX_LENGTH = 48

Handlers = Mapping[str, Any]
Numbers = dict[str, float]  # the prediction of each model for a row


class CountsTexts:
    """A handler that counts the texts it tokenises."""

    def prepare(self, block: Any) -> Any:
        Metrics.counter(NAMESPACE, "tokenised").inc(len(block))
        return super().prepare(block)  # type: ignore[misc]  # the handler that this class is mixed into


class Embedder(CountsTexts, SentenceEmbedder):  # pyright: ignore[reportUnsafeMultipleInheritance]
    pass


class Classifier(CountsTexts, TextClassifier):  # pyright: ignore[reportUnsafeMultipleInheritance]
    pass


def branches(rows: Any, handlers: Handlers) -> Any:
    answers = {name: rows | name >> RunInference(KeyedModelHandler(handlers[name])) for name in handlers}
    return answers | "Join" >> beam.CoGroupByKey() | "Joined" >> beam.MapTuple(joined)


def joined(number: int, answers: Mapping[str, Sequence[PredictionResult]]) -> tuple[int, Numbers]:
    return number, {name: number_of(found[0].inference) for name, found in answers.items()}


def sequence(rows: Any, handlers: Handlers) -> Any:
    """Run models one after the other; the key carries the predictions so far past the next model."""
    rows = rows | "NoAnswers" >> beam.MapTuple(lambda number, text: ((number, {}), text))
    for name, handler in handlers.items():
        rows = rows | name >> RunInference(KeyedModelHandler(handler)) | f"Keep {name}" >> beam.Map(kept, name)
    return rows | "Answers" >> beam.Keys()


def kept(answer: tuple[tuple[int, Numbers], PredictionResult], name: str) -> tuple[tuple[int, Numbers], Any]:
    (number, so_far), result = answer
    return (number, {**so_far, name: number_of(result.inference)}), result.example


def enrich(rows: Any, handlers: Handlers) -> Any:
    columns = {name: Column(handler, "text") for name, handler in handlers.items()}
    return (
        rows
        | "Batch" >> beam.BatchElements(min_batch_size=64, max_batch_size=1024)
        | "ToTable" >> beam.Map(to_table).with_output_types(pa.RecordBatch)
        | "Enrich" >> Enrich(**columns)
        | "Answers" >> beam.FlatMap(from_table, list(handlers))
    )


def to_table(rows: Sequence[tuple[int, str]]) -> Any:
    numbers, texts = zip(*rows, strict=True)
    return pa.record_batch({"number": pa.array(numbers), "text": pa.array(texts)})


def from_table(table: Any, names: Sequence[str]) -> list[tuple[int, Numbers]]:
    return [(row["number"], {name: number_of(row[name]) for name in names}) for row in table.to_pylist()]


def number_of(answer: Any) -> float:
    """Return one number of a prediction, to compare: a classifier's score, or the first of a vector."""
    return float(answer["score"] if isinstance(answer, dict) else answer[0])


def parse(line: str) -> tuple[int, str]:
    Metrics.counter(NAMESPACE, "read").inc()
    number, text = json.loads(line)
    return number, text


@dataclass
class Cost:
    seconds: float = 0
    read: int = 0
    tokenised: int = 0
    loaded: int = 0
    answers: dict[int, Numbers] = field(default_factory=dict[int, Numbers])


def run(way: Callable[[Any, Handlers], Any], handlers: Handlers, table: Path, cost: Cost, beam_args: list[str]) -> None:
    """Run one pipeline and add its cost to the total."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        pipeline = beam.Pipeline(options=PipelineOptions(beam_args))
        rows = pipeline | "Read" >> beam.io.ReadFromText(str(table)) | "Parse" >> beam.Map(parse)
        answers = way(rows, handlers) | "Encode" >> beam.Map(json.dumps)
        _ = answers | "Write" >> beam.io.WriteToText(f"{folder}/answers")
        result = pipeline.run()
        result.wait_until_finish()
        lines = [line for file in Path(folder).glob("answers*") for line in file.read_text().splitlines()]
    cost.seconds += time.monotonic() - start
    for number, numbers in map(json.loads, lines):
        cost.answers.setdefault(number, {}).update(numbers)
    cost.read += sum(found.committed for found in _metrics(result, "read", "counters"))
    cost.tokenised += sum(found.committed for found in _metrics(result, "tokenised", "counters"))
    loads = _metrics(result, "load_model_latency_milli_secs", "distributions")
    cost.loaded += sum(found.committed.count for found in loads)


def _metrics(result: Any, name: str, kind: str) -> list[Any]:
    return result.metrics().query(MetricsFilter().with_name(name))[kind]


def models(folder: Path) -> Handlers:
    """Train two small classifiers, of the sentiment and of the site of a review; add a sentence encoder."""
    found = [(text, label, place) for place in PLACES for text, label in reviews(place, LEARN_FROM)]
    texts = [text for text, _, _ in found]
    sentiment = train_classifier(
        folder / "sentiment", texts, [label for _, label, _ in found], ["negative", "positive"]
    )
    place = train_classifier(folder / "place", texts, [PLACES.index(place) for _, _, place in found], PLACES)
    return {
        "sentiment": Classifier(sentiment, max_length=MAX_LENGTH),
        "place": Classifier(place, max_length=MAX_LENGTH),
        "embedding": Embedder(MINILM, max_length=MAX_LENGTH),
    }


def report(costs: Mapping[str, Cost], rows: int) -> None:
    print(f"{rows} rows, 3 models   seconds  rows read  tokenised  models loaded")
    for name, cost in costs.items():
        print(f"{name:20}{cost.seconds:9.1f}{cost.read:11}{cost.tokenised:11}{cost.loaded:15}")
    first, *others = [_matrix(cost.answers) for cost in costs.values()]
    apart = max(float(np.abs(first - other).max()) for other in others)
    print(f"All ways give the same answers: no two numbers differ by more than {apart:.0e}.")


def _matrix(answers: Mapping[int, Numbers]) -> Any:
    return np.array([[value for _, value in sorted(answers[number].items())] for number in sorted(answers)])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Several models over the same rows.", allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=200, help="reviews to look at (default: 200)")
    arguments, beam_args = parser.parse_known_args(argv)

    texts = [text for text, _ in reviews("rotten_tomatoes", arguments.rows, skip=LEARN_FROM)]
    costs = {name: Cost() for name in ("branches", "sequence", "pipelines", "Enrich")}
    with tempfile.TemporaryDirectory() as folder:
        handlers = models(Path(folder))
        table = Path(folder) / "reviews.jsonl"
        table.write_text("\n".join(json.dumps(row) for row in enumerate(texts)))
        run(branches, handlers, table, costs["branches"], beam_args)
        run(sequence, handlers, table, costs["sequence"], beam_args)
        for name, handler in handlers.items():
            run(branches, {name: handler}, table, costs["pipelines"], beam_args)
        run(enrich, handlers, table, costs["Enrich"], beam_args)
    report(costs, len(texts))


if __name__ == "__main__":
    main()
