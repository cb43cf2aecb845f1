"""``Create | Map`` in a script that imports Beam first, on the runner that ``--runner`` names."""

import sys

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

with beam.Pipeline(options=PipelineOptions(sys.argv[1:])) as pipeline:
    print("runner:", type(pipeline.runner).__name__)
    _ = pipeline | beam.Create([1, 2, 3]) | beam.Map(print)
