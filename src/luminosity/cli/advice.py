"""Advice for those who write pipelines, in words for those who give a command."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["as_options"]

_OF_TABLES = {
    "; or say format= yourself": "",
    "; or give schema=": "",
    ", nor has any other of the 1 files; give schema=": ", expected some",
    "; give schema=": "; expected some",
    "give schema= if there are more, or of other types": "Parquet says itself what there is",
    "give schema= for other types, null_values= for other nulls, newlines_in_values=True for values with line breaks": (
        "Parquet says itself what there is, and takes nulls and line breaks"
    ),
}


def as_options(message: str, own: Mapping[str, str]) -> str:
    """With a command's own options for Python's arguments; those of tables, which commands read alike, have none."""
    for argument, option in {**own, **_OF_TABLES}.items():
        message = message.replace(argument, option)
    return message
