"""Kills a batch job with a checkpoint when 95% of it is done, starts it again, and counts the work that was repeated.

A step takes 40 ms for each of 3,000 elements, on two workers: a minute of work. It notes each element in a file. In one
case it is a plain function, in the other a model behind a GroupByKey. The checkpoint interval is the default of 10 s.

    python benchmarks/durable_repeat.py [--elements 3000] [--only map|model]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _measure
import apache_beam as beam
from _killable import Killable
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import Handler, LuminosityRunner, RunInference

_ELEMENT_S = 0.04
_WORKERS = 2
_GROUPS = 100
_KILLED_AT = 0.95
_AT_MOST_S = 10.0  # one interval


def _note(elements: Sequence[int], path: str) -> None:
    """Append elements to a file, in one write."""
    with open(path, "ab", buffering=0) as file:
        file.write(b"".join(b"%d\n" % element for element in elements))


def _slow(element: int, path: str) -> int:
    time.sleep(_ELEMENT_S)
    _note([element], path)
    return element


class _SlowModel(Handler[int, int, None]):
    """A model that takes as long for each example."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def load_model(self) -> None:
        return None

    def predict(self, model: None, batch: Sequence[int], inference_args: Any = None) -> list[int]:
        time.sleep(_ELEMENT_S * len(batch))
        _note(batch, self._path)
        return list(batch)


def run(case: str, folder: str, elements: int, flags: list[str]) -> None:
    """Run the job of a case to its end."""
    fixed = ["--progress=off", "--run_dir=off", f"--cpu_workers={_WORKERS}", f"--checkpoint_dir={folder}/checkpoint"]
    pipeline = beam.Pipeline(LuminosityRunner(), PipelineOptions([*fixed, *flags]))
    numbers = pipeline | beam.Create(range(elements)) | beam.Reshuffle()
    if case == "map":
        done = numbers | "Slow" >> beam.Map(_slow, f"{folder}/notes")
    else:
        groups = numbers | beam.Map(lambda number: (number % _GROUPS, number)) | beam.GroupByKey()
        results: Any = groups | beam.FlatMap(lambda group: group[1]) | RunInference(_SlowModel(f"{folder}/notes"))
        done = results | beam.Map(lambda result: result.inference)
    _measure.check_count_and_sum(done, elements, elements * (elements - 1) // 2)
    pipeline.run().wait_until_finish()


def measure(case: str, elements: int, flags: list[str]) -> dict[str, float]:
    """Kill the job of a case near its end, let it finish, and return what was repeated."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("CHECKPOINTS")) as folder:
        notes = Path(folder, "notes")
        arguments = Path(folder, "output"), "--run", case, "--folder", folder, f"--elements={elements}", *flags
        with Killable(*arguments) as job:
            seconds = job.wait_for(lambda: _noted(notes) >= _KILLED_AT * elements, "95% of the work")
        before = _noted(notes)
        with Killable(*arguments) as job:
            again = job.wait()
        noted = notes.read_bytes().split()
        if len(set(noted)) != elements:
            raise ValueError(f"found {len(set(noted))} elements, expected {elements}")
        repeated = len(noted) - elements
        return {
            "elements/s": before / seconds,
            "until kill s": seconds,
            "second start s": again,
            "repeated": repeated,
            "repeated s": repeated * _ELEMENT_S / _WORKERS,
        }


def _noted(notes: Path) -> int:
    return notes.read_bytes().count(b"\n") if notes.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=3_000)
    parser.add_argument("--only", choices=["map", "model"])
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    own, flags = parser.parse_known_args()
    if own.run:
        run(own.run, own.folder, own.elements, flags)
        return
    results = {case: measure(case, own.elements, flags) for case in ([own.only] if own.only else ["map", "model"])}
    _measure.print_table(results)
    for case, figures in results.items():
        _measure.print_figure(f"{case}: seconds of work that were repeated", figures["repeated s"], at_most=_AT_MOST_S)


if __name__ == "__main__":
    main()
