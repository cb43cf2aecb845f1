"""KServe's tensors in JSON or bytes, and their conversion to examples and from predictions."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from luminosity._shared.text import shorten_repr
from luminosity.inference.serving.requests import RequestError

__all__ = ["DATATYPES", "OUTPUT", "Tensor", "datatype_of", "of_values"]

OUTPUT = "output"
_SHOWN_CHARACTERS = 80  # how much of a value an error message shows

_NUMPY = {
    "BOOL": "bool",
    **{f"{sign}INT{bits}": f"{sign.lower()}int{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": f"float{bits}" for bits in (16, 32, 64)},
}
_KSERVE = {np.dtype(numpy): kserve for kserve, numpy in _NUMPY.items()}
DATATYPES = ("BYTES", *_NUMPY)


def datatype_of(dtype: Any) -> str | None:
    """Return KServe's name of a numpy type, or None if it has none.

    >>> datatype_of(np.float32)
    'FP32'
    """
    return _KSERVE.get(np.dtype(dtype))


@dataclass(frozen=True)
class Tensor:
    """A named tensor: a numpy array, or a list of strings for BYTES."""

    name: str
    values: Any
    parameters: dict[str, Any]

    @classmethod
    def read(cls, described: Any, binary: memoryview) -> tuple[Tensor, int]:
        """Read an input of a request; also return how many of the binary bytes it takes."""
        if not isinstance(described, dict):
            raise RequestError(400, f"found the input {_short(described)}, expected an object with name, shape, data")
        fields = cast("dict[str, Any]", described)
        name = fields.get("name")
        if not isinstance(name, str):
            raise RequestError(400, f"found an input whose name is {_short(name)}, expected a string")
        shape, datatype = _shape(name, fields.get("shape")), fields.get("datatype")
        if datatype not in DATATYPES:
            known = ", ".join(DATATYPES)
            raise RequestError(400, f"input {name!r} has the datatype {_short(datatype)}, expected one of {known}")
        parameters: Any = fields.get("parameters") or {}
        length = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
        if length is None:
            return cls(name, _from_json(name, fields.get("data"), shape, datatype), {}), 0
        if not isinstance(length, int) or not 0 <= length <= len(binary):
            raise RequestError(
                400, f"input {name!r} has the binary_data_size {_short(length)}, expected at most {len(binary)}"
            )
        return cls(name, _from_bytes(name, binary[:length], shape, datatype), {}), length

    def described(self) -> dict[str, Any]:
        """Return the description of the tensor in a response, without its data."""
        is_text = isinstance(self.values, list)
        return {
            "name": self.name,
            "datatype": "BYTES" if is_text else _KSERVE[self.values.dtype],
            "shape": [len(self.values)] if is_text else list(self.values.shape),
            **({"parameters": self.parameters} if self.parameters else {}),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the tensor as JSON."""
        data = self.values if isinstance(self.values, list) else self.values.reshape(-1).tolist()
        return {**self.described(), "data": data}

    def to_binary(self) -> tuple[dict[str, Any], bytes]:
        """Return the description of the tensor, and its data as bytes."""
        if isinstance(self.values, list):
            texts = [text.encode() for text in cast("list[str]", self.values)]
            data = b"".join(part for text in texts for part in (struct.pack("<I", len(text)), text))
        else:
            data = self.values.astype(self.values.dtype.newbyteorder("<"), copy=False).tobytes()
        described = self.described()
        described["parameters"] = {**self.parameters, "binary_data_size": len(data)}
        return described, data


