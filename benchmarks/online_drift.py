"""Measures how long ``OnlineMMD`` runs before a false alarm, and how soon it detects a shift.

The run time is compared with the expected one. Each reference is fresh, and serves five runs on fresh streams. The mean
of 500 runs has a standard error of about 5%.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from luminosity.drift import AutocorrelationWarning, OnlineMMD

TARGET = 0.15  # the largest relative error of the run time
RUNS_PER_REFERENCE = 5
LONGEST = 20  # times the expected run time: longer runs are cut off
ROWS_AT_ONCE = 256
BEFORE_SHIFT = 200  # rows before a shift
DELAYS_UP_TO = 2000  # rows after a shift

Draw = Callable[[Any, int], Any]


def gaussian(width: int) -> Draw:
    """Draw independent standard normal numbers."""
    return lambda random, rows: random.normal(size=(rows, width))


def heavy_tailed(random: Any, rows: int) -> Any:
    """Draw from Student's t distribution."""
    return random.standard_t(3, size=(rows, 10))


def mixture(random: Any, rows: int) -> Any:
    """Draw three clusters; the smallest holds one row in twenty."""
    centres = np.zeros((3, 10))
    centres[1, 0], centres[2, 1] = 4, 6
    return random.normal(size=(rows, 10)) + centres[random.choice(3, size=rows, p=[0.6, 0.35, 0.05])]


@dataclass(frozen=True)
class Case:
    """A distribution, and the settings of its detectors."""

    name: str
    draw: Draw
    reference_rows: int
    window: int
    expected_run_time: int


CASES = [
    Case("normal, 5 columns", gaussian(5), 1000, 25, 300),
    Case("normal, 20 columns", gaussian(20), 2000, 50, 1000),
    Case("normal, 20 columns, the smallest reference allowed", gaussian(20), 500, 25, 300),
    Case("Student's t, 3 degrees of freedom, 10 columns", heavy_tailed, 1000, 25, 500),
    Case("three clusters, 10 columns", mixture, 2000, 50, 500),
]

SHIFTS: dict[str, Callable[[Any], Any]] = {
    "mean + 0.25": lambda rows: rows + 0.25,
    "mean + 0.5": lambda rows: rows + 0.5,
    "mean + 1": lambda rows: rows + 1,
    "scale x 1.25": lambda rows: rows * 1.25,
    "scale x 1.5": lambda rows: rows * 1.5,
    "scale x 2": lambda rows: rows * 2,
}


def detector_for(case: Case, random: Any, seed: int, simulations: int) -> OnlineMMD:
    """Return a detector with a fresh reference."""
    reference = case.draw(random, case.reference_rows)
    return OnlineMMD(
        reference,
        expected_run_time=case.expected_run_time,
        window=case.window,
        simulations=simulations,
        seed=seed,
    )


def run_time(detector: OnlineMMD, rows: Callable[[int], Any], limit: float) -> int:
    """Return the rows until the alarm, or the limit if there is none."""
    detector.reset()
    while not detector.drift_detected and detector.rows_seen < limit:
        detector.update(rows(ROWS_AT_ONCE))
    return detector.detected_at or detector.rows_seen


