"""A model in your own DoFn, with resource hints that say what the step needs.

If RunInference does not fit, a DoFn loads its model in `setup` and computes in `process`. The hints say what this step
needs: memory for the model, and an accelerator. A runner that reads them gives the step its own workers that have both,
and runs the steps around it on plain workers. Here a small network reads handwritten digits::

    lum plan examples/talks/resource_hints.py    # which steps share workers
    lum run examples/talks/resource_hints.py
    python examples/talks/resource_hints.py --runner=FnApiRunner

LuminosityRunner and Dataflow read the hints; other runners ignore them. Without an accelerator, `lum run` says so and
computes on the CPU.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import torch
from apache_beam.options.pipeline_options import PipelineOptions
from sklearn.datasets import load_digits

Scan = tuple[int, Any]  # the digit, and 8 x 8 grey levels
Answer = tuple[int, int, int]  # the digit, what the network reads, and the process that ran it


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def train(weights_file: Path, scans: torch.Tensor, digits: torch.Tensor) -> None:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(scans), digits).backward()
        optimizer.step()
    torch.save(model.state_dict(), weights_file)


class ReadDigits(beam.DoFn):
    """Loads the model once per worker, not once per element: `setup` runs in the workers that have the resources."""

    def __init__(self, weights_file: str) -> None:
        self._weights_file = weights_file

    def setup(self) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = network().to(self._device).eval()
        self._model.load_state_dict(torch.load(self._weights_file, map_location=self._device))

    def process(self, element: list[Scan]) -> Iterator[Answer]:
        scans = torch.from_numpy(np.stack([scan for _, scan in element])).to(self._device)
        with torch.inference_mode():
            read = self._model(scans).argmax(dim=1).tolist()
        for (digit, _), answer in zip(element, read, strict=True):
            yield digit, answer, os.getpid()


def report(answers: list[Answer]) -> None:
    right = sum(digit == read for digit, read, _ in answers)
    processes = len({process for _, _, process in answers})
    print(f"{right} of {len(answers)} digits read right; processes that held the model: {processes}")


def run(weights_file: Path, scans: Sequence[Scan], beam_args: Sequence[str]) -> None:
    read_digits = beam.ParDo(ReadDigits(str(weights_file))).with_resource_hints(
        min_ram="1GiB", accelerator="type:nvidia-tesla-t4;count:1;install-nvidia-driver"
    )
    with beam.Pipeline(options=PipelineOptions(beam_args)) as pipeline:
        _ = (
            pipeline
            | "Scans" >> beam.Create(scans)
            | "Batch" >> beam.BatchElements(min_batch_size=16, max_batch_size=256)
            | "Read" >> read_digits
            | "Gather" >> beam.combiners.ToList()
            | "Report" >> beam.Map(report)
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Read handwritten digits.", allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=800, help="digits to read (default: 800)")
    arguments, beam_args = parser.parse_known_args(argv)

    scans, digits = load_digits(return_X_y=True)
    scans = scans.astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        weights_file = Path(folder) / "weights.pt"
        train(weights_file, torch.from_numpy(scans[arguments.rows :]), torch.from_numpy(digits[arguments.rows :]))
        unseen = list(zip(digits[: arguments.rows].tolist(), scans, strict=False))
        run(weights_file, unseen, beam_args)


if __name__ == "__main__":
    main()
