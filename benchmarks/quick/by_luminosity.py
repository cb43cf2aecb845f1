"""The predictions with Luminosity: ``lum run by_luminosity.py SOURCE TARGET WEIGHTS``."""

import sys

import apache_beam as beam
import numpy as np

from luminosity import Column, Enrich, Handler, ReadTable, WriteTable


class Linear(Handler[np.ndarray, float, np.ndarray]):
    columnar = True  # predict() gets a matrix instead of a list of rows.

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = file

    def load_model(self) -> np.ndarray:
        return np.load(self._file)

    def predict(self, model: np.ndarray, batch: np.ndarray, inference_args: object = None) -> np.ndarray:
        return batch @ model


if __name__ == "__main__":
    source, target, weights = sys.argv[-3:]
    with beam.Pipeline() as pipeline:
        table = pipeline | ReadTable(f"{source}/*.parquet")
        scored = table | Enrich(score=Column(Linear(weights), [f"f{place}" for place in range(8)]))
        _ = scored | WriteTable(target)
