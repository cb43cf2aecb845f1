"""Train a small classifier on digits, evaluate it in a pipeline, and compare it with a simpler one on the same rows.

Run it with ``lum run examples/evaluation/pipeline.py``, or with Python on any runner.
"""

from __future__ import annotations

import argparse

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.options.pipeline_options import PipelineOptions
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import NearestCentroid

from luminosity.evaluation import Evaluate, Evaluation

TRAINED_ROWS = 900  # the others are for the test


def predicted_table() -> pa.Table:
    """Return labels, the predictions of two models, the first model's confidence, and how dark each picture is."""
    pictures, digits = load_digits(return_X_y=True)
    training = slice(0, TRAINED_ROWS)
    test = slice(TRAINED_ROWS, None)
    model = LogisticRegression(max_iter=2000).fit(pictures[training], digits[training])
    simple = NearestCentroid().fit(pictures[training], digits[training])
    chances = model.predict_proba(pictures[test])
    ink = pictures[test].mean(axis=1)
    return pa.table(
        {
            "digit": digits[test],
            "prediction": model.classes_[chances.argmax(axis=1)],
            "confidence": chances.max(axis=1),
            "simple": simple.predict(pictures[test]),
            "ink": np.where(ink < np.median(ink), "light", "dark"),
        }
    )


def print_result(found: Evaluation, report: str | None) -> None:
    """Print the summary, the difference of the models and the slices, and write the report."""
    print(f"logistic regression: {found} · {found.rows:,} rows")
    print(f"nearest centroid minus logistic regression: accuracy {found.differences['accuracy']}")
    for ink, part in found.slices["ink"].items():
        print(f"{ink} pictures: accuracy {part.metrics['accuracy']}")
    if report is not None:
        found.write_report(report, title="digits", settings={"label": "digit", "prediction": "prediction"})


def main() -> None:
    """Run the pipeline."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", help="write an HTML report to this file")
    parsed, options = parser.parse_known_args()
    report = parsed.report
    with beam.Pipeline(options=PipelineOptions(options)) as pipeline:
        _ = (
            pipeline
            | beam.Create(predicted_table().to_batches(max_chunksize=100))
            | Evaluate(
                "digit",
                "prediction",
                score="confidence",
                score_of="prediction",
                prediction_b="simple",
                slices=["ink"],
            )
            | beam.Map(print_result, report)
        )


if __name__ == "__main__":
    main()
