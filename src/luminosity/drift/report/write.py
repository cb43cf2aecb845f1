"""Write the page of a test."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from luminosity.drift.history import PastTest
from luminosity.drift.kernels import Kernel
from luminosity.drift.report.page import Contents, page
from luminosity.drift.report.scatter import scatter
from luminosity.drift.report.witness_rows import Details, shown_rows
from luminosity.drift.result import MMDTestResult
from luminosity.drift.rows import as_rows, same_width
from luminosity.drift.sums.bin_sums import Progress
from luminosity.drift.witness_function import find_extremes, strongest_kernel
from luminosity.errors import DriftError

__all__ = ["write_report"]


def write_report(
    path: str | os.PathLike[str],
    result: MMDTestResult,
    reference: Any = None,
    current: Any = None,
    *,
    names: tuple[str, str] = ("reference", "current"),
    details: tuple[Details, Details] | None = None,
    kernel: Kernel | None = None,
    history: Sequence[PastTest] = (),
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> None:
    """One file of HTML that needs nothing else, for a browser or to be sent.

    Args:
      path: where to; what is there is replaced.
      result: of ``mmd_test``.
      reference: the rows that were compared, for the drawing of both and the rows that differ most.
      current: likewise.
      names: of the samples.
      details: for each sample a function of row numbers that says what else is known of these rows, as dictionaries:
        ``lambda numbers: table.take(numbers).to_pylist()``, say. Without, the rows' own numbers are shown.
      kernel: the one that says which rows differ most. By default the one of the result that sees most; of your own
        kernels the result has only the name, so these must be given.
      history: past tests, from ``DriftHistory.last``, the oldest first.
      settings: what else to tell about the test.
      progress: called with the tiles done and in all, while rows are scored.
    """
    drawn = extremes = None
    gone, new = [], []
    if reference is not None and current is not None:
        reference, current = as_rows(reference, "The reference"), as_rows(current, "The current sample")
        same_width(reference, current)
        extremes = find_extremes(reference, current, kernel or strongest_kernel(result), result.seed, progress)
        of_reference, of_current = details or (None, None)
        gone = shown_rows(extremes.gone, of_reference, reference)
        new = shown_rows(extremes.new, of_current, current)
        marked = [row.number for row in gone], [row.number for row in new]
        drawn = scatter(reference, current, marked, result.seed)
    contents = Contents(result, names, drawn, extremes, gone, new, history, settings or {})
    _write(os.fspath(path), page(contents))


def _write(path: str, text: str) -> None:
    """All of it or nothing: what was there stays until the new page is whole."""
    target = os.path.realpath(path)
    is_special = os.path.exists(target) and not os.path.isfile(target)  # /dev/stdout, say, which nothing may replace
    unfinished = target if is_special else f"{target}.{os.getpid()}.unfinished"
    try:
        try:
            with open(unfinished, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
            if not is_special:
                os.replace(unfinished, target)
        finally:
            if not is_special and os.path.exists(unfinished):
                os.remove(unfinished)
    except OSError as error:
        raise DriftError(f"{path}: can't write the report there; {error.strerror}") from error
