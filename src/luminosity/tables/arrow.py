"""Names for pyarrow's types in annotations: pyarrow has none that a type checker knows."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["Array", "DataType", "Field", "Schema", "Table"]

Array: TypeAlias = Any
DataType: TypeAlias = Any
Field: TypeAlias = Any
Schema: TypeAlias = Any
Table: TypeAlias = Any
