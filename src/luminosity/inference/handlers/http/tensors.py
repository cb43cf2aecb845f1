"""Tensors of the Open Inference Protocol, KServe's version 2: clients and servers write and read them alike.

A tensor is JSON, or its description in JSON and its values as the bytes that follow the JSON of all tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from luminosity.errors import InvalidArgument

__all__ = [
    "AS_JSON",
    "BINARY",
    "BYTES",
    "DATATYPES",
    "HEADER_LENGTH",
    "Array",
    "cast_to",
    "datatype_of",
    "from_bytes",
    "from_json",
    "objects",
    "write_tensor",
]

HEADER_LENGTH = "Inference-Header-Content-Length"
"""The header that says how many bytes of a body are JSON; the bytes of tensors follow."""
BINARY = "binary_tensor_data"
"""The extension of a server that takes tensors as bytes."""
AS_JSON = {"content_type": "json"}
"""The parameters of a BYTES tensor whose texts are JSON, for values such as a label with its score."""

Array: TypeAlias = npt.NDArray[Any]

BYTES = "BYTES"
_BF16 = "BF16"
_DTYPES = {
    "BOOL": "?",
    **{f"{kind}{8 * size}": f"<{code}{size}" for kind, code in (("INT", "i"), ("UINT", "u")) for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": f"<f{size}" for size in (2, 4, 8)},
}
_NAMES = {np.dtype(code): name for name, code in _DTYPES.items()}
DATATYPES = (BYTES, *_DTYPES)


def datatype_of(dtype: Any) -> str | None:
    """Return KServe's name of a numpy type of numbers, or None if it has none.

    >>> datatype_of(np.float32)
    'FP32'
    """
    return _NAMES.get(np.dtype(dtype))


def write_tensor(
    name: str, array: Array, datatype: str, as_bytes: bool, parameters: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], bytes]:
    """Return a tensor as JSON; or its description, and its data as the bytes that follow the JSON of all tensors.

    >>> write_tensor("x", np.float32([[1, 2]]), "FP32", as_bytes=False)
    ({'name': 'x', 'datatype': 'FP32', 'shape': [1, 2], 'data': [1.0, 2.0]}, b'')
    """
    described: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(array.shape)}
    data = to_bytes(array, datatype) if as_bytes else b""
    parameters = {**(parameters or {}), **({"binary_data_size": len(data)} if as_bytes else {})}
    described |= {"parameters": parameters} if parameters else {}
    return (described if as_bytes else {**described, "data": to_json(array, datatype)}), data


def cast_to(array: Array, datatype: str) -> Array:
    """Return the array in the model's datatype. Raises if a number would change its kind or wrap around.

    >>> cast_to(np.array([1.5]), "FP32").dtype, cast_to(np.array([300]), "UINT8")
    Traceback (most recent call last):
    luminosity.errors.InvalidArgument: found the number 300, expected what fits into UINT8
    """
    if datatype == BYTES or array.dtype.kind in "OSU":
        if datatype != BYTES or array.dtype.kind not in "OSU":
            raise InvalidArgument(f"found values of type {array.dtype}, expected {datatype}")
        return array
    wanted = np.dtype("<f4" if datatype == _BF16 else _DTYPES[datatype])
    if not np.can_cast(array.dtype, wanted, "same_kind") and not (array.dtype.kind in "iu" and wanted.kind in "iu"):
        raise InvalidArgument(f"found numbers of type {array.dtype}, expected {datatype}")
    if array.dtype.kind in "iu" and wanted.kind in "iu" and array.size:
        limits = np.iinfo(wanted)
        for value in (int(array.min()), int(array.max())):
            if not limits.min <= value <= limits.max:
                raise InvalidArgument(f"found the number {value}, expected what fits into {datatype}")
    return array.astype(wanted)


def to_json(array: Array, datatype: str) -> list[Any]:
    """Return all values in one flat list, as the protocol allows."""
    if datatype != BYTES:
        return array.reshape(-1).tolist()
    return [value.decode() if isinstance(value, bytes) else str(value) for value in array.reshape(-1).tolist()]


def from_json(data: Any, datatype: str, shape: Sequence[int]) -> Array:
    """Return the array of a tensor's JSON data. Raises ``ValueError`` if their numbers differ."""
    if datatype != BYTES:
        return _shaped(np.asarray(data, "<f4" if datatype == _BF16 else _DTYPES[datatype]), shape)
    return objects(np.asarray(data, object).reshape(-1).tolist(), shape)


def to_bytes(array: Array, datatype: str) -> bytes:
    """Return the array as the bytes of a tensor.

    >>> to_bytes(np.array(["ab"], object), "BYTES"), to_bytes(np.array([1.0], "<f4"), "BF16")
    (b'\\x02\\x00\\x00\\x00ab', b'\\x80?')
    """
    if datatype == BYTES:
        texts = [v if isinstance(v, bytes) else str(v).encode() for v in array.reshape(-1).tolist()]
        return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    if datatype == _BF16:
        bits = np.ascontiguousarray(array).view("<u4").astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()  # round half to even
    return np.ascontiguousarray(array).tobytes()


def from_bytes(data: bytes | bytearray | memoryview, datatype: str, shape: Sequence[int]) -> Array:
    """Return the array of a tensor's bytes. Raises ``ValueError`` if their numbers differ.

    >>> from_bytes(b"\\x02\\x00\\x00\\x00ab", "BYTES", (1,)), from_bytes(b"\\x80?", "BF16", (1,))
    (array(['ab'], dtype=object), array([1.], dtype=float32))
    """
    if datatype == BYTES:
        return objects(_texts(data), shape)
    if datatype == _BF16:
        return _shaped((np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4"), shape)
    return _shaped(np.frombuffer(data, _DTYPES[datatype]), shape)


def _texts(data: bytes | bytearray | memoryview) -> list[Any]:
    """Return the strings of a BYTES tensor: as text if all are UTF-8, otherwise as bytes."""
    found: list[bytes] = []
    place = 0
    while place < len(data):
        length = int.from_bytes(data[place : place + 4], "little")
        place += 4 + length
        if place > len(data):
            raise ValueError(f"a text of {length} bytes goes beyond the end of the data")
        found.append(bytes(data[place - length : place]))
    try:
        return [text.decode() for text in found]
    except UnicodeDecodeError:
        return found


def objects(values: Sequence[Any], shape: Sequence[int]) -> Array:
    """Return an array of Python objects, such as texts."""
    array = np.empty(len(values), object)
    array[:] = values
    return _shaped(array, shape)


def _shaped(array: Array, shape: Sequence[int]) -> Array:
    if array.size != math.prod(shape):
        raise ValueError(f"it has {array.size} values, expected {math.prod(shape)} for the shape {list(shape)}")
    return array.reshape(shape)
