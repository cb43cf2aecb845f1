"""Names for what pyarrow has no types for."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["DataType", "Schema", "Table", "Values"]

Table: TypeAlias = Any
"""A `pyarrow.RecordBatch`."""
Schema: TypeAlias = Any
DataType: TypeAlias = Any
Values: TypeAlias = Any
"""A `pyarrow.Array`."""
