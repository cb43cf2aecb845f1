"""``Create | Map`` in a script that imports Beam first, on the runner that ``--runner`` names."""

import apache_beam as beam

with beam.Pipeline() as pipeline:
    _ = pipeline | beam.Create([1, 2, 3]) | beam.Map(print)
