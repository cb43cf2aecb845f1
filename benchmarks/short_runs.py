"""Measures short runs from start to exit, each beside what people would take instead.

Each side is a fresh process with its imports, the sides of a row run in turns, and each result is checked. CPU seconds
are those of all processes that a side starts. Memory is the largest sum of their proportional set sizes. Of longer
runs, there are also the seconds from ``run()`` to the end ("run s"): Beam's ``RunInference`` imports torch if it is
there, which takes seconds on either side.

    python benchmarks/short_runs.py
    python benchmarks/short_runs.py --rows help create-map --rounds 5
    python benchmarks/short_runs.py --quick    # small sizes, one round, nothing to install
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import _measure
import _short_rows
from _short_rows import Row
from _whole_process import CPU, PROCESSES, PSS, RUN, SECONDS, Costs

import luminosity
from luminosity.cli import MODULES

NAMES = (
    "create-map",
    "predictions",
    "kafka-100",
    "kafka-20000",
    "kafka-140000",
    "texts",
    "help",
    "stream",
    "one-row",
    "state",
)
SLOW = {"kafka-20000", "kafka-140000", "texts"}  # left out by --quick
COLUMNS = {SECONDS: "{:.2f}", RUN: "{:.2f}", CPU: "{:.2f}", PSS: "{:.0f}", PROCESSES: "{:.0f}"}
FAILED = "FAILED, see above"


def row_of(name: str, own: argparse.Namespace, place: Path) -> Row:
    """Return the row of a name, in its size."""
    is_full = not own.quick
    match name:
        case "create-map":
            return _short_rows.create_map()
        case "predictions":
            rows = 1_000_000 if is_full else 50_000
            return _short_rows.predictions(rows, place / "source", place / "weights.npy", own.ray, is_full)
        case "kafka-100":
            return _short_rows.kafka(100, at_most_s=2)
        case "kafka-20000":
            return _short_rows.kafka(20_000, at_most_s=3)
        case "kafka-140000":
            return _short_rows.kafka(140_000, at_most_s=7)
        case "texts":
            return _short_rows.texts()
        case "help":
            return _short_rows.helps([*MODULES, "drift watch"] if is_full else ["run"])
        case "stream":
            return _short_rows.stream()
        case "one-row":
            return _short_rows.one_row(own.one_row_predictions if is_full else 32_000, is_full)
        case _:
            return _short_rows.state(300_000 if is_full else 10_000, is_full)


def measured(name: str, row: Row, rounds: int, place: Path) -> tuple[_measure.Results, set[str]]:
    """Return the medians of a row's sides, measured in turns, and the sides that failed."""
    results: dict[str, list[Costs]] = {side: [] for side in row.sides}
    failed: set[str] = set()
    for _ in range(rounds):
        for side, run in row.sides.items():
            if side in failed:
                continue
            folder = Path(tempfile.mkdtemp(dir=place))
            try:
                results[side].append(run(folder))
                print(f"{name}, {side}: {results[side][-1][SECONDS]:.2f} s", file=sys.stderr)
            except Exception as error:
                failed.add(side)
                print(f"FAILED: {name}, {side}: {error}", file=sys.stderr)
                if not isinstance(error, RuntimeError):
                    traceback.print_exc()
            finally:
                shutil.rmtree(folder)
    return {side: _measure.medians(each) for side, each in results.items() if side not in failed}, failed


def lines_of(name: str, row: Row, results: _measure.Results, failed: set[str]) -> list[list[str]]:
    """Return the cells of a row's sides."""
    alike = sorted(set(row.alike) & set(results), key=lambda side: results[side][SECONDS])
    shown = [side for side in row.sides if side not in alike[:-1]]
    lines: list[list[str]] = []
    for side in shown:
        costs = results.get(side, {})
        numbers = [text.format(costs[column]) if column in costs else "" for column, text in COLUMNS.items()]
        told = [target.told(results) for target in row.targets.get(side, [])]
        lines.append([name, side, *numbers, FAILED if side in failed else "; ".join(filter(None, told))])
    return lines


def print_lines(lines: list[list[str]]) -> None:
    head = ["row", "side", *COLUMNS, "target"]
    widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head) - 1)]
    for name, side, *numbers, told in (head, *lines):
        cells = [f"{name:<{widths[0]}}", f"{side:<{widths[1]}}"]
        cells += [f"{number:>{width}}" for number, width in zip(numbers, widths[2:], strict=True)]
        print("  ".join([*cells, told]).rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(NAMES)
    parser.add_argument("--rows", nargs="+", choices=NAMES, metavar="NAME", help=f"of {names} (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="the table has the medians (default: 3)")
    parser.add_argument(
        "--quick", action="store_true", help="one round of small sizes, fewer sides, and no peers to install"
    )
    parser.add_argument("--ray", action="store_true", help="measure Ray Data, too, which takes long")
    parser.add_argument("--one-row-predictions", type=int, default=1_000_000, metavar="N", help="default: 1,000,000")
    own = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes end and the folder is removed
    for folder in (Path(luminosity.__file__).parent, Path(__file__).parent):
        compileall.compile_dir(folder, quiet=2)
    lines: list[list[str]] = []
    print(f"{os.cpu_count()} cores; load at the start: {os.getloadavg()[0]:.1f}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="short-runs-") as place:
        os.environ |= {"LUMINOSITY_RUN_DIR": f"{place}/runs", "RAY_USAGE_STATS_ENABLED": "0", "DO_NOT_TRACK": "true"}
        for name in own.rows or [name for name in NAMES if not (own.quick and name in SLOW)]:
            row = row_of(name, own, Path(place))
            if own.quick:
                row.sides = {side: run for side, run in row.sides.items() if side not in row.not_quick}
            results, failed = measured(name, row, 1 if own.quick else own.rounds, Path(place))
            lines += lines_of(name, row, results, failed)
    print_lines(lines)
    print(f"load at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return 1 if any(line[-1] == FAILED for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
