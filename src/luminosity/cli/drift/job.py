"""The work of ``lum drift``: read both samples, compare them, write the report and the history, print the verdict.

The comparison itself is ``luminosity.drift.prepare_samples``, ``mmd_test`` and ``SampleComparison``.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from luminosity.cli.common.exits import DRIFT, TOO_FEW_ROWS
from luminosity.cli.common.output import ProgressLine, check_report, tell_who_reads
from luminosity.cli.common.table_options import TableReader, csv_arguments
from luminosity.cli.drift.report import describe_settings, print_verdict, settings_of
from luminosity.cli.drift.sources import Source, open_source, read_sample
from luminosity.drift.compare import SampleComparison, compare_prepared
from luminosity.drift.history import DriftHistory, PastTest
from luminosity.drift.samples import SampledRows, prepare_samples
from luminosity.errors import DriftError, OptionError
from luminosity.extras import require

__all__ = ["EXIT_CODES", "PAST_TESTS", "address_of", "begin", "kernel_of", "open_sources", "run", "warn_of_same_file"]

EXIT_CODES = {"drift": DRIFT, "no drift": 0, "too few rows": TOO_FEW_ROWS}
PAST_TESTS = 100  # tests in the chart of a report, this one included


def run(parsed: argparse.Namespace) -> int:
    """Run the command with its parsed options, and return its exit code."""
    began = time.monotonic()
    history = begin(parsed)
    reader = TableReader("drift", parsed.dead_letters)
    with ProgressLine() as progress, reader:
        sources = open_sources(parsed, reader)
        comparison = _compare(parsed, sources, progress)
        settings = {**settings_of(parsed, sources, comparison.samples), **reader.as_dict()}
        this = _past_test(parsed, comparison, settings)
        if parsed.report:
            past: list[PastTest] = []
            if history is not None:
                past = [*history.last(this.reference, this.columns, this.kernel, PAST_TESTS - 1), this]
            comparison.write_report(
                parsed.report,
                names=(parsed.reference, parsed.current),
                details=(sources[0].details, sources[1].details),
                history=past,
                settings=describe_settings(settings),
                progress=progress.tiles("looking for the rows that differ most"),
            )
        if history is not None:  # Last: a run that failed or was interrupted is repeated, and counts once.
            history.append(this)
    seconds = time.monotonic() - began
    result = comparison.result
    warn_of_same_file(parsed.reference, parsed.current)
    if parsed.report:
        tell_who_reads("drift", parsed.report, "rows")
    print_verdict(result, settings, seconds, as_json=parsed.json)
    return EXIT_CODES[result.verdict]


def begin(parsed: argparse.Namespace) -> DriftHistory | None:
    """Check the options, and open the history if one is requested."""
    require("jax", "jax")  # before anything is read or written
    _check(parsed)
    return DriftHistory(parsed.history) if parsed.history else None


def warn_of_same_file(reference: str, current: str) -> None:
    """Print a warning if a file, a folder or a pattern was compared with itself."""
    is_same = address_of(reference) == address_of(current)
    if is_same or (os.path.exists(reference) and os.path.exists(current) and os.path.samefile(reference, current)):
        print(f"lum drift: REFERENCE and CURRENT are the same file or pattern: {reference}", file=sys.stderr)


def _check(parsed: argparse.Namespace) -> None:
    """Raise an error for options that are known to be wrong before any file is read."""
    for name in ("reference", "current"):
        if not getattr(parsed, name).strip():
            raise OptionError(
                f"{name.upper()} is empty, expected a file, a folder or a pattern; perhaps a shell variable is not set"
            )
    if parsed.bandwidth and parsed.kernel not in ("rbf", "laplacian"):
        raise OptionError(
            f"found --bandwidth with --kernel {parsed.kernel}, which has no bandwidth",
            fix="remove --bandwidth, or use --kernel rbf or laplacian",
        )
    if parsed.permutations < 1 / parsed.level - 1:
        raise OptionError(
            f"--permutations={parsed.permutations}: expected at least {math.ceil(1 / parsed.level - 1)}, "
            f"since with fewer no p-value can be as low as --level={parsed.level:g}"
        )
    check_report(parsed.report)


def open_sources(parsed: argparse.Namespace, reader: TableReader) -> tuple[Source, Source]:
    """Open both samples with the columns of ``--column`` and ``--by``."""
    columns = [name for text in parsed.column for name in text.split(",") if name]
    if parsed.column and not columns:
        raise OptionError(f"--column={parsed.column[0]}: expected the name of a column, or several: A,B")
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None:
        raise OptionError(f"--column={','.join(columns)}: found {twice!r} twice, expected every column once")
    are_arrays = all(name.lower().endswith(".npy") for name in (parsed.reference, parsed.current))
    if columns and are_arrays:
        raise OptionError("--column is for tables, but both samples are NumPy arrays, which have no columns")
    if not are_arrays:
        from luminosity.beam_fixes.lean_beam import import_beam

        import_beam()
    of_reference, of_current = csv_arguments(parsed, parsed.reference, parsed.current)
    reference = open_source(parsed.reference, columns, reader, parsed.by, of_reference)
    return reference, open_source(parsed.current, columns, reader, parsed.by, of_current)


def _compare(parsed: argparse.Namespace, sources: tuple[Source, Source], progress: ProgressLine) -> SampleComparison:
    # The samples have different seeds: rows at the same positions of both must not be drawn together.
    reference = _read(sources[0], parsed, "REFERENCE", 2 * parsed.seed, progress)
    current = _read(sources[1], parsed, "CURRENT", 2 * parsed.seed + 1, progress)
    progress.begin("preparing rows")
    samples = prepare_samples(
        reference,
        current,
        scale=len(sources[0].columns or sources[1].columns) > 1,
        components=parsed.components,
        names=(parsed.reference, parsed.current),
    )
    return compare_prepared(
        samples,
        kernel_of(parsed),
        permutations=parsed.permutations,
        level=parsed.level,
        seed=parsed.seed,
        progress=progress.tiles("comparing pairs of rows"),
    )


def _read(source: Source, parsed: argparse.Namespace, name: str, seed: int, progress: ProgressLine) -> SampledRows:
    sample = read_sample(source, parsed.rows, seed, parsed.skip_missing, progress.rows(f"reading {name}"))
    if len(sample.rows) < 2:
        left = f", and {sample.skipped:,} with missing values" if sample.skipped else ""
        count = "one row" if len(sample.rows) else "no rows"
        pattern = getattr(parsed, name.lower())
        raise DriftError(f"{pattern} has {count} to compare{left}; expected at least 2")
    return sample


def kernel_of(parsed: argparse.Namespace) -> Any:
    """Return the kernel that the options name."""
    from luminosity.drift import RBF, Aggregate, Laplacian, Linear, Polynomial

    if parsed.kernel == "aggregate":
        return Aggregate()
    if parsed.kernel in ("linear", "polynomial"):
        return Linear() if parsed.kernel == "linear" else Polynomial()
    kind = RBF if parsed.kernel == "rbf" else Laplacian
    return [kind(each) for each in parsed.bandwidth or (None,)]


def _past_test(parsed: argparse.Namespace, comparison: SampleComparison, settings: Mapping[str, Any]) -> PastTest:
    return comparison.as_past_test(
        reference=address_of(parsed.reference),
        current=address_of(parsed.current),
        columns=settings["columns"],
        kernel=settings["kernel"],
        settings=settings,
    )


def address_of(pattern: str) -> str:
    """Return a name that is the same from whatever folder the file is named."""
    return pattern if "://" in pattern else os.path.abspath(pattern)
