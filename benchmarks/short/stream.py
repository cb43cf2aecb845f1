"""Ten rows each tenth of a second through a scikit-learn model, without an end: ``lum run stream.py MODEL``."""

import sys
from collections.abc import Iterable

import apache_beam as beam
import numpy as np
from apache_beam.ml.inference.sklearn_inference import SklearnModelHandlerNumpy
from apache_beam.transforms.periodicsequence import PeriodicImpulse

from luminosity import RunInference


def rows(_: object) -> Iterable[np.ndarray]:
    return (np.array([float(number)]) for number in range(10))


if __name__ == "__main__":
    with beam.Pipeline() as pipeline:
        examples = pipeline | PeriodicImpulse(fire_interval=0.1) | beam.FlatMap(rows)
        results = examples | RunInference(SklearnModelHandlerNumpy(sys.argv[1]))
        _ = results | beam.Map(lambda result: print("predicted", result.example[0], result.inference))
