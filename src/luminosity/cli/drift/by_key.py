"""The work of ``lum drift --by COLUMN``: one test for each value of a column.

The comparison itself is ``luminosity.drift.compare_keys``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

from luminosity.cli.common.output import ProgressLine, tell_who_reads
from luminosity.cli.common.table_options import TableReader
from luminosity.cli.drift.job import (
    EXIT_CODES,
    PAST_TESTS,
    address_of,
    begin,
    kernel_of,
    open_sources,
    warn_of_same_file,
)
from luminosity.cli.drift.report import describe_settings, print_verdicts, settings_by_key
from luminosity.cli.drift.sources import Source, read_keyed_sample
from luminosity.cli.drift.table_source import TableSource
from luminosity.drift.by_key import KeyedComparison, compare_keys
from luminosity.drift.history import DriftHistory, PastTest
from luminosity.drift.samples import SampledRows
from luminosity.errors import DriftError

__all__ = ["run"]

_MOST_KEYS = 10_000  # tests: more values are numbers or ids, not keys


def run(parsed: argparse.Namespace) -> int:
    """Run the command with its parsed options, and return its exit code."""
    began = time.monotonic()
    history = begin(parsed)
    reader = TableReader("drift", parsed.dead_letters)
    with ProgressLine() as progress, reader:
        sources = open_sources(parsed, reader)
        # The samples have different seeds: rows at the same positions of both must not be drawn together.
        reference = _read(sources[0], parsed, "REFERENCE", 2 * parsed.seed, progress)
        current = _read(sources[1], parsed, "CURRENT", 2 * parsed.seed + 1, progress)
        _check_types(parsed, reference, current)
        found = compare_keys(
            reference,
            current,
            kernel_of(parsed),
            by=parsed.by,
            scale=len(sources[0].columns) > 1,
            components=parsed.components,
            permutations=parsed.permutations,
            level=parsed.level,
            seed=parsed.seed,
            progress=progress.tiles(f"comparing values of {parsed.by}"),
        )
        read, skipped = ((_total(reference, name), _total(current, name)) for name in ("read", "skipped"))
        settings = {**settings_by_key(parsed, sources, read, skipped), **reader.as_dict()}
        tests = found.as_past_tests(
            reference=address_of(parsed.reference),
            current=address_of(parsed.current),
            columns=settings["columns"],
            kernel=settings["kernel"],
            settings=settings,
        )
        if parsed.report:
            found.write_report(
                parsed.report,
                names=(parsed.reference, parsed.current),
                details=(sources[0].details, sources[1].details),
                history=_past(history, found, tests),
                settings=describe_settings(settings),
                progress=progress.tiles("looking for the rows that differ most"),
            )
        if history is not None:  # Last: a run that failed or was interrupted is repeated, and counts once.
            history.append(*tests.values())
    warn_of_same_file(parsed.reference, parsed.current)
    if parsed.report:
        tell_who_reads("drift", parsed.report, "rows")
    print_verdicts(found, settings, time.monotonic() - began, as_json=parsed.json)
    return EXIT_CODES[found.verdict]


def _read(
    source: Source, parsed: argparse.Namespace, name: str, seed: int, progress: ProgressLine
) -> dict[Any, SampledRows]:
    assert isinstance(source, TableSource), "arrays are refused when they are opened with --by"
    sample = read_keyed_sample(source, parsed.rows, seed, parsed.skip_missing, progress.rows(f"reading {name}"))
    pattern = getattr(parsed, name.lower())
    if not sample:
        raise DriftError(f"{pattern} has no rows, expected at least 2")
    if not any(len(each.rows) for each in sample.values()):  # Otherwise, every key would be called gone or new.
        skipped = _total(sample, "skipped")
        raise DriftError(f"{pattern} has no rows to compare, and {skipped:,} with missing values; expected at least 2")
    if len(sample) > _MOST_KEYS:
        raise DriftError(
            f"{pattern}: column {parsed.by!r} has {len(sample):,} different values, expected at most {_MOST_KEYS:,}",
            fix="use --by with a column of fewer values",
        )
    return sample


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


def _total(samples: Mapping[Any, SampledRows], name: str) -> int:
    return sum(getattr(sample, name) for sample in samples.values())


def _past(
    history: DriftHistory | None, found: KeyedComparison, tests: Mapping[Any, PastTest]
) -> dict[Any, list[PastTest]]:
    """Return the past tests of each key that drifted, with the test of now."""
    if history is None:
        return {}
    return {
        key: [*history.last(test.reference, test.columns, test.kernel, PAST_TESTS - 1, key=test.key), test]
        for key, test in tests.items()
        if key in found.comparisons and test.drift
    }
