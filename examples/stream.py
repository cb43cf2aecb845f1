"""A stream without an end: sales arrive all the time, and every five seconds the counts of the last five come out.

    lum run examples/stream.py

The sales are made up: a clock ticks 50 times a second, and each tick is a sale. Replace ``Sales`` by a source of your
own. Press Ctrl-C to stop, or pass --seconds=20 for a stream that ends by itself.
"""

from __future__ import annotations

import argparse
import random
from datetime import datetime
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.periodicsequence import PeriodicImpulse
from apache_beam.transforms.window import FixedWindows
from apache_beam.utils.timestamp import MAX_TIMESTAMP, Timestamp

_PRODUCTS = ("apples", "pears", "plums")
_SALES_PER_SECOND = 50
_WINDOW_S = 5
_WINDOW = beam.DoFn.WindowParam


class Sales(beam.PTransform[Any, Any]):
    """Emits a product for each sale, with the time of the sale. It has no end, unless ``seconds`` are given."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__()
        self._seconds = seconds

    def expand(self, input_or_inputs: Any) -> Any:
        now = Timestamp.now()
        end = MAX_TIMESTAMP if self._seconds is None else now + self._seconds
        ticks = input_or_inputs | PeriodicImpulse(now, end, 1 / _SALES_PER_SECOND)
        return ticks | "Sell" >> beam.Map(lambda tick: random.choice(_PRODUCTS))


def line(counts: dict[str, int], window: Any = _WINDOW) -> str:
    """Return the counts of a window, with the window's time."""
    start, end = (datetime.fromtimestamp(float(time)) for time in (window.start, window.end))
    sold = ", ".join(f"{product} {counts[product]}" for product in sorted(counts))
    return f"{start:%H:%M:%S} to {end:%H:%M:%S}: {sold}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="end after this time (default: never)")
    own, beams = parser.parse_known_args()
    with beam.Pipeline(options=PipelineOptions(beams)) as pipeline:
        _ = (
            pipeline
            | "Sales" >> Sales(own.seconds)
            | "Windows" >> beam.WindowInto(FixedWindows(_WINDOW_S))
            | "Count" >> beam.combiners.Count.PerElement()
            | "Join" >> beam.combiners.ToDict().without_defaults()
            | "Line" >> beam.Map(line)
            | "Print" >> beam.Map(print)
        )


if __name__ == "__main__":
    main()
