"""Predictions of one row each, as in ``predictions.py``: ``one_row.py beams|ours ROWS --runner=…``."""

import sys

import apache_beam as beam
import predictions
from apache_beam.ml.inference import base

import luminosity

if __name__ == "__main__":
    with beam.Pipeline() as pipeline:
        transform = {"beams": base.RunInference, "ours": luminosity.RunInference}[sys.argv[1]]
        predictions.build(pipeline, transform, int(sys.argv[2]))