def run_times(case: Case, runs: int, simulations: int) -> Any:
    """Return the rows until a false alarm in each run."""
    random = np.random.default_rng(1)
    found: list[int] = []
    start = time.perf_counter()
    for seed in range(-(-runs // RUNS_PER_REFERENCE)):
        detector = detector_for(case, random, seed, simulations)
        for _ in range(min(RUNS_PER_REFERENCE, runs - len(found))):
            found.append(run_time(detector, lambda rows: case.draw(random, rows), LONGEST * case.expected_run_time))
        show(f"{case.name}: {len(found)} of {runs} runs, {time.perf_counter() - start:.0f} s")
    return np.array(found)


def print_run_times(case: Case, found: Any) -> None:
    """Print a row of the table of run times."""
    ratio = found.mean() / case.expected_run_time
    error = found.std() / np.sqrt(len(found)) / case.expected_run_time
    half = 1 - (1 - 1 / case.expected_run_time) ** (case.expected_run_time // 2)
    print(
        f"| {case.name} | {case.reference_rows:,} | {case.window} | {case.expected_run_time:,} "
        f"| {found.mean():,.0f} | {ratio:.2f} ± {error:.2f} | {'yes' if abs(ratio - 1) <= TARGET else 'no'} "
        f"| {found.std() / found.mean():.2f} | {(found <= case.expected_run_time // 2).mean():.2f} ({half:.2f}) "
        f"| {(found <= case.window).mean():.3f} ({1 - (1 - 1 / case.expected_run_time) ** case.window:.3f}) |",
        flush=True,
    )


def print_delays(case: Case, runs: int, simulations: int) -> None:
    """Print rows of the table of delays. Runs with a false alarm before the shift are left out."""
    random = np.random.default_rng(2)
    detectors = [detector_for(case, random, seed, simulations) for seed in range(5)]
    for name, shift in SHIFTS.items():
        delays: list[int] = []
        for number in range(runs):
            detector = detectors[number % len(detectors)]
            detector.reset()
            detector.update(case.draw(random, BEFORE_SHIFT))
            if detector.drift_detected:
                continue
            while not detector.drift_detected and detector.rows_seen < BEFORE_SHIFT + DELAYS_UP_TO:
                detector.update(shift(case.draw(random, ROWS_AT_ONCE)))
            delays.append((detector.detected_at or detector.rows_seen) - BEFORE_SHIFT)
            show(f"{case.name}, {name}: {number + 1} of {runs} runs")
        quantiles = np.quantile(delays, [0.5, 0.9])
        print(
            f"| {case.name} | {name} | {len(delays)} | {np.mean(delays):.1f} "
            f"| {quantiles[0]:.0f} | {quantiles[1]:.0f} |",
            flush=True,
        )


def print_dependent(case: Case, runs: int, simulations: int) -> None:
    """Print run times for rows that mix the previous row and a new one; the distribution of a row stays the same."""
    random = np.random.default_rng(3)
    detectors = [detector_for(case, random, seed, simulations) for seed in range(5)]
    for weight in (0.0, 0.1, 0.3, 0.5):
        found: list[int] = []
        flagged = 0
        for number in range(runs):
            last = [random.normal(size=5)]

            def rows(count: int, last: list[Any] = last, weight: float = weight) -> Any:
                made = []
                for new in random.normal(size=(count, 5)):
                    last[0] = weight * last[0] + np.sqrt(1 - weight**2) * new
                    made.append(last[0])
                return np.array(made)

            detector, other = (copy.deepcopy(detectors[number % len(detectors)]) for _ in range(2))
            found.append(run_time(detector, rows, LONGEST * case.expected_run_time))
            other.update(rows(2 * BEFORE_SHIFT))
            flagged += other.autocorrelated
            show(f"autocorrelation {weight}: {number + 1} of {runs} runs")
        print(f"| {weight} | {np.mean(found):.0f} | {flagged / runs:.0%} |", flush=True)


def show(line: str) -> None:
    """Show progress on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def main() -> None:
    """Run all cases, and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500, help="runs for each mean run time")
    parser.add_argument("--delays", type=int, default=100, help="runs for each shift")
    parser.add_argument("--simulations", type=int, default=500, help="false alarms to simulate for each calibration")
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="numbers of cases, from 0")
    options = parser.parse_args()
    warnings.simplefilter("ignore", AutocorrelationWarning)
    print(f"Without drift: rows until a false alarm, {options.runs} runs; target: within {TARGET:.0%}. In brackets")
    print("the values of a geometric distribution, whose standard deviation equals its mean.\n")
    print(
        "| rows | reference | window | expected | measured | ratio | within | deviation / mean | within half of it "
        "| while the window fills |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for number in options.cases:
        print_run_times(CASES[number], run_times(CASES[number], options.runs, options.simulations))
    if options.delays:
        print(f"\nRows until a shift of all columns is detected; it comes after {BEFORE_SHIFT} rows\n")
        print("| rows | shift | runs | mean | median | 90% |\n|---|---|---|---|---|---|")
        for case in CASES[:2]:
            print_delays(case, options.delays, options.simulations)
        print(f"\nRows that depend on the previous row ({CASES[0].name}, {CASES[0].expected_run_time} expected)\n")
        print(f"| autocorrelation | mean run time | flagged within {2 * BEFORE_SHIFT} rows |\n|---|---|---|")
        print_dependent(CASES[0], options.delays, options.simulations)


if __name__ == "__main__":
    main()
