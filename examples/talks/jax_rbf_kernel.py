"""A JAX kernel in a DoFn: compiled once per worker, computed on whole batches.

Kernel methods compare every row with reference rows: k(x, y) = exp(-g |x - y|^2). JAX compiles this into one pass for
the worker's device. Use this pattern for numerical code that is not a model with a file: similarities, kernel
regressions, simulations. Batches are padded to a few sizes, because JAX compiles again for each shape. Here the most
similar handwritten digits vote on what a digit is::

    lum run examples/talks/jax_rbf_kernel.py
    python examples/talks/jax_rbf_kernel.py --runner=FnApiRunner

A function of parameters and one example needs no DoFn: use RunInference(JaxModelHandler(function, parameters)).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import apache_beam as beam
import numpy as np
import numpy.typing as npt
from apache_beam.options.pipeline_options import PipelineOptions
from sklearn.datasets import load_digits

from luminosity.inference.threads import limit_threads

Scans = npt.NDArray[np.float32]
Row = tuple[int, Scans]  # the digit, and its scan
Vote = tuple[int, int]  # the digit, and the result of the vote

LARGEST_BATCH = 256


def rbf_kernel(x: Any, y: Any, gamma: float) -> Any:
    """Return a row for each of x and a column for each of y. Matrix products are what devices are fast at."""
    import jax.numpy as jnp

    squares = (x**2).sum(1)[:, None] - 2 * x @ y.T + (y**2).sum(1)[None, :]
    return jnp.exp(-gamma * squares)


class VoteOfTheAlike(beam.DoFn):
    def __init__(self, reference: Scans, digits: npt.NDArray[np.int64], gamma: float) -> None:
        self._reference = reference
        self._votes = np.eye(10, dtype=np.float32)[digits]
        self._gamma = gamma

    def setup(self) -> None:
        limit_threads()  # to this worker's share of the cores, before JAX starts a thread for each core
        import jax

        reference, votes = jax.device_put((self._reference, self._votes))
        self._read = jax.jit(lambda scans: (rbf_kernel(scans, reference, self._gamma) @ votes).argmax(1))

    def process(self, element: list[Row]) -> Iterator[Vote]:
        scans = np.stack([scan for _, scan in element])
        padded = np.zeros((_next_power_of_two(len(scans)), scans.shape[1]), np.float32)
        padded[: len(scans)] = scans
        for (digit, _), read in zip(element, np.asarray(self._read(padded))[: len(scans)], strict=True):
            yield digit, int(read)


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def median_gamma(rows: Scans) -> float:
    """Return a usual choice: one over the median of the squared distances between rows."""
    distances = ((rows[:, None, :] - rows[None, :, :]) ** 2).sum(-1)
    return float(1 / np.median(distances[distances > 0]))


def report(votes: list[Vote]) -> None:
    right = sum(digit == read for digit, read in votes)
    print(f"{right} of {len(votes)} digits read right ({right / len(votes):.1%})")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Read digits by their similarity.", allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=800, help="digits to read (default: 800)")
    arguments, beam_args = parser.parse_known_args(argv)

    digits_and_scans: Any = load_digits()
    digits, scans = digits_and_scans.target, digits_and_scans.data.astype(np.float32)
    reference, known = scans[arguments.rows :], digits[arguments.rows :]
    gamma = 10 * median_gamma(reference[:200])  # narrower than usual, so that the few most similar digits decide
    with beam.Pipeline(options=PipelineOptions(beam_args)) as pipeline:
        _ = (
            pipeline
            | "Scans" >> beam.Create(list(zip(digits[: arguments.rows].tolist(), scans, strict=False)))
            | "Batch" >> beam.BatchElements(min_batch_size=16, max_batch_size=LARGEST_BATCH)
            | "Vote" >> beam.ParDo(VoteOfTheAlike(reference, known, gamma))
            | "Gather" >> beam.combiners.ToList()
            | "Report" >> beam.Map(report)
        )


if __name__ == "__main__":
    main()
