"""``lum describe TABLE``: every column of a table in a line, and what changed against a reference.

The description itself is ``luminosity.evaluation.describe``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from luminosity._shared.text import printable, shorten
from luminosity.cli.common.exits import fail_of, print_ignoring_closed_pipe
from luminosity.cli.common.mlflow_run import MlflowRun, add_mlflow_option
from luminosity.cli.common.options import add_command
from luminosity.cli.common.output import ProgressLine, check_report, json_text, tell_who_reads
from luminosity.cli.common.table_options import TableReader, add_table_options, csv_arguments
from luminosity.errors import LuminosityError, OptionError

if TYPE_CHECKING:  # these import Beam, which takes a second: not for --help
    from luminosity.evaluation.description.describe_table import DescriptionState
    from luminosity.evaluation.description.result import ColumnDescription, Description

__all__ = ["add_to"]

_DESCRIPTION = """\
Describe every column of a table: missing and distinct values, quantiles, most
frequent values, lengths of texts, norms of vectors. TABLE is one or many files
(Parquet, JSON lines, CSV, TSV, Arrow), which are read once. With --reference,
say what changed most.

Exit codes: 0 done, 1 error, 2 wrong usage.
"""
_EPILOG = """\
examples:
  lum describe reviews.parquet
  lum describe 'logs/*.jsonl.gz' --column country,latency
  lum describe today.parquet --reference train.parquet
                        what changed most, with a test for each column
  lum describe reviews.parquet --report reviews.html
                        a histogram of each column
  lum describe reviews.parquet --json | jq '.columns[].name'
