"""Writes the HTML report of a test."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from luminosity.drift.history import PastTest
from luminosity.drift.kernels import Kernel
from luminosity.drift.mmd_result import MMDTestResult
from luminosity.drift.report.page import Contents, page
from luminosity.drift.report.scatter import POINTS, scatter
from luminosity.drift.report.witness_rows import shown_rows, witness_tables
from luminosity.drift.result import Details, Progress
from luminosity.drift.rows import as_rows, same_width
from luminosity.drift.witness_function import find_extremes, strongest_kernel
from luminosity.errors import DriftError
from luminosity.report_page.document import section, write_page
from luminosity.report_page.markup import Markup

__all__ = ["sections_of_rows", "write_report"]

_OF_BOTH = (
    f"At most {POINTS:,} random rows of each sample. Rows of several numbers are shown along the two directions in "
    "which both samples together vary most. Samples can differ in directions that this chart does not show."
)


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
    """Write the report of a test as one HTML file, which loads nothing from the network.

    Args:
      path: the file to write; an existing file is replaced.
      result: the result of ``mmd_test``.
      reference: the rows that were compared, for the chart of both samples and the rows that differ most.
      current: likewise.
      names: the names of the samples.
      details: for each sample, a function that takes row numbers and returns a dictionary for each row, such as
        ``lambda numbers: table.take(numbers).to_pylist()``. By default the report shows the rows' own numbers.
      kernel: the kernel that finds the rows that differ most. The default is the kernel of the result with the smallest
        p-value. Pass a kernel of your own, because the result has only its name.
      history: past tests, the oldest first, from ``DriftHistory.last``.
      settings: further settings to list.
      progress: called with the number of tiles done and of all tiles, while rows are scored.
    """
    sections, holds = (), ""
    if reference is not None and current is not None:
        reference, current = as_rows(reference, "the reference"), as_rows(current, "the current sample")
        same_width(reference, current)
        sections, holds = sections_of_rows(result, reference, current, details, kernel, progress)
    write_page(path, page(Contents(result, names, sections, history, settings or {}, holds)), DriftError)


def sections_of_rows(
    result: MMDTestResult,
    reference: Any,
    current: Any,
    details: tuple[Details, Details] | None,
    kernel: Kernel | None,
    progress: Progress | None,
) -> tuple[Sequence[Markup], str]:
    """Draw the samples and find the rows that differ most. The arguments are those of ``write_report``."""
    extremes = find_extremes(reference, current, kernel or strongest_kernel(result), result.seed, progress)
    of_reference, of_current = details or (None, None)
    gone = shown_rows(extremes.gone, of_reference, reference, extremes.gone_counts)
    new = shown_rows(extremes.new, of_current, current, extremes.new_counts)
    marked = [row.number for row in gone], [row.number for row in new]
    said = "Rows that are typical of one sample and rare in the other. Rows that say the same are shown once."
    if not result.drift:
        said = "The test found no drift, so these rows differ by no more than chance explains."
    sections = [
        section("Both samples", _OF_BOTH, scatter(reference, current, marked, result.seed)),
        section("The rows that differ most", said, witness_tables(gone, new, extremes)),
    ]
    return sections, "rows of the data"
