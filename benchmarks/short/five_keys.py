"""Elements of five keys through the stateful step of ``state.py``: ``five_keys.py ELEMENTS --runner=…``."""

import sys

import apache_beam as beam
import state

if __name__ == "__main__":
    with beam.Pipeline() as pipeline:
        state.build(pipeline, int(sys.argv[1]), keys=5)