def of_values(values: list[Any]) -> Tensor:
    """Return predictions as one tensor: strings, numbers and arrays of one shape directly, others as JSON strings.

    >>> of_values([np.float32([1, 2]), np.float32([3, 4])]).to_json()
    {'name': 'output', 'datatype': 'FP32', 'shape': [2, 2], 'data': [1.0, 2.0, 3.0, 4.0]}
    >>> of_values([{"label": "good"}]).to_json()["data"]
    ['{"label": "good"}']
    """
    if all(isinstance(value, str) for value in values):
        return Tensor(OUTPUT, values, {})
    try:
        array = np.asarray(values)
    except (ValueError, TypeError):  # for example, arrays of different shapes
        array = np.empty(0, object)
    if array.dtype in _KSERVE:
        return Tensor(OUTPUT, array, {})
    return Tensor(OUTPUT, [json.dumps(value, default=plain) for value in values], {"content_type": "json"})


def plain(value: Any) -> Any:
    """Return a value that JSON does not know in a form that it knows."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, set | frozenset):
        return sorted(cast("set[Any]", value), key=repr)
    return getattr(value, "__dict__", None) or str(value)


def _shape(name: str, found: Any) -> list[int]:
    sizes = cast("list[Any]", found) if isinstance(found, list) else []
    # A size of 0 after the first would allow any number of examples in an empty body.
    if not sizes or not all(type(size) is int and size >= 0 for size in sizes) or 0 in sizes[1:]:
        raise RequestError(
            400, f"input {name!r} has the shape {_short(found)}, expected a list of sizes, the number of examples first"
        )
    return sizes


def _from_json(name: str, data: Any, shape: list[int], datatype: str) -> Any:
    if not isinstance(data, list):
        raise RequestError(400, f"input {name!r} has the data {_short(data)}, expected a list")
    if datatype == "BYTES":
        flat = _flattened(cast("list[Any]", data))
        wrong = next((value for value in flat if not isinstance(value, str)), None)
        if wrong is not None:
            raise RequestError(400, f"input {name!r} has {_short(wrong)} in its data, expected strings for BYTES")
        return _texts(name, cast("list[str]", flat), shape)
    try:
        array = np.array(data, _NUMPY[datatype])
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError(400, f"the data of input {name!r} is not {datatype}: {error}") from None
    return _array(name, array, shape)


def _from_bytes(name: str, data: memoryview, shape: list[int], datatype: str) -> Any:
    if datatype != "BYTES":
        dtype = np.dtype(_NUMPY[datatype]).newbyteorder("<")
        if len(data) % dtype.itemsize:
            raise RequestError(
                400, f"input {name!r} has {len(data)} bytes, expected a multiple of {dtype.itemsize} for {datatype}"
            )
        return _array(name, np.frombuffer(data, dtype), shape)
    texts: list[str] = []
    start = 0
    try:
        while start < len(data):
            (length,) = struct.unpack_from("<I", data, start)
            start += 4 + length
            if start > len(data):
                raise ValueError(f"a string of {length} bytes goes beyond its end")
            texts.append(str(data[start - length : start], "utf-8"))
    except (struct.error, ValueError) as error:
        raise RequestError(400, f"the bytes of input {name!r} are not strings in UTF-8: {error}") from None
    return _texts(name, texts, shape)


def _texts(name: str, texts: list[str], shape: list[int]) -> list[str]:
    _check_count(name, len(texts), shape)
    if len(texts) != shape[0]:
        raise RequestError(400, f"input {name!r} has the shape {shape}, expected one string for each example")
    return texts


def _array(name: str, array: Any, shape: list[int]) -> Any:
    _check_count(name, array.size, shape)
    return array.reshape(shape)


def _check_count(name: str, count: int, shape: Sequence[int]) -> None:
    if count != math.prod(shape):
        raise RequestError(
            400, f"input {name!r} has {count} values, expected {math.prod(shape)} for its shape {list(shape)}"
        )


def _flattened(values: list[Any]) -> list[Any]:
    nested = any(isinstance(value, list) for value in values)
    return [each for value in values for each in (value if isinstance(value, list) else [value])] if nested else values


def _short(value: Any) -> str:
    return shorten_repr(value, _SHOWN_CHARACTERS)
