"""500 MB in elements of 100 kB through a Reshuffle: two worker processes on either side."""

from __future__ import annotations

from collections.abc import Iterable

import _measure
import apache_beam as beam

_SEEDS = 50
_ELEMENTS_PER_SEED = 100
_ELEMENT_BYTES = 100_000


def large_elements(seed: int) -> Iterable[bytes]:
    for _ in range(_ELEMENTS_PER_SEED):
        yield bytes([seed]) * _ELEMENT_BYTES


def build(pipeline: beam.Pipeline) -> None:
    sizes = (
        pipeline
        | beam.Create(range(_SEEDS))
        | "Spread the seeds" >> beam.Reshuffle()
        | beam.FlatMap(large_elements)
        | "Reshuffle" >> beam.Reshuffle()
        | "Size" >> beam.Map(len)
    )
    count = _SEEDS * _ELEMENTS_PER_SEED
    _measure.check_count_and_sum(sizes, count, count * _ELEMENT_BYTES)


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    ratio = results["Luminosity"]["seconds"] / results["FnApiRunner"]["seconds"]
    _measure.print_figure("of FnApiRunner's time", ratio, at_most=0.5)


if __name__ == "__main__":
    beams = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")
    sides: dict[str, _measure.Side] = {
        "Luminosity": lambda: {"seconds": _measure.run_ours(build, "--cpu_workers=2")},
        "FnApiRunner": lambda: {"seconds": _measure.run_beams(build, *beams)},
    }
    _measure.main(sides, report, rounds=3)
