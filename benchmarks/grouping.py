"""3 GB grouped by key, one key holding 1 GB, with a memory budget of 512 MB: the memory that all processes take."""

from __future__ import annotations

import ast
import glob
import os
import random
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import _measure
import apache_beam as beam
import psutil

sys.path.append(str(Path(__file__).resolve().parent.parent))
from tests.processes import files_of_luminosity

_GIGABYTES = float(os.environ.get("GIGABYTES", "3"))
_VALUE_BYTES = 1000
_VALUES_OF_A_PART = 10_000
_PARTS = int(_GIGABYTES * 1e9 / _VALUE_BYTES / _VALUES_OF_A_PART)


def values_of(part: int) -> Iterator[tuple[str, bytes]]:
    """The same each time: a third under one key, the rest under a thousand; they do not compress."""
    noise = random.Random(part).randbytes(_VALUE_BYTES + _VALUES_OF_A_PART)
    for index in range(_VALUES_OF_A_PART):
        key = "hot" if index % 3 == 0 else f"key{(part * 7919 + index) % 1000}"
        yield key, noise[index : index + _VALUE_BYTES]


def fingerprint(key: str, values: Iterable[bytes]) -> tuple[str, int, int]:
    """The number of values, and a checksum that does not depend on their order."""
    count = checksum = 0
    for value in values:
        count += 1
        checksum += zlib.crc32(value)
    return key, count, checksum


def expected() -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for part in range(_PARTS):
        for key, value in values_of(part):
            count, checksum = found.get(key, (0, 0))
            found[key] = count + 1, checksum + zlib.crc32(value)
    return found


class PeakMemory(threading.Thread):
    """The most that this process, all below it and the run's files in shared memory took at once."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self._is_over = threading.Event()

    def __enter__(self) -> PeakMemory:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()

    def run(self) -> None:
        while not self._is_over.wait(0.1):
            # Files in shared memory are no process's, so that no PSS counts them.
            self.bytes = max(self.bytes, sum(map(_pss, _process_tree())) + _shared_memory_bytes())


def _process_tree() -> list[psutil.Process]:
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def _pss(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except psutil.Error:
        return 0  # it has just ended


def _shared_memory_bytes() -> int:
    files = [path for folder in files_of_luminosity("/dev/shm") for path in glob.glob(f"{folder}/*")]
    return sum(_file_bytes(path) for path in files)


def _file_bytes(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0  # it has just gone


def measure(budget: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, PeakMemory() as memory:

        def build(pipeline: beam.Pipeline) -> None:
            _ = (
                pipeline
                | beam.Create(range(_PARTS))
                | beam.Reshuffle()
                | beam.FlatMap(values_of)
                | beam.GroupByKey()
                | beam.MapTuple(fingerprint)
                | beam.io.WriteToText(f"{folder}/found")
            )

        seconds = _measure.run_ours(build, f"--memory_budget={budget}")
        lines = [line for path in Path(folder).glob("found*") for line in path.read_text().splitlines()]
    found = {key: (count, checksum) for key, count, checksum in map(ast.literal_eval, lines)}
    if found != expected() or len(lines) != len(found):
        raise ValueError("the groups are wrong")
    return {"seconds": seconds, "peak GB": memory.bytes / 1e9}


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    small, large = results["512 MB"], results["16 GB"]
    ratio = small["seconds"] / large["seconds"]
    print(f"groups are right on both sides; beyond the budget it took {ratio:.2f} times as long")
    _measure.print_figure("peak memory of all processes, in GB", small["peak GB"], at_most=1.5)


if __name__ == "__main__":
    _measure.main({"512 MB": lambda: measure("512MB"), "16 GB": lambda: measure("16GB")}, report)
