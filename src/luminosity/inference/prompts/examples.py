"""Examples that a prompt shows to the model: rows with their answers, from a list, a table or a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import pyarrow as pa

from luminosity._shared.text import did_you_mean, list_some, shorten_repr
from luminosity.errors import InvalidArgument, ModelUnavailable
from luminosity.inference.prompts.answers import AnswerType
from luminosity.inference.prompts.template import Messages, Template

__all__ = ["Examples", "example_messages"]

Examples: TypeAlias = "Sequence[tuple[dict[str, Any], Any]] | pa.Table | str | os.PathLike[str]"
"""Pairs of a row and its answer; or a table, or the path of one, whose ``answer_column`` holds the answers."""

_MOST = 100  # every prompt carries all of them
_FORMATS = (".parquet", ".csv", ".jsonl", ".arrow")


def example_messages(
    examples: Examples, answer_column: str | None, template: Template, answers: AnswerType
) -> Messages:
    """Return the messages of all examples: for each those of the template, then the answer of the assistant.

    Raises ``InvalidArgument`` if an example lacks a column, or if its answer is none that ``returns`` allows.
    """
    found: Messages = []
    for row, answer in _pairs(examples, answer_column):
        found += [message for message in template.messages(row) if message["role"] not in ("system", "developer")]
        found.append({"role": "assistant", "content": answers.text_of(answer)})
    return found


def _pairs(examples: Examples, answer_column: str | None) -> list[tuple[dict[str, Any], Any]]:
    if isinstance(examples, str | os.PathLike):
        examples = _read(os.fspath(examples))
    if isinstance(examples, pa.Table | pa.RecordBatch):
        pairs = _pairs_of(examples, answer_column)
    elif answer_column is not None:
        raise InvalidArgument(
            f"found answer_column={answer_column!r} with a list of examples, whose answers stand beside the rows",
            fix="leave answer_column out",
        )
    else:
        pairs = [_pair(each) for each in cast("Sequence[Any]", examples)]
    if not 0 < len(pairs) <= _MOST:
        raise InvalidArgument(f"found {len(pairs)} examples, expected 1 to {_MOST}: every prompt carries all of them")
    return pairs


def _pair(example: Any) -> tuple[dict[str, Any], Any]:
    if isinstance(example, tuple | list) and len(cast("Any", example)) == 2 and isinstance(example[0], dict):
        return cast("Any", tuple(cast("Any", example)))
    raise InvalidArgument(
        f"found the example {shorten_repr(example, 80)}, expected a pair of a row and its answer, such as "
        '({"text": "What a film!"}, "good")'
    )


def _pairs_of(table: Any, answer_column: str | None) -> list[tuple[dict[str, Any], Any]]:
    names = list(table.schema.names)
    if answer_column is None or answer_column not in names:
        found = "no answer_column=" if answer_column is None else f"answer_column={answer_column!r}"
        raise InvalidArgument(
            f"found {found} for a table of examples with the columns {list_some(names, 20)}, expected the column that "
            "holds the answers",
            fix=did_you_mean(answer_column or "answer", names) or None,
        )
    if table.num_rows > _MOST:
        raise InvalidArgument(f"found {table.num_rows:,} examples, expected 1 to {_MOST}: every prompt carries all")
    return [(row, row.pop(answer_column)) for row in table.to_pylist()]


def _read(path: str) -> pa.Table:
    """Read a small table from a file."""
    kind = os.path.splitext(path)[1]
    if kind not in _FORMATS:
        raise InvalidArgument(f"found the examples {path!r}, expected a file that ends in {', '.join(_FORMATS)}")
    if not os.path.isfile(path):
        raise ModelUnavailable(f"found no file {path!r} with examples")
    if kind == ".parquet":
        from pyarrow import parquet

        return parquet.read_table(path)
    if kind == ".csv":
        from pyarrow import csv

        return csv.read_csv(path)
    if kind == ".jsonl":
        from pyarrow import json

        return json.read_json(path)
    from pyarrow import feather

    return feather.read_table(path)
