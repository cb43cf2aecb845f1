"""Elements of five keys through the stateful step of ``state.py``: ``five_keys.py ELEMENTS --runner=…``."""

import sys
import time

import apache_beam as beam
import state
from apache_beam.options.pipeline_options import PipelineOptions

if __name__ == "__main__":
    pipeline = beam.Pipeline(options=PipelineOptions(sys.argv[2:]))
    print("runner:", type(pipeline.runner).__name__)
    state.build(pipeline, int(sys.argv[1]), keys=5)
    begun = time.perf_counter()
    pipeline.run().wait_until_finish()
    print(f"run s: {time.perf_counter() - begun:.2f}")
