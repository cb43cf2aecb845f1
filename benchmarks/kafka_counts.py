"""Counts records of Kafka by key in state, beside bytewax: records a second beyond the start of a process.

Kafka → JSON → a count for each of 1,000 keys → Kafka, from and to one mock broker in a process of its own. Each side
runs with few records and with many; its rate is the difference of the records over the difference of the seconds.

    python benchmarks/kafka_counts.py
    python benchmarks/kafka_counts.py --records 200000 --rounds 1
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import _counts
import _kafka
import _measure
import _others
from _short_rows import BYTEWAX
from _whole_process import SECONDS, measure

_SHORT = Path(__file__).resolve().parent / "short"
_FEW, _KEYS, _PARTITIONS = 1_000, 1_000, 16  # the mock broker keeps about 4.4 MB of a partition
_BYTEWAX_1, _BYTEWAX_2 = "bytewax, one worker", "bytewax, two threads"
_ONE, _TWO, _TABLES = "one worker", "two workers", "two workers, tables"


def ours(*flags: str) -> Callable[[str], list[str]]:
    return lambda servers: [
        sys.executable, str(_SHORT / "count_by_luminosity.py"), servers, "--progress=off", *flags
    ]  # fmt: skip


def bytewax(python: str, *flags: str) -> Callable[[str], list[str]]:
    flow = partial("{}:flow('{}')".format, _SHORT / "count_by_bytewax.py")
    return lambda servers: [python, "-m", "bytewax.run", *flags, flow(servers)]


def seconds(command: Callable[[str], list[str]], records: int, place: Path) -> float:
    with _kafka.BrokerProcess(partitions=_PARTITIONS) as broker:
        servers = broker.servers
        _counts.fill(servers, records, _KEYS)
        costs = measure(command(servers), place, lambda _: _counts.check(servers, records, _KEYS, _PARTITIONS))
    return costs[SECONDS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=400_000, help="default: 400,000")
    parser.add_argument("--rounds", type=int, default=3, help="the table has the medians (default: 3)")
    own = parser.parse_args()
    python = _others.python_with(*BYTEWAX)
    sides = {
        _BYTEWAX_1: bytewax(python),
        _BYTEWAX_2: bytewax(python, "-w", "2"),
        _ONE: ours("--cpu_workers=1"),
        _TWO: ours("--cpu_workers=2"),
        _TABLES: ours("--cpu_workers=2", "tables"),
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory(prefix="kafka-counts-") as folder:
        os.environ["LUMINOSITY_RUN_DIR"] = f"{folder}/runs"
        for _ in range(own.rounds):
            for name, command in sides.items():
                few = seconds(command, _FEW, Path(folder))
                many = seconds(command, own.records, Path(folder))
                rates[name].append((own.records - _FEW) / (many - few))
                print(f"{name}: {few:.2f} s, {many:.2f} s", file=sys.stderr)
    medians = {name: median(each) for name, each in rates.items()}
    best = max(medians[_BYTEWAX_1], medians[_BYTEWAX_2])
    _measure.print_figures(
        [
            *(_measure.Figure(f"{name}, records/s", rate) for name, rate in medians.items()),
            _measure.Figure("two workers / the best of bytewax", medians[_TWO] / best, at_least=1.0),
            _measure.Figure("one worker / the best of bytewax", medians[_ONE] / best, at_least=0.7),
            _measure.Figure("tables / the best of bytewax", medians[_TABLES] / best),
        ]
    )
    print(f"load at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
