"""Tables by name: ``iceberg:CATALOG.NAMESPACE.TABLE``, ``delta:FOLDER``, ``hf:DATASET/SPLIT``, ``lance:FOLDER``.

A new kind is one class with an entry in ``_OPENERS``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from luminosity.errors import InvalidArgument
from luminosity.io.lakes.delta_log import DeltaAddress
from luminosity.io.lakes.delta_table import DeltaTable
from luminosity.io.lakes.iceberg_catalog import IcebergAddress
from luminosity.io.lakes.iceberg_table import IcebergTable
from luminosity.io.lakes.rows_tables import HuggingFaceTable, LanceRows
from luminosity.io.reading.named_table import NamedTable

__all__ = ["is_name", "kind_of", "open_by_name", "place_of", "version_of"]

_NAME = re.compile(r"([a-z]{2,12}):(?!//)(.+)", re.S)
_VERSION = re.compile(r"(.+)@(\d+)", re.S)


def kind_of(name: str) -> tuple[str, str] | None:
    """Return the kind of table that a name tells, and the rest of the name; None for a path or pattern.

    >>> kind_of("delta:sales"), kind_of("s3://sales"), kind_of("sales.parquet")
    (('delta', 'sales'), None, None)
    """
    found = _NAME.fullmatch(name)
    if found is None or found[1] not in _OPENERS:
        return None
    return found[1], found[2]


def is_name(path: str) -> bool:
    """Return whether a path is the name of a table instead."""
    return kind_of(path) is not None


def place_of(path: str) -> str:
    """Return the folder that the name of a table means, or what is nearest to one; a path stays as it is.

    >>> place_of("delta:out/sales"), place_of("iceberg:main.shop.sales"), place_of("out.parquet")
    ('out/sales', 'main.shop.sales', 'out.parquet')
    """
    found = kind_of(path)
    return path if found is None else found[1]


def version_of(name: str) -> int | None:
    """Return the version that a name ends with, as ``WriteTable`` emits it.

    >>> version_of("delta:sales@7"), version_of("delta:sales")
    (7, None)
    """
    return _split(name)[1]


def open_by_name(patterns: Sequence[str]) -> NamedTable | None:
    """Return the table that a name means, or None for paths and patterns."""
    names = [name for name in patterns if is_name(name)]
    if not names:
        return None
    if len(patterns) > 1:
        raise InvalidArgument(f"found {len(patterns)} patterns with the name {names[0]}, expected the name alone")
    found = kind_of(names[0])
    assert found is not None
    kind, rest = found
    return _OPENERS[kind](rest)


def _iceberg(rest: str) -> NamedTable:
    name, version = _split(rest)
    return IcebergTable(IcebergAddress.of(name, None), version)


def _delta(rest: str) -> NamedTable:
    path, version = _split(rest)
    return DeltaTable(DeltaAddress.of(path, None), version)


def _split(rest: str) -> tuple[str, int | None]:
    """Return a name and the version after its ``@``, as ``WriteTable`` emits them."""
    found = _VERSION.fullmatch(rest)
    return (found[1], int(found[2])) if found else (rest, None)


_OPENERS: dict[str, Callable[[str], NamedTable]] = {
    "delta": _delta,
    "hf": HuggingFaceTable,
    "iceberg": _iceberg,
    "lance": LanceRows,
}
