"""Two versions of one library in one pipeline: prices by the old rules beside prices by the new ones.

Run it with ``lum run examples/environments/pipeline.py``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from layered import make_environment

_HERE = Path(__file__).parent
_ORDERS = [
    {"item": "tea", "net": 10.0, "country": "de"},
    {"item": "bread", "net": 4.2, "country": "fr"},
    {"item": "soap", "net": 2.5, "country": "lu"},
]


def price_before(order: dict[str, Any]) -> dict[str, Any]:
    """Add the price of version 1. Only workers of that environment can import it."""
    import pricing  # pyright: ignore

    found: Any = pricing
    return {**order, "before": found.gross(order["net"]), "before_by": found.__version__}


def price_now(order: dict[str, Any]) -> dict[str, Any]:
    """Add the price of version 2, whose function takes other arguments."""
    import pricing  # pyright: ignore

    found: Any = pricing
    cents = found.gross(round(order["net"] * 100), order["country"])
    return {**order, "now": cents / 100, "now_by": found.__version__}


def describe(order: dict[str, Any]) -> str:
    """Return a line about an order."""
    before = f"{order['before']:.2f} (pricing {order['before_by']})"
    return f"{order['item']}: {before} -> {order['now']:.2f} (pricing {order['now_by']})"


def main(argv: Sequence[str] | None = None) -> None:
    """Make the two environments and run the pipeline."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", help="the folder for the environments; a temporary one unless given")
    parser.add_argument("--output", default="prices.txt", help="the file to write")
    known, beam_args = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory(prefix="environments-") as temporary:
        folder = Path(known.environments or temporary)
        old = make_environment(folder / "old", _HERE / "pricing_1", "1.0")
        new = make_environment(folder / "new", _HERE / "pricing_2", "2.0")
        with beam.Pipeline(options=PipelineOptions(beam_args)) as pipeline:
            lines = (
                pipeline
                | beam.Create(_ORDERS)
                | "Price before" >> beam.Map(price_before).with_resource_hints(python_environment=str(old))
                | "Price now" >> beam.Map(price_now).with_resource_hints(python_environment=str(new))
                | "Describe" >> beam.Map(describe)
            )
            _ = lines | "Print" >> beam.Map(print)
            _ = lines | "Write" >> beam.io.WriteToText(known.output, shard_name_template="")


if __name__ == "__main__":
    main()
