"""Predictions of one row each, as in ``predictions.py``: ``one_row.py beams|ours ROWS --runner=…``."""

import sys
import time

import apache_beam as beam
import predictions
from apache_beam.ml.inference import base
from apache_beam.options.pipeline_options import PipelineOptions

import luminosity

if __name__ == "__main__":
    pipeline = beam.Pipeline(options=PipelineOptions(sys.argv[3:]))
    print("runner:", type(pipeline.runner).__name__)
    transform = {"beams": base.RunInference, "ours": luminosity.RunInference}[sys.argv[1]]
    predictions.build(pipeline, transform, int(sys.argv[2]))
    begun = time.perf_counter()
    pipeline.run().wait_until_finish()
    print(f"run s: {time.perf_counter() - begun:.2f}")
