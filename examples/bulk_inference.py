"""Bulk inference: run a scikit-learn model over scanned handwritten digits.

The model is trained on one half of scikit-learn's digits table. The pipeline reads the other half, makes noisy
copies of every scan, classifies them all, writes the predictions to CSV files and counts which digit was
mistaken for which::

    lum run examples/bulk_inference.py
    python examples/bulk_inference.py --runner=luminosity.LuminosityRunner --output=/tmp/digits

It is plain Beam and runs on any runner. Options that ``--help`` does not list go to Beam.
"""

from __future__ import annotations

import argparse
import csv
import pickle
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import apache_beam as beam
import numpy as np
import numpy.typing as npt
from apache_beam.ml.inference.base import KeyedModelHandler, PredictionResult, RunInference
from apache_beam.ml.inference.sklearn_inference import SklearnModelHandlerNumpy
from apache_beam.options.pipeline_options import PipelineOptions
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC

Key = tuple[str, int]  # name of the row, digit that it shows
Scan = npt.NDArray[np.float32]  # 8 x 8 grey levels from 0 to 16
Confusion = Counter[tuple[int, int]]  # (digit, prediction): rows

NOISE = 3.0  # standard deviation, in grey levels


def prepare(model_file: Path, table_file: Path) -> None:
    """Train the model on half of the digits, and write the other half as a table."""
    scans, digits = load_digits(return_X_y=True)
    train_scans, test_scans, train_digits, test_digits = train_test_split(
        scans, digits, test_size=0.5, stratify=digits, random_state=0
    )
    model_file.write_bytes(pickle.dumps(SVC().fit(train_scans, train_digits)))
    rows = np.column_stack([np.arange(len(test_digits)), test_digits, test_scans])
    np.savetxt(table_file, rows, fmt="%d", delimiter=",")


def parse(line: str) -> tuple[Key, Scan]:
    """Parse a line of the table."""
    name, digit, *levels = line.split(",")
    return (name, int(digit)), np.array(levels, dtype=np.float32)


def noisy_copies(row: tuple[Key, Scan], copies: int) -> Iterator[tuple[Key, Scan]]:
    """Yield noisy copies of a scan; always the same ones, so that a retried bundle gives the same rows."""
    (name, digit), scan = row
    noise = np.random.default_rng(int(name)).normal(scale=NOISE, size=(copies, scan.size))
    for copy, noisy in enumerate(np.clip(scan + noise, 0, 16).astype(np.float32)):
        yield (f"{name}.{copy}", digit), noisy


def compare(result: tuple[Key, PredictionResult]) -> tuple[str, int, int]:
    """Return the name of the row, its digit and the predicted digit."""
    (name, digit), prediction = result
    return name, digit, int(cast(np.int64, prediction.inference))


def run(model_file: Path, table_file: Path, output: Path, copies: int, beam_args: Sequence[str]) -> None:
    """Run the pipeline, which writes predictions and counts to ``output``."""
    handler = KeyedModelHandler(SklearnModelHandlerNumpy(str(model_file)))
    with beam.Pipeline(options=PipelineOptions(beam_args)) as pipeline:
        predictions = (
            pipeline
            | "Read" >> beam.io.ReadFromText(str(table_file))
            | "Parse" >> beam.Map(parse)
            | "Copy" >> beam.FlatMap(noisy_copies, copies)
            | "Spread" >> beam.Reshuffle()
            # The hint gives this step its own worker pool; reading and writing stay in the first.
            | "Predict" >> RunInference(handler).with_resource_hints(min_ram="1GiB")
            | "Compare" >> beam.Map(compare)
        )
        _ = (
            predictions
            | "Format" >> beam.MapTuple(lambda name, digit, prediction: f"{name},{digit},{prediction}")
            | "Write" >> beam.io.WriteToText(f"{output}/predictions", ".csv", header="row,digit,prediction")
        )
        _ = (
            predictions
            | "Pair" >> beam.MapTuple(lambda name, digit, prediction: (digit, prediction))
            | "Count" >> beam.combiners.Count.PerElement()
            | "FormatCounts" >> beam.MapTuple(lambda pair, rows: f"{pair[0]},{pair[1]},{rows}")
            | "WriteCounts" >> beam.io.WriteToText(f"{output}/confusion.csv", shard_name_template="")
        )


def read_confusion(output: Path) -> Confusion:
    """Read how often each digit was predicted as each other."""
    with open(output / "confusion.csv", newline="") as file:
        return Counter({(int(digit), int(guess)): int(rows) for digit, guess, rows in csv.reader(file)})


def report(confusion: Confusion, seconds: float, output: Path) -> None:
    """Print accuracy and speed."""
    table = Table("digit", "rows", "right", "most often mistaken for", title="Predictions by digit")
    for column in table.columns:
        column.justify = "right"
    for digit in range(10):
        guesses = Counter({guess: rows for (shown, guess), rows in confusion.items() if shown == digit})
        rows, right = guesses.total(), guesses.pop(digit, 0)
        wrong = ", ".join(f"{guess} ({count:,} x)" for guess, count in guesses.most_common(1))
        table.add_row(str(digit), f"{rows:,}", f"{right / rows:.1%}", wrong or "-")

    total = confusion.total()
    accuracy = sum(rows for (digit, guess), rows in confusion.items() if digit == guess) / total
    console = Console(highlight=False)
    console.print(table)
    console.print(f"rows         {total:,}")
    console.print(f"seconds      {seconds:.1f} (including start-up)")
    console.print(f"rows/s       {total / seconds:,.0f}")
    console.print(f"accuracy     {accuracy:.2%}")
    console.print(f"predictions  {output}/predictions*.csv", soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Classify noisy handwritten digits.", allow_abbrev=False)
    parser.add_argument("--copies", type=int, default=25, help="noisy copies of each row (default: 25)")
    parser.add_argument("--output", type=Path, help="folder for the predictions (default: a temporary one)")
    arguments, beam_args = parser.parse_known_args(sys.argv[1:] if argv is None else argv)

    output = arguments.output or Path(tempfile.mkdtemp(prefix="bulk-inference-"))
    output.mkdir(parents=True, exist_ok=True)
    model_file, table_file = output / "model.pkl", output / "digits.csv"
    prepare(model_file, table_file)

    start = time.monotonic()
    run(model_file, table_file, output, arguments.copies, beam_args)
    report(read_confusion(output), time.monotonic() - start, output)


if __name__ == "__main__":
    main()
