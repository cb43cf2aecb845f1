"""Reviews that keep arriving: a model turns each into a vector, files are written every second, and drift is reported.

    lum run examples/stream_reviews.py
    python examples/stream_reviews.py --runner=luminosity.LuminosityRunner --seconds=20 --out=/tmp/reviews

The reviews are made up: a clock ticks 50 times a second, and each tick is a review. In the second half of the run
customers write about the delivery, which they did not do before, so that the detector raises an alarm. The model is as
small as can be: put ``SentenceEmbedder`` in its place for one that understands texts, and a source of your own, such as
``ReadKafka``, in the place of ``Reviews``. Ticks that were due before the workers started come at once, in any order.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import apache_beam as beam
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from apache_beam.ml.inference.base import ModelHandler, PredictionResult
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.periodicsequence import PeriodicImpulse
from apache_beam.transforms.window import FixedWindows
from apache_beam.utils.timestamp import Timestamp

from luminosity import RunInference, TableFromRows, WriteTable
from luminosity.drift import DetectDrift, DriftAlert, OnlineMMD

_PER_SECOND = 50
_WIDTH = 8  # numbers of a vector
_REFERENCE_ROWS = 600
_DETECTOR_ROWS = 20  # the detector compares the last reviews with the reference
_SCHEMA = pa.schema({"text": pa.string(), "tone": pa.list_(pa.float32(), _WIDTH)})
_USUAL = (
    "good value and tasty",
    "fresh fruit at a fair price",
    "the pears were ripe",
    "not bad but the plums were sour",
)
_DELIVERY = ("the parcel came two days late", "the courier left the box in the rain", "where is my parcel")

Vector = npt.NDArray[np.float32]


class Tones(ModelHandler[str, PredictionResult, Vector]):
    """A stand-in for a language model: each word has a random vector, and a text has their mean."""

    def load_model(self) -> Vector:
        return np.random.default_rng(0).normal(size=(1 << 12, _WIDTH)).astype(np.float32)

    def run_inference(
        self, batch: Sequence[str], model: Vector, inference_args: dict[str, Any] | None = None
    ) -> Iterable[PredictionResult]:
        return [PredictionResult(text, tone(text, model)) for text in batch]


def tone(text: str, model: Vector) -> Vector:
    """Return the vector of a text."""
    return model[[zlib.crc32(word.encode()) % len(model) for word in text.split()]].mean(axis=0)


def review(is_late: bool) -> str:
    """Make up a review: some of the usual words, and in the second half of the run about the delivery."""
    words = " ".join(random.choices(_DELIVERY if is_late else _USUAL, k=2)).split()
    return " ".join(random.sample(words, k=len(words) - 2))


class Reviews(beam.PTransform[Any, Any]):
    """Emits a review for each tick of a clock, with its time, for some seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def expand(self, input_or_inputs: Any) -> Any:
        start = Timestamp.now()
        half = float(start + self._seconds / 2)
        ticks = input_or_inputs | PeriodicImpulse(start, start + self._seconds, 1 / _PER_SECOND)
        return ticks | "Write" >> beam.Map(lambda tick: review(float(tick) >= half)).with_output_types(str)


def row(result: PredictionResult) -> dict[str, Any]:
    """Return the row of a table."""
    return {"text": result.example, "tone": result.inference}


def line(alert: tuple[Any, DriftAlert]) -> str:
    """Return an alert as a line."""
    return f"drift after {alert[1].rows_seen} reviews"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="end after this time (default: %(default)s)")
    parser.add_argument("--out", default=None, help="the folder of the table (default: a new one)")
    own, beams = parser.parse_known_args()
    out = own.out or tempfile.mkdtemp(prefix="reviews-")
    model = Tones().load_model()
    reference = np.stack([tone(review(is_late=False), model) for _ in range(_REFERENCE_ROWS)])
    detector = OnlineMMD(reference, expected_run_time=5_000, window=_DETECTOR_ROWS, simulations=100)
    with beam.Pipeline(options=PipelineOptions(beams)) as pipeline:
        table = (
            pipeline
            | "Reviews" >> Reviews(own.seconds)
            | "Model" >> RunInference(Tones())
            | "Row" >> beam.Map(row)
            | "Table" >> TableFromRows(_SCHEMA)
        )
        _ = (
            table
            | "Windows" >> beam.WindowInto(FixedWindows(1))
            | "Files" >> WriteTable(out)
            | "PrintFile" >> beam.Map(print)
        )
        _ = (
            table
            | "Drift" >> DetectDrift(detector, column="tone")
            | "Alert" >> beam.Map(line)
            | "PrintAlert" >> beam.Map(print)
        )


if __name__ == "__main__":
    main()
