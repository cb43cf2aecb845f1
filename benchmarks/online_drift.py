"""How long `OnlineMMD` runs before a false alarm, against the run time asked for, and how soon it sees a shift.

Each reference is fresh, and serves five runs on fresh streams. Of 500 runs the mean has a standard error of about 5%.
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

TARGET = 0.15
RUNS_PER_REFERENCE = 5
LONGEST = 20  # times the expected run time, before a run is given up
ROWS_AT_ONCE = 256
BEFORE_SHIFT = 200
DELAYS_UP_TO = 2000

Draw = Callable[[Any, int], Any]


def gaussian(width: int) -> Draw:
    return lambda random, rows: random.normal(size=(rows, width))


def heavy_tailed(random: Any, rows: int) -> Any:
    return random.standard_t(3, size=(rows, 10))


def mixture(random: Any, rows: int) -> Any:
    """Three clusters, of which the smallest holds a row in twenty."""
    centres = np.zeros((3, 10))
    centres[1, 0], centres[2, 1] = 4, 6
    return random.normal(size=(rows, 10)) + centres[random.choice(3, size=rows, p=[0.6, 0.35, 0.05])]


@dataclass(frozen=True)
class Case:
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
    reference = case.draw(random, case.reference_rows)
    return OnlineMMD(
        reference,
        expected_run_time=case.expected_run_time,
        window=case.window,
        simulations=simulations,
        seed=seed,
    )


def run_time(detector: OnlineMMD, rows: Callable[[int], Any], limit: float) -> int:
    """Rows until the alarm; without one, the limit."""
    detector.reset()
    while not detector.drift_detected and detector.rows_seen < limit:
        detector.update(rows(ROWS_AT_ONCE))
    return detector.detected_at or detector.rows_seen


def run_times(case: Case, runs: int, simulations: int) -> Any:
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
    """Runs with a false alarm before the shift are left out."""
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
    """Each row is a mixture of the one before and a new one: the distribution of a single row stays as it is."""
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
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500, help="for each mean run time")
    parser.add_argument("--delays", type=int, default=100, help="runs for each shift")
    parser.add_argument("--simulations", type=int, default=500, help="false alarms to simulate for each calibration")
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="their numbers, from 0")
    options = parser.parse_args()
    warnings.simplefilter("ignore", AutocorrelationWarning)
    print(
        f"Without drift: rows until a false alarm, {options.runs} runs; target: within {TARGET:.0%}. In brackets what"
    )
    print("a geometric distribution has, whose standard deviation is its mean.\n")
    print(
        "| rows | reference | window | asked for | measured | ratio | within | deviation / mean | up to half of it "
        "| while the window fills |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for number in options.cases:
        print_run_times(CASES[number], run_times(CASES[number], options.runs, options.simulations))
    if options.delays:
        print(f"\nAfter a shift of all columns, {BEFORE_SHIFT} rows after the beginning: rows until it is detected\n")
        print("| rows | shift | runs | mean | median | 90% |\n|---|---|---|---|---|---|")
        for case in CASES[:2]:
            print_delays(case, options.delays, options.simulations)
        print(f"\nRows that depend on the one before ({CASES[0].name}, {CASES[0].expected_run_time} asked for)\n")
        print(f"| autocorrelation | mean run time | flagged within {2 * BEFORE_SHIFT} rows |\n|---|---|---|")
        print_dependent(CASES[0], options.delays, options.simulations)


if __name__ == "__main__":
    main()
