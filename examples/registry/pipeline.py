"""A classifier that a registry names: each run takes the version that the alias stands for when it starts.

Run it with ``lum run examples/registry/pipeline.py``, or with Python on any runner.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path

import apache_beam as beam
import numpy as np
from apache_beam.ml.inference.sklearn_inference import SklearnModelHandlerNumpy
from apache_beam.options.pipeline_options import PipelineOptions
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from luminosity import RunInference, register_model

_TRAINED = 900  # pictures; the others are classified


def train(folder: Path, count: int) -> Path:
    """Train a classifier on some pictures, and return its file."""
    pictures, digits = load_digits(return_X_y=True)
    path = folder / f"trained on {count}.pkl"
    path.write_bytes(pickle.dumps(LogisticRegression(max_iter=500).fit(pictures[:count], digits[:count])))
    return path


def classify(name: str, options: PipelineOptions) -> None:
    """Classify pictures with the version that the name stands for, and print how often each digit was right."""
    pictures, digits = load_digits(return_X_y=True)
    rows = [np.asarray(picture, np.float64) for picture in pictures[_TRAINED:]]
    expected = {row.tobytes(): digit for row, digit in zip(rows, digits[_TRAINED:], strict=True)}
    with beam.Pipeline(options=options) as pipeline:
        results = pipeline | beam.Create(rows) | RunInference(SklearnModelHandlerNumpy(name))
        right = results | beam.Map(lambda each: (each.model_id, each.inference == expected[each.example.tobytes()]))
        _ = right | beam.CombinePerKey(beam.combiners.MeanCombineFn()) | beam.MapTuple(_print)


def main(argv: Sequence[str] | None = None) -> None:
    """Classify with the champion, promote the challenger, and classify again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--registry", help="the folder of the registry; a temporary one unless given")
    known, beam_args = parser.parse_known_args(argv)
    folder = Path(known.registry or tempfile.mkdtemp(prefix="registry-"))
    folder.mkdir(parents=True, exist_ok=True)
    registry = f"registry://{folder}/digits"
    first, second = train(folder, 50), train(folder, _TRAINED)
    register_model(registry, first, aliases=["champion"])
    register_model(registry, second, aliases=["challenger"])
    classify(f"{registry}@champion", PipelineOptions(beam_args))
    register_model(registry, second, aliases=["champion"])  # the same files: only the alias moves
    classify(f"{registry}@champion", PipelineOptions(beam_args))


def _print(model_id: str, share: float) -> None:
    print(f"{model_id}: {share:.1%} of the digits are right")


if __name__ == "__main__":
    main()
