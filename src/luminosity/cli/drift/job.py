"""What ``lum drift`` does: read, project, test, and tell."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Mapping, Sequence
from mmap import mmap
from typing import Any

import numpy as np

from luminosity.cli.drift.report import Stages, as_json, as_told, settings_of, verdict
from luminosity.cli.drift.sources import Compared, Sample, Source, read_sample, source_of
from luminosity.cli.exits import DRIFT, print_ignoring_closed_pipe
from luminosity.drift.history import DriftHistory, PastTest
from luminosity.drift.pca import PCA, PCASums
from luminosity.drift.result import MMDTestResult
from luminosity.drift.rows import as_rows, same_width
from luminosity.errors import DriftError, OptionError
from luminosity.extras import require

__all__ = ["run"]

_COMPONENTS = 50
_PAST_TESTS = 100
_WIDEST = 8192  # numbers of a row, or rows if these are fewer: the matrix to take apart has half a gigabyte


def run(parsed: argparse.Namespace) -> int:
    began = time.monotonic()
    _check(parsed)
    history = DriftHistory(parsed.history) if parsed.history else None
    require("jax", "jax")
    with Stages() as stages:
        compared = _compared(parsed, stages)
        result = _tested(parsed, compared, stages)
        settings = settings_of(parsed, compared)
        this = _past_test(result, parsed, settings)
        if parsed.report:
            past = (
                [] if history is None else [*history.last(this.reference, this.columns, this.kernel, _PAST_TESTS - 1)]
            )
            _report(parsed, compared, result, [*past, this] if history else [], settings, stages)
        if history is not None:  # Last of all: a run that failed or was ended is made again, and counts once.
            history.append(this)
    seconds = time.monotonic() - began
    print_ignoring_closed_pipe(as_json(result, settings, seconds) if parsed.json else verdict(result, seconds))
    return DRIFT if result.drift else 0


def _check(parsed: argparse.Namespace) -> None:
    """What can be known before anything is read."""
    for name in ("reference", "current"):
        if not getattr(parsed, name).strip():
            raise OptionError(
                f"{name.upper()} is empty, expected a file, a folder or a pattern: is a variable not set?"
            )
    if parsed.bandwidth and parsed.kernel not in ("rbf", "laplacian"):
        raise OptionError("--bandwidth is of --kernel rbf or laplacian: give one of them, too")
    if parsed.permutations < 1 / parsed.level - 1:
        raise OptionError(
            f"--permutations={parsed.permutations}: expected at least {math.ceil(1 / parsed.level - 1)}, "
            f"since with fewer no p-value can be as low as --level={parsed.level:g}"
        )
    if parsed.report:
        folder = os.path.dirname(os.path.abspath(parsed.report))
        if not os.path.isdir(folder) or os.path.isdir(parsed.report):
            raise OptionError(f"--report={parsed.report}: expected the name of a file in a folder that is there")
        if not os.access(folder, os.W_OK):
            raise OptionError(f"--report={parsed.report}: can't write into the folder {folder}")


def _sources(parsed: argparse.Namespace) -> tuple[Source, Source]:
    columns = [name for text in parsed.column for name in text.split(",") if name]
    if parsed.column and not columns:
        raise OptionError(f"--column={parsed.column[0]}: expected the name of a column, or several: A,B")
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None:
        raise OptionError(f"--column={','.join(columns)}: {twice!r} is there twice")
    if columns and all(name.lower().endswith(".npy") for name in (parsed.reference, parsed.current)):
        raise OptionError("--column is of tables, and both samples are arrays of NumPy, which have no columns")
    if not all(name.lower().endswith(".npy") for name in (parsed.reference, parsed.current)):
        from luminosity.lean_beam import import_beam

        import_beam()
    return source_of(parsed.reference, columns), source_of(parsed.current, columns)


def _read(source: Source, parsed: argparse.Namespace, name: str, stages: Stages) -> Sample:
    told = getattr(parsed, name.lower())
    seed = 2 * parsed.seed + (name == "CURRENT")  # Rows in the same places of both must not be chosen together.
    sample = read_sample(source, parsed.rows, seed, parsed.skip_missing, stages.rows(f"reading {name}"))
    if len(sample.rows) < 2:
        left = f", and {sample.skipped:,} without a value" if sample.skipped else ""
        raise DriftError(f"{told} has {len(sample.rows)} rows to compare{left}; expected at least 2")
    return sample


def _compared(parsed: argparse.Namespace, stages: Stages) -> Compared:
    """Components are those of both samples together: of one alone they would tell the samples apart."""
    sources = _sources(parsed)
    samples = _read(sources[0], parsed, "REFERENCE", stages), _read(sources[1], parsed, "CURRENT", stages)
    reference, current = as_rows(samples[0].rows, parsed.reference), as_rows(samples[1].rows, parsed.current)
    same_width(reference, current)
    if len(sources[0].columns or sources[1].columns) > 1:
        reference, current = _scaled(reference, current)
    width = reference.shape[1]
    wanted = parsed.components if parsed.components is not None else _COMPONENTS if width > _COMPONENTS else 0
    if wanted > width:
        raise OptionError(f"--components={wanted}: the rows have {width} numbers, so that there are no more directions")
    if not wanted:
        return Compared(sources, samples, _in_memory(reference), _in_memory(current), None)
    stages.begin("projecting onto principal components")
    pca = _components(reference, current, wanted)
    return Compared(sources, samples, pca.transform(reference), pca.transform(current), pca)


def _in_memory(rows: Any) -> Any:
    """A copy of what lies in a file: if that is written anew during the test, the system ends the process."""
    return rows.copy() if _is_mapped(rows) else rows


def _is_mapped(rows: Any) -> bool:
    while isinstance(rows, np.ndarray):
        rows = rows.base
    return isinstance(rows, mmap)


def _components(reference: Any, current: Any, wanted: int) -> PCA:
    count, width = len(reference) + len(current), reference.shape[1]
    if min(count, width) > _WIDEST:
        raise OptionError(
            f"The rows have {width:,} numbers, and principal components of so many take too long: --components=0 "
            "compares rows as they are, and a random part of the rows, such as --rows=1000, is projected sooner"
        )
    if count < width:
        return PCA.fit(np.concatenate([reference, current]), min(wanted, count))
    sums = PCASums()
    sums.add(reference)
    sums.add(current)
    return sums.pca(wanted)


def _scaled(reference: Any, current: Any) -> tuple[Any, Any]:
    """Columns in units of their own spread, in both together: else years would count for nothing beside incomes."""
    sums = PCASums()
    sums.add(reference)
    sums.add(current)
    spread = (sums.scatter.diagonal() / sums.count) ** 0.5
    spread[spread == 0] = 1
    return (reference - sums.mean) / spread, (current - sums.mean) / spread


def _tested(parsed: argparse.Namespace, compared: Compared, stages: Stages) -> MMDTestResult:
    from luminosity.drift.mmd import mmd_test

    return mmd_test(
        compared.reference,
        compared.current,
        _kernel(parsed),
        permutations=parsed.permutations,
        level=parsed.level,
        seed=parsed.seed,
        progress=stages.tiles("comparing pairs of rows"),
    )


def _kernel(parsed: argparse.Namespace) -> Any:
    from luminosity.drift import RBF, Aggregate, Laplacian, Linear, Polynomial

    if parsed.kernel == "aggregate":
        return Aggregate()
    if parsed.kernel in ("linear", "polynomial"):
        return Linear() if parsed.kernel == "linear" else Polynomial()
    kind = RBF if parsed.kernel == "rbf" else Laplacian
    return [kind(each) for each in parsed.bandwidth or (None,)]


def _past_test(result: MMDTestResult, parsed: argparse.Namespace, settings: Mapping[str, Any]) -> PastTest:
    return PastTest.of(
        result,
        reference=_address(parsed.reference),
        current=_address(parsed.current),
        columns=settings["columns"],
        kernel=settings["kernel"],
        settings=settings,
    )


def _address(pattern: str) -> str:
    """The same file is the same from whatever folder it is named."""
    return pattern if "://" in pattern else os.path.abspath(pattern)


def _report(
    parsed: argparse.Namespace,
    compared: Compared,
    result: MMDTestResult,
    past: Sequence[PastTest],
    settings: Mapping[str, Any],
    stages: Stages,
) -> None:
    from luminosity.drift.report.write import write_report

    write_report(
        parsed.report,
        result,
        compared.reference,
        compared.current,
        names=(parsed.reference, parsed.current),
        details=(compared.details(0), compared.details(1)),
        history=past,
        settings=as_told(settings),
        progress=stages.tiles("looking for the rows that differ most"),
    )
