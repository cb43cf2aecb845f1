"""A model for each key: KeyedModelHandler with KeyModelMapping.

Often there is a model for each customer, language or region. Elements are pairs of a key and an example; the mapping
says which handler is for which keys, and one RunInference runs them all. Models share the memory of their worker: if
not all fit, they are loaded in turns. Here the key is the site of a film review, and each site has a classifier that
was trained on its own reviews. To see that keys choose the model, every review goes to both::

    lum run examples/talks/model_per_key.py
    python examples/talks/model_per_key.py --runner=FnApiRunner

`PredictionResult.model_id` is the file of the model that made a prediction.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
from _reviews import Review, reviews
from apache_beam.ml.inference.base import KeyedModelHandler, KeyModelMapping, PredictionResult
from apache_beam.ml.inference.sklearn_inference import SklearnModelHandlerNumpy
from apache_beam.options.pipeline_options import PipelineOptions
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from luminosity import RunInference

PLACES = ("imdb", "rotten_tomatoes")
LEARN_FROM = 2000

Truth = tuple[str, int]  # the site of a review, and 1 if its writer liked the film
Pair = tuple[str, str]  # the site of the model, and the site of the review


def train(model_file: Path, learn_from: Sequence[Review]) -> None:
    texts, labels = zip(*learn_from, strict=True)
    model = make_pipeline(TfidfVectorizer(max_features=20_000), LogisticRegression(C=10)).fit(texts, labels)
    model_file.write_bytes(pickle.dumps(model))


def is_right(answer: tuple[str, PredictionResult], truths: Mapping[str, Truth]) -> tuple[Pair, int]:
    key, result = answer
    example: Any = result.example
    place, label = truths[str(example)]
    return (key, place), int(result.inference == label)


def report(rates: list[tuple[Pair, float]]) -> None:
    for (model, place), rate in sorted(rates):
        print(f"model of {model:15}  on reviews of {place:15}  {rate:.0%} right")


def run(model_files: Mapping[str, Path], truths: Mapping[str, Truth], beam_args: Sequence[str]) -> None:
    handler = KeyedModelHandler(
        [KeyModelMapping([key], SklearnModelHandlerNumpy(str(path))) for key, path in model_files.items()]
    )
    with beam.Pipeline(options=PipelineOptions(beam_args)) as pipeline:
        _ = (
            pipeline
            | "Reviews" >> beam.Create(list(truths))
            | "AddKeys" >> beam.FlatMap(lambda text: [(key, np.array(text, dtype=object)) for key in PLACES])
            | "Classify" >> RunInference(handler)
            | "Compare" >> beam.Map(is_right, truths)
            | "Rate" >> beam.combiners.Mean.PerKey()
            | "Gather" >> beam.combiners.ToList()
            | "Report" >> beam.Map(report)
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Classify reviews with a model for each place.", allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=300, help="reviews of each place (default: 300)")
    arguments, beam_args = parser.parse_known_args(argv)

    with tempfile.TemporaryDirectory() as folder:
        model_files = {place: Path(folder) / f"{place}.pkl" for place in PLACES}
        truths: dict[str, Truth] = {}
        for place, path in model_files.items():
            found = reviews(place, LEARN_FROM + arguments.rows)
            train(path, found[:LEARN_FROM])
            truths |= {text: (place, label) for text, label in found[LEARN_FROM:]}
        run(model_files, truths, beam_args)


if __name__ == "__main__":
    main()
