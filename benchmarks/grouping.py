"""Group 3 GB with a memory budget of 512 MB, one key holding 1 GB; the memory that the whole process tree takes."""

from __future__ import annotations

import argparse
import random
import threading
import time
import zlib
from collections.abc import Iterable, Iterator

import apache_beam as beam
import psutil
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import LuminosityRunner

_VALUE_BYTES = 1000
_PART_VALUES = 10_000
_HOT_KEY = "hot"


def values_of(part: int) -> Iterator[tuple[str, bytes]]:
    """The same each time: a third under one key, the rest under a thousand."""
    noise = random.Random(part).randbytes(_VALUE_BYTES + _PART_VALUES)
    for index in range(_PART_VALUES):
        key = _HOT_KEY if index % 3 == 0 else f"key{(part * 7919 + index) % 1000}"
        yield key, noise[index : index + _VALUE_BYTES]


def fingerprint(key: str, values: Iterable[bytes]) -> tuple[str, int, int, int]:
    """Key, number, bytes, and a checksum that does not depend on the order."""
    count = size = checksum = 0
    for value in values:
        count += 1
        size += len(value)
        checksum += zlib.crc32(value)
    return key, count, size, checksum


def expected(parts: int) -> dict[str, tuple[int, int, int]]:
    found: dict[str, tuple[int, int, int]] = {}
    for part in range(parts):
        for key, value in values_of(part):
            count, size, checksum = found.get(key, (0, 0, 0))
            found[key] = count + 1, size + len(value), checksum + zlib.crc32(value)
    return found


class PeakMemory(threading.Thread):
    """The most that this process and all below it took at once (PSS), and what lay in shared memory files."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.is_over = threading.Event()

    def run(self) -> None:
        me = psutil.Process()
        while not self.is_over.wait(0.2):
            total = 0
            for process in (me, *me.children(recursive=True)):
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue  # it has just ended
            self.peak = max(self.peak, total + shared_memory_bytes())


def shared_memory_bytes() -> int:
    """Files in shared memory are no process's, so no PSS counts them."""
    return psutil.disk_usage("/dev/shm").used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--memory_budget", default="512MB")
    arguments = parser.parse_args()
    parts = int(arguments.gigabytes * 1e9 / _VALUE_BYTES / _PART_VALUES)
    memory = PeakMemory()
    memory.start()
    found: dict[str, tuple[int, int, int]] = {}
    started = time.monotonic()
    options = PipelineOptions([f"--memory_budget={arguments.memory_budget}", "--progress=plain"])
    with beam.Pipeline(runner=LuminosityRunner(), options=options) as pipeline:
        _ = (
            pipeline
            | beam.Create(range(parts))
            | beam.Reshuffle()
            | beam.FlatMap(values_of)
            | beam.GroupByKey()
            | beam.MapTuple(fingerprint)
            | beam.Map(repr)
            | beam.io.WriteToText("/tmp/grouping-result")
        )
    seconds = time.monotonic() - started
    memory.is_over.set()
    memory.join()
    print(f"{seconds:.1f} s, peak {memory.peak / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
