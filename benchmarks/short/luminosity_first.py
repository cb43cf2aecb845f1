"""``Create | Map`` in a script that imports Luminosity first."""

from luminosity import LuminosityRunner  # isort: split

import apache_beam as beam

with beam.Pipeline(LuminosityRunner()) as pipeline:
    print("runner:", type(pipeline.runner).__name__)
    _ = pipeline | beam.Create([1, 2, 3]) | beam.Map(print)
