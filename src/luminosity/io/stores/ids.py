"""What a point is called: Qdrant knows unsigned numbers and UUIDs, and nothing else."""

from __future__ import annotations

import re
import uuid
from typing import Any

import pyarrow as pa

from luminosity.errors import StoreError

__all__ = ["PointId", "check_id_type", "point_id"]

PointId = int | str

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_NAMESPACE = uuid.UUID("6f1a3d0e-4f0b-5c7e-9a53-0d0c5a6c1f27")
"""Fixed for ever: a text must become the same id in every run, or updates would be additions."""


def check_id_type(name: str, kind: Any) -> None:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not (pa.types.is_integer(kind) or is_text or str(kind) == "extension<arrow.uuid>"):
        raise StoreError(f"the id column {name!r} is of type {kind}, expected unsigned integers, UUIDs or strings")


def point_id(value: int | str | uuid.UUID) -> tuple[PointId, bool]:
    """The point's id, and whether the value can be told from it.

    >>> point_id(7), point_id("0FD9D9A2-0B1E-4A6F-9C87-0A2F5F0D3E11")
    ((7, True), ('0fd9d9a2-0b1e-4a6f-9c87-0a2f5f0d3e11', True))
    >>> point_id("review-7")
    ('7fbb56d3-dc54-545c-be3e-350c7cb68e4a', False)
    """
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"found {value}, expected an integer that is not negative")
        return value, True
    if isinstance(value, uuid.UUID):
        return str(value), True
    if _UUID.fullmatch(value):
        return value.lower(), True
    return str(uuid.uuid5(_NAMESPACE, value)), False
