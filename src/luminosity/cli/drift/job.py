"""The work of ``lum drift``: read both samples, compare them, write the report and the history, print the verdict.

The comparison itself is a ``luminosity.drift.contract.DriftTest``; with ``--by``, one for each value of a column.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from luminosity.cli.common.exits import DRIFT, TOO_FEW_ROWS
from luminosity.cli.common.mlflow_run import MlflowRun
from luminosity.cli.common.options import flag
from luminosity.cli.common.output import ProgressLine, check_report, tell_who_reads
from luminosity.cli.common.table_options import TableReader, csv_arguments
from luminosity.cli.drift.report import (
    describe_settings,
    keyed_result,
    print_verdict,
    print_verdicts,
    settings_of,
    whole_result,
)
from luminosity.cli.drift.sources import (
    Source,
    open_source,
    read_columns,
    read_keyed_columns,
    read_keyed_sample,
    read_sample,
)
from luminosity.cli.drift.table_source import TableSource
from luminosity.drift.by_key import KeyedComparison, compare_keys_with, key_text
from luminosity.drift.contract import Comparison, DriftOption, DriftTest, check_options
from luminosity.drift.history import DriftHistory
from luminosity.drift.registry import drift_test, options_by_name
from luminosity.drift.result import DriftResult, PastTest
from luminosity.errors import DriftError, OptionError

__all__ = ["run"]

_EXIT_CODES = {"drift": DRIFT, "no drift": 0, "too few rows": TOO_FEW_ROWS}
_PAST_TESTS = 100  # tests in the chart of a report, this one included
_MOST_KEYS = 10_000  # tests: more values are numbers or ids, not keys
_OF_ROWS = ("rows", "skip_missing")  # options of all tests that read rows


def run(parsed: argparse.Namespace) -> int:
    """Run the command with its parsed options, and return its exit code."""
    began = time.monotonic()
    test = _test(parsed)
    mlflow = MlflowRun("drift", parsed.mlflow)
    history = DriftHistory(parsed.history) if parsed.history else None
    reader = TableReader("drift", parsed.dead_letters)
    with ProgressLine() as progress, reader:
        sources = _open_sources(parsed, reader, test.reads)
        test = test.for_columns(len(sources[0].columns or sources[1].columns))
        work = _one_test if parsed.by is None else _test_by_key
        found, settings = work(parsed, test, sources, history, progress, reader)
    _warn_of_same_file(parsed.reference, parsed.current)
    if parsed.report:
        tell_who_reads("drift", parsed.report, "rows" if test.reads == "rows" else "values")
    seconds = time.monotonic() - began
    if isinstance(found, KeyedComparison):
        print_verdicts(found, settings, seconds, as_json=parsed.json)
        verdict, result = found.verdict, keyed_result(found, settings, seconds)
        numbers = {
            f"{name}/{key_text(key)}": value for key, each in found.results.items() for name, value in _numbers(each)
        }
    else:
        print_verdict(found.result, settings, seconds, as_json=parsed.json)
        verdict, result = found.result.verdict, whole_result(found.result, settings, seconds)
        numbers = dict(_numbers(found.result))
    name = f"{parsed.reference} {parsed.current}"
    return mlflow.log(name, numbers, describe_settings(settings), result, parsed.report, _EXIT_CODES[verdict])


def _numbers(result: DriftResult) -> list[tuple[str, float]]:
    """Return what MLflow can chart."""
    rows = [("reference_rows", result.reference_rows), ("current_rows", result.current_rows)]
    return [
        ("drift", int(result.drift)),
        ("p_value", result.p_value),
        ("effect", result.effect),
        ("level", result.level),
        *rows,
    ]


def _one_test(
    parsed: argparse.Namespace,
    test: DriftTest,
    sources: tuple[Source, Source],
    history: DriftHistory | None,
    progress: ProgressLine,
    reader: TableReader,
) -> tuple[Comparison[Any], dict[str, Any]]:
    # The samples have different seeds: rows at the same positions of both must not be drawn together.
    reference = _read(sources[0], parsed, test, "REFERENCE", 2 * parsed.seed, progress)
    current = _read(sources[1], parsed, test, "CURRENT", 2 * parsed.seed + 1, progress)
    progress.begin("preparing rows")
    found = test.compare(
        reference,
        current,
        level=parsed.level,
        seed=parsed.seed,
        names=(parsed.reference, parsed.current),
        progress=progress.tiles("comparing pairs of rows"),
    )
    settings = {**settings_of(parsed, test, sources, found.settings()), **reader.as_dict()}
    this = found.as_past_test(**_row(parsed, settings, test))
    if parsed.report:
        past: list[PastTest] = []
        if history is not None:
            past = [*history.last(this.reference, this.columns, this.kernel, _PAST_TESTS - 1), this]
        found.write_report(
            parsed.report,
            names=(parsed.reference, parsed.current),
            details=(sources[0].details, sources[1].details),
            history=past,
            settings=describe_settings(settings),
            progress=progress.tiles("looking for the rows that differ most"),
        )
    if history is not None:  # Last: a run that failed or was interrupted is repeated, and counts once.
        history.append(this)
    return found, settings


def _test_by_key(
    parsed: argparse.Namespace,
    test: DriftTest,
    sources: tuple[Source, Source],
    history: DriftHistory | None,
    progress: ProgressLine,
    reader: TableReader,
) -> tuple[KeyedComparison, dict[str, Any]]:
    reference = _read_keys(sources[0], parsed, test, "REFERENCE", 2 * parsed.seed, progress)
    current = _read_keys(sources[1], parsed, test, "CURRENT", 2 * parsed.seed + 1, progress)
    _check_types(parsed, reference, current)
    found = compare_keys_with(
        test,
        reference,
        current,
        by=parsed.by,
        level=parsed.level,
        seed=parsed.seed,
        progress=progress.tiles(f"comparing values of {parsed.by}"),
    )
    read = [sum(_facts(test, each)[0] for each in side.values()) for side in (reference, current)]
    skipped = [sum(_facts(test, each)[1] for each in side.values()) for side in (reference, current)]
    prepared = {"rows_read": read, "rows_skipped": skipped}
    settings = {**settings_of(parsed, test, sources, prepared), **reader.as_dict()}
    tests = found.as_past_tests(**_row(parsed, settings, test))
    if parsed.report:
        found.write_report(
            parsed.report,
            names=(parsed.reference, parsed.current),
            details=(sources[0].details, sources[1].details),
            history=_past(history, found, tests),
            settings=describe_settings(settings),
            progress=progress.tiles("looking for the rows that differ most"),
        )
    if history is not None:
        history.append(*tests.values())
    return found, settings


def _test(parsed: argparse.Namespace) -> DriftTest:
    """Return the test that the options name. Raise for options that are known to be wrong before any file is read."""
    for name in ("reference", "current"):
        if not getattr(parsed, name).strip():
            raise OptionError(
                f"{name.upper()} is empty, expected a file, a folder or a pattern; perhaps a shell variable is not set"
            )
    kind = drift_test(parsed.test)
    names = (*options_by_name(), *(() if kind.reads == "rows" else _OF_ROWS))
    given = {name: value for name in names if (value := getattr(parsed, name)) is not None and value is not False}
    check_options(kind, given, flag)
    options = {each.name: _value(each, given[each.name]) for each in kind.options if each.name in given}
    found = kind.from_options(options, parsed.level)
    check_report(parsed.report)
    return found


def _value(option: DriftOption, text: str) -> Any:
    try:
        return option.parsed(text)
    except ValueError as error:
        raise OptionError(f"{flag(option.name)}={text}: {error}") from None


def _open_sources(parsed: argparse.Namespace, reader: TableReader, reads: str) -> tuple[Source, Source]:
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
    return (
        open_source(parsed.reference, columns, reader, parsed.by, of_reference, reads=reads),
        open_source(parsed.current, columns, reader, parsed.by, of_current, reads=reads),
    )


def _read(
    source: Source, parsed: argparse.Namespace, test: DriftTest, name: str, seed: int, progress: ProgressLine
) -> Any:
    on_rows = progress.rows(f"reading {name}")
    if test.reads == "columns":
        sample: Any = read_columns(source, on_rows)
    else:
        sample = read_sample(source, parsed.rows, seed, parsed.skip_missing, on_rows)
    if test.rows_of(sample) < 2:
        skipped = _facts(test, sample)[1]
        left = f", and {skipped:,} with missing values" if skipped else ""
        count = "one row" if test.rows_of(sample) else "no rows"
        pattern = getattr(parsed, name.lower())
        raise DriftError(f"{pattern} has {count} to compare{left}; expected at least 2")
    return sample


def _read_keys(
    source: Source, parsed: argparse.Namespace, test: DriftTest, name: str, seed: int, progress: ProgressLine
) -> dict[Any, Any]:
    assert isinstance(source, TableSource), "arrays are refused when they are opened with --by"
    on_rows = progress.rows(f"reading {name}")
    if test.reads == "columns":
        sample: dict[Any, Any] = read_keyed_columns(source, parsed.by, on_rows)
    else:
        sample = dict(read_keyed_sample(source, parsed.rows, seed, parsed.skip_missing, on_rows))
    pattern = getattr(parsed, name.lower())
    if not sample:
        raise DriftError(f"{pattern} has no rows, expected at least 2")
    if not any(test.rows_of(each) for each in sample.values()):  # Otherwise, every key would be called gone or new.
        skipped = sum(_facts(test, each)[1] for each in sample.values())
        raise DriftError(f"{pattern} has no rows to compare, and {skipped:,} with missing values; expected at least 2")
    if len(sample) > _MOST_KEYS:
        raise DriftError(
            f"{pattern}: column {parsed.by!r} has {len(sample):,} different values, expected at most {_MOST_KEYS:,}",
            fix="use --by with a column of fewer values",
        )
    return sample


def _facts(test: DriftTest, sample: Any) -> tuple[int, int]:
    """Return how many rows were read for a sample, and how many of them were left out."""
    return (sample.read, sample.skipped) if test.reads == "rows" else (sample.rows, 0)


def _check_types(parsed: argparse.Namespace, reference: Mapping[Any, Any], current: Mapping[Any, Any]) -> None:
    """Raise an error if the keys are texts in one table and numbers in the other: no key would be in both."""
    kinds = [{isinstance(key, str) for key in keys if key is not None} for keys in (reference, current)]
    if all(kinds) and not kinds[0] & kinds[1]:
        names = ["texts" if True in each else "numbers or dates" for each in kinds]
        raise DriftError(
            f"column {parsed.by!r} holds {names[0]} in {parsed.reference} and {names[1]} in {parsed.current}, expected "
            "the same type in both",
            fix="cast it in one of the tables",
        )


def _row(parsed: argparse.Namespace, settings: Mapping[str, Any], test: DriftTest) -> dict[str, Any]:
    """Return what a row of a history says beside the result."""
    return {
        "reference": _address_of(parsed.reference),
        "current": _address_of(parsed.current),
        "columns": settings["columns"],
        "kernel": test.setup,
        "settings": settings,
    }


def _past(
    history: DriftHistory | None, found: KeyedComparison, tests: Mapping[Any, PastTest]
) -> dict[Any, list[PastTest]]:
    """Return the past tests of each key that drifted, with the test of now."""
    if history is None:
        return {}
    return {
        key: [*history.last(test.reference, test.columns, test.kernel, _PAST_TESTS - 1, key=test.key), test]
        for key, test in tests.items()
        if key in found.comparisons and test.drift
    }


def _warn_of_same_file(reference: str, current: str) -> None:
    """Print a warning if a file, a folder or a pattern was compared with itself."""
    is_same = _address_of(reference) == _address_of(current)
    if is_same or (os.path.exists(reference) and os.path.exists(current) and os.path.samefile(reference, current)):
        print(f"lum drift: REFERENCE and CURRENT are the same file or pattern: {reference}", file=sys.stderr)


def _address_of(pattern: str) -> str:
    """Return a name that is the same from whatever folder the file is named."""
    return pattern if "://" in pattern else os.path.abspath(pattern)
