"""Names for what pyarrow gives: it has no types that a checker could know."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["Array", "DataType", "NativeFile", "RecordBatch", "Schema", "Table"]

Array: TypeAlias = Any
DataType: TypeAlias = Any
NativeFile: TypeAlias = Any
RecordBatch: TypeAlias = Any
Schema: TypeAlias = Any
Table: TypeAlias = Any
