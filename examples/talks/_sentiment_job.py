"""The code that both versions of the sentiment example share: reading reviews, writing predictions and dead letters."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
from _models import train_sentiment
from _reviews import reviews
from apache_beam.options.pipeline_options import PipelineOptions

Classify = Callable[[Any, str], tuple[Any, Any]]

UNSEEN = 4000  # the model was trained on the reviews before this one


def texts(count: int) -> list[tuple[int, str | None]]:
    """Return reviews with their numbers; one of them has no text, as in real tables."""
    found: list[str | None] = [text for text, _ in reviews("rotten_tomatoes", count, skip=UNSEEN)]
    found[len(found) // 2] = None
    return list(enumerate(found))


def run(classify: Classify, model: str, rows: Sequence[Any], output: Path, beam_args: Sequence[str]) -> None:
    """Write answers.json and errors.json."""
    with beam.Pipeline(options=PipelineOptions(beam_args)) as pipeline:
        answers, errors = classify(pipeline | "Reviews" >> beam.Create(rows), model)
        for name, found in {"answers": answers, "errors": errors}.items():
            _ = (
                found
                | f"Gather {name}" >> beam.combiners.ToList()
                | f"Encode {name}" >> beam.Map(lambda all_of_them: json.dumps(sorted(all_of_them)))
                | f"Write {name}" >> beam.io.WriteToText(str(output / f"{name}.json"), shard_name_template="")
            )


def main(classify: Classify, argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Classify film reviews as positive or negative.", allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=200, help="reviews to classify (default: 200)")
    parser.add_argument("--model", help="a text classifier's folder (default: train a small one)")
    arguments, beam_args = parser.parse_known_args(argv)

    rows = texts(arguments.rows)
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or train_sentiment(Path(folder) / "model")
        run(classify, model, rows, Path(folder), beam_args)
        report(json.loads((Path(folder) / "answers.json").read_text()), dict(rows))
        for number, error in json.loads((Path(folder) / "errors.json").read_text()):
            print(f"dead letter: review {number}: {error}")


def report(answers: Sequence[tuple[int, str, float]], rows: dict[int, str | None]) -> None:
    for number, label, score in answers[:3]:
        print(f"{label} {score:.2f}  {(rows[number] or '')[:90]}")
    likes = sum(label == "positive" for _, label, _ in answers)
    print(f"{likes} of {len(answers)} reviews like their film")