"""
_VALUE_CHARACTERS = 24  # of a frequent value
_MOST_CHANGES = 20  # lines
_SMALLEST_P = 1e-16  # smaller p-values are not computed exactly


def add_to(commands: Any) -> None:
    """Add the subcommand ``describe`` to the parser of ``lum``."""
    parser = add_command(commands, "describe", "describe the columns of a table", _DESCRIPTION, _EPILOG)
    parser.add_argument("table", metavar="TABLE", help="the table: a file, a folder or a quoted pattern")
    parser.add_argument("--reference", metavar="TABLE", help="say what changed against this table")
    parser.add_argument(
        "--column", action="append", default=[], metavar="C,...", help="describe only these columns (default: all)"
    )
    add_table_options(parser)
    parser.add_argument("--json", action="store_true", help="print the full result as JSON instead of lines")
    parser.add_argument("--report", metavar="FILE", help="write an HTML report; it loads nothing from the network")
    add_mlflow_option(parser)
    parser.set_defaults(command=_describe)


def _describe(parsed: argparse.Namespace) -> int:
    try:
        return _run(parsed)
    except LuminosityError as error:
        return fail_of("describe", error)


def _run(parsed: argparse.Namespace) -> int:
    from luminosity.evaluation.description.describe_table import describe_states

    began = time.monotonic()
    patterns = [parsed.table, *([] if parsed.reference is None else [parsed.reference])]
    if any(not pattern.strip() for pattern in patterns):
        raise OptionError("the name of a table is empty, expected a file; perhaps a shell variable is not set")
    columns = [name for text in parsed.column for name in text.split(",") if name] or None
    check_report(parsed.report)
    mlflow = MlflowRun("describe", parsed.mlflow)
    reader = TableReader("describe", parsed.dead_letters)
    with ProgressLine() as progress, reader:
        arguments = csv_arguments(parsed, *patterns)
        states = [_read(reader, *each, columns, progress) for each in zip(patterns, arguments, strict=True)]
        found = states[0].description() if len(states) == 1 else describe_states(*states)
        settings = {"table": parsed.table, "reference": parsed.reference, "columns": columns}
        if parsed.report:
            found.write_report(parsed.report, title=parsed.table, settings=settings)
    if parsed.report:
        tell_who_reads("describe", parsed.report, "values")
    seconds = time.monotonic() - began
    about = {"table": parsed.table, "seconds": round(seconds, 3)}
    result = {**found.as_dict(), **about, **reader.as_dict()}
    if parsed.json:
        print_ignoring_closed_pipe(json_text(result))
    else:
        print_ignoring_closed_pipe("\n".join(_lines(found, seconds)))
    return mlflow.log(parsed.table, _numbers(found), settings, result, parsed.report, 0)


def _numbers(found: Description) -> dict[str, Any]:
    """Return what is one number of a column, for MLflow."""
    numbers: dict[str, Any] = {"rows": found.rows}
    for change in found.changes:
        numbers |= {f"distance/{change.name}": change.distance, f"p_value/{change.name}": change.p_value}
    for name, column in found.columns.items():
        missing = column.nulls + column.nan
        median = column.quantiles.get(0.5) if column.quantiles else None
        numbers |= {f"missing/{name}": missing, f"distinct/{name}": column.distinct, f"median/{name}": median}
    return numbers


def _read(
    reader: TableReader, pattern: str, csv: Any, columns: Sequence[str] | None, progress: ProgressLine
) -> DescriptionState:
    import pyarrow as pa

    from luminosity.evaluation.columns import roots_of
    from luminosity.evaluation.description.describe_table import DescriptionState
    from luminosity.io.read_table import ReadTable

    state = DescriptionState(columns)
    roots = None if columns is None else roots_of(columns, ReadTable(pattern, **csv).schema.names)
    source = reader.open(pattern, roots, csv)
    done = progress.rows(f"reading {pattern}")
    state.add(pa.RecordBatch.from_pylist([], schema=source.schema))  # a table without rows has columns
    for _, batch in reader.rows(source):
        state.add(batch)
        done(state.rows)
    return state


def _lines(found: Description, seconds: float) -> list[str]:
    against = f" against {found.reference.rows:,} rows of the reference" if found.reference is not None else ""
    lines = [f"{found}{against} · {seconds:.1f} s"]
    cells = [_cells(column, found.rows) for column in found.columns.values()]
    heads = ("column", "kind", "missing", "distinct", "values")
    widths = [max(len(row[at]) for row in [heads, *cells]) for at in range(len(heads) - 1)]
    for row in [heads, *cells] if cells else []:
        aligned = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join(["", *aligned, row[-1]]).rstrip())
    if found.reference is not None:
        lines.append("what changed most:")
        width = max((len(printable(change.name)) for change in found.changes), default=0)
        for change in found.changes[:_MOST_CHANGES]:
            p_value = "" if change.p_value is None else f", p = {change.p_value:.2g}"
            p_value = (
                f", p < {_SMALLEST_P:g}" if change.p_value is not None and change.p_value < _SMALLEST_P else p_value
            )
            lines.append(f"  {printable(change.name):<{width}}  {change.distance:.3f}{p_value} · {change.said}")
        if len(found.changes) > _MOST_CHANGES:
            lines.append(f"  and {len(found.changes) - _MOST_CHANGES:,} more; --json and --report show all")
    return lines


def _cells(column: ColumnDescription, rows: int) -> tuple[str, ...]:
    missing = column.nulls + column.nan
    share = f"{100 * missing / rows:.3g}%" if missing else "-"
    about = "" if column.distinct_is_exact else "≈ "
    distinct = "" if column.distinct is None else f"{about}{column.distinct:,}"
    return printable(column.name), column.kind, share, distinct, _values(column)


def _values(column: ColumnDescription) -> str:
    parts: list[str] = []
    if column.kind in ("texts", "booleans") and column.top:
        some = (f"{shorten(printable(str(value)), _VALUE_CHARACTERS)} ({count:,})" for value, count in column.top[:3])
        parts.append(", ".join(some))
    if column.quantiles and column.kind != "booleans":
        low, middle, high = (_shown(column, column.quantiles[share]) for share in (0.0, 0.5, 1.0))
        name = f"{column.of} " if column.of in ("length", "norm") else ""
        parts.append(f"{name}{low} to {high}, median {middle}")
    if column.width is not None:
        low, high = column.width
        parts.append(f"{low:,} numbers each" if low == high else f"{low:,} to {high:,} numbers each")
    return " · ".join(parts)


def _shown(column: ColumnDescription, value: float) -> str:
    if column.kind == "times":
        return column.time_text(value)
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.4g}"
