"""Arrays as the tensors of the KServe protocol, in JSON and in bytes."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["BYTES", "Array", "cast_to", "datatype_of", "from_bytes", "from_json", "to_bytes", "to_json"]

Array: TypeAlias = npt.NDArray[Any]

BYTES = "BYTES"
_BF16 = "BF16"
_DTYPES = {
    "BOOL": "?",
    **{f"{kind}{8 * size}": f"<{code}{size}" for kind, code in (("INT", "i"), ("UINT", "u")) for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": f"<f{size}" for size in (2, 4, 8)},
}
_NAMES = {np.dtype(code): name for name, code in _DTYPES.items()}


def datatype_of(array: Array) -> str:
    """
    >>> datatype_of(np.zeros(2, np.float32)), datatype_of(np.array(["a"], object))
    ('FP32', 'BYTES')
    """
    return BYTES if array.dtype.kind in "OSU" else _NAMES[array.dtype.newbyteorder("<")]


def cast_to(array: Array, datatype: str) -> Array:
    """The array in the type that the model wants, where no number changes its kind or its value wraps around.

    >>> cast_to(np.array([1.5]), "FP32").dtype, cast_to(np.array([300]), "UINT8")
    Traceback (most recent call last):
    ValueError: found the number 300, expected what fits into UINT8
    """
    if datatype == BYTES or array.dtype.kind in "OSU":
        if datatype != BYTES or array.dtype.kind not in "OSU":
            raise ValueError(f"found values of type {array.dtype}, expected {datatype}")
        return array
    wanted = np.dtype("<f4" if datatype == _BF16 else _DTYPES[datatype])
    if not np.can_cast(array.dtype, wanted, "same_kind") and not (array.dtype.kind in "iu" and wanted.kind in "iu"):
        raise ValueError(f"found numbers of type {array.dtype}, expected {datatype}")
    if array.dtype.kind in "iu" and wanted.kind in "iu" and array.size:
        limits = np.iinfo(wanted)
        for value in (int(array.min()), int(array.max())):
            if not limits.min <= value <= limits.max:
                raise ValueError(f"found the number {value}, expected what fits into {datatype}")
    return array.astype(wanted)


def to_json(array: Array, datatype: str) -> list[Any]:
    """All elements in a row, as the protocol allows."""
    if datatype != BYTES:
        return array.reshape(-1).tolist()
    return [value.decode() if isinstance(value, bytes) else str(value) for value in array.reshape(-1).tolist()]


def from_json(data: Any, datatype: str, shape: tuple[int, ...]) -> Array:
    if datatype != BYTES:
        return np.asarray(data, "<f4" if datatype == _BF16 else _DTYPES[datatype]).reshape(shape)
    return _objects(np.asarray(data, object).reshape(-1).tolist(), shape)


def to_bytes(array: Array, datatype: str) -> bytes:
    """
    >>> to_bytes(np.array(["ab"], object), "BYTES"), to_bytes(np.array([1.0], "<f4"), "BF16")
    (b'\\x02\\x00\\x00\\x00ab', b'\\x80?')
    """
    if datatype == BYTES:
        texts = [v if isinstance(v, bytes) else str(v).encode() for v in array.reshape(-1).tolist()]
        return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    if datatype == _BF16:
        bits = np.ascontiguousarray(array).view("<u4").astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()  # rounded to the nearest even
    return np.ascontiguousarray(array).tobytes()


def from_bytes(data: bytes | bytearray, datatype: str, shape: tuple[int, ...]) -> Array:
    """
    >>> from_bytes(b"\\x02\\x00\\x00\\x00ab", "BYTES", (1,)), from_bytes(b"\\x80?", "BF16", (1,))
    (array(['ab'], dtype=object), array([1.], dtype=float32))
    """
    if datatype == BYTES:
        return _objects(_texts(data), shape)
    if datatype == _BF16:
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    return np.frombuffer(data, _DTYPES[datatype]).reshape(shape)


def _texts(data: bytes | bytearray) -> list[Any]:
    """As text, as JSON has them; as bytes where they are none."""
    found: list[bytes] = []
    place = 0
    while place < len(data):
        length = int.from_bytes(data[place : place + 4], "little")
        place += 4 + length
        if place > len(data):
            raise ValueError(f"a text of {length} bytes goes beyond what is there")
        found.append(bytes(data[place - length : place]))
    try:
        return [text.decode() for text in found]
    except UnicodeDecodeError:
        return found


def _objects(values: list[Any], shape: tuple[int, ...]) -> Array:
    array = np.empty(len(values), object)
    array[:] = values
    return array.reshape(shape)
