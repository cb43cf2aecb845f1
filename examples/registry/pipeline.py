"""A classifier that a registry names: the run takes the version of its alias, and the next one when the alias moves.

Run it with ``lum run examples/registry/pipeline.py``, or with Python on any runner.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.ml.inference.sklearn_inference import SklearnModelHandlerNumpy
from apache_beam.options.pipeline_options import PipelineOptions
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from luminosity import RunInference, register_model

_TRAINED = 900  # pictures; the others are classified
_PROMOTED_AT = 300  # pictures that the first version classifies before the second one takes its place
_PAUSE_S = 0.01  # between two pictures: a file is read faster than an alias is looked up


def train(folder: Path, count: int) -> Path:
    """Train a classifier on some pictures, and return its file."""
    pictures, digits = load_digits(return_X_y=True)
    path = folder / f"trained on {count}.pkl"
    path.write_bytes(pickle.dumps(LogisticRegression(max_iter=500).fit(pictures[:count], digits[:count])))
    return path


class Feed(beam.DoFn):
    """Yields pictures one after the other; in the middle, another program would promote the second version."""

    def __init__(self, registry: str, promoted: str) -> None:
        self._registry = registry
        self._promoted = promoted

    def process(self, pictures: Any) -> Iterable[Any]:
        """Yield the pictures, and promote the second version among them."""
        for number, picture in enumerate(pictures):
            if number == _PROMOTED_AT:
                register_model(self._registry, self._promoted, aliases=["champion"])
            time.sleep(_PAUSE_S)
            yield picture


def main(argv: Sequence[str] | None = None) -> None:
    """Register two versions, classify with the champion, and count the predictions of each version."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--registry", help="the folder of the registry; a temporary one unless given")
    known, beam_args = parser.parse_known_args(argv)
    folder = Path(known.registry or tempfile.mkdtemp(prefix="registry-"))
    folder.mkdir(parents=True, exist_ok=True)
    registry = f"registry://{folder}/digits"
    register_model(registry, train(folder, 50), aliases=["champion"])
    second = train(folder, _TRAINED)
    register_model(registry, second, aliases=["challenger"])

    pictures, _ = load_digits(return_X_y=True)
    handler = SklearnModelHandlerNumpy(f"{registry}@champion")
    with beam.Pipeline(options=PipelineOptions(beam_args)) as pipeline:
        fed = (
            pipeline
            | beam.Create([np.asarray(pictures[_TRAINED:], np.float64)])
            | beam.ParDo(Feed(registry, str(second)))
        )
        predicted = fed | RunInference(handler, watch_registry=True, interval=0.2)
        versions = predicted | "Version" >> beam.Map(lambda result: result.model_id.rpartition("@")[2])
        _ = versions | beam.combiners.Count.PerElement() | beam.MapTuple(_print)


def _print(version: str, count: int) -> None:
    print(f"version {version}: {count} predictions")


if __name__ == "__main__":
    main()
