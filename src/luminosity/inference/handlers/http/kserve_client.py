"""The open inference protocol: KServe's second version, which Triton and others speak."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from luminosity.errors import EndpointError, RemoteModelError
from luminosity.inference.blocks import Block, rows
from luminosity.inference.handlers.http.protocol import Answer, Ask, HttpProtocol, Reply, Request, in_json

__all__ = ["BYTES", "Array", "KServe", "cast_to", "datatype_of", "from_bytes", "from_json", "to_bytes", "to_json"]


_HEADER_LENGTH = "Inference-Header-Content-Length"
_BINARY = "binary_tensor_data"
_JSON = "json"

Array: TypeAlias = npt.NDArray[Any]

BYTES = "BYTES"
_BF16 = "BF16"
_DTYPES = {
    "BOOL": "?",
    **{f"{kind}{8 * size}": f"<{code}{size}" for kind, code in (("INT", "i"), ("UINT", "u")) for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": f"<f{size}" for size in (2, 4, 8)},
}
_NAMES = {np.dtype(code): name for name, code in _DTYPES.items()}


@dataclass(frozen=True)
class _Facts:
    """What the server says of its model."""

    inputs: Mapping[str, tuple[str, tuple[int, ...]]]
    """By name: the datatype, and the shape with -1 for what may vary."""
    binary: bool


class KServe(HttpProtocol):
    """`POST /v2/models/{model}/infer`: arrays, or dicts of them, in; rows of the model's outputs out.

    Names and types of tensors are what the server says of the model. Tensors go as bytes where it has the extension for
    that, else in JSON. A prediction is a row of the output, or a dict of rows where there are several outputs.
    """

    def __init__(
        self,
        model: str,
        version: str | None = None,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model)
        self._version = version
        self._outputs = None if outputs is None else list(outputs)
        self._parameters = dict(parameters or {})

    @property
    def _path(self) -> str:
        version = "" if self._version is None else f"/versions/{quote(self._version, safe='')}"
        return f"/v2/models/{quote(self.model, safe='')}{version}"

    def cost(self, prepared: Block) -> npt.NDArray[Any]:
        return np.array([_size(example) for example in rows(prepared)]) + 1

    def greet(self, ask: Ask) -> _Facts:
        try:
            reply = ask(Request(self._path))
        except EndpointError:
            raise
        except RemoteModelError as error:  # Some say 400 to a model they don't know.
            raise EndpointError(f"{error} (is the model's name {self.model!r}?)") from error
        described = reply.json()
        try:
            inputs = {
                each["name"]: (str(each["datatype"]), tuple(int(size) for size in each["shape"]))
                for each in described["inputs"]
            }
        except (KeyError, TypeError, ValueError):
            expected = "a model's `inputs`, each with `name`, `datatype` and `shape`"
            raise reply.misread(f"an object with {sorted(described)}", expected) from None
        return _Facts(inputs, _speaks_binary(ask))

    def request(self, prepared: Block, arguments: dict[str, Any], facts: Any) -> Request:
        tensors: list[dict[str, Any]] = []
        blobs: list[bytes] = []
        for name, (datatype, array) in self._columns(list(rows(prepared)), facts).items():
            tensor: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(array.shape)}
            if facts.binary:
                blobs.append(to_bytes(array, datatype))
                tensor["parameters"] = {"binary_data_size": len(blobs[-1])}
            else:
                tensor["data"] = to_json(array, datatype)
            tensors.append(tensor)
        parameters = {**self._parameters, **arguments, **({"binary_data_output": True} if facts.binary else {})}
        body: dict[str, Any] = {"inputs": tensors}
        body |= {"parameters": parameters} if parameters else {}
        if self._outputs is not None:
            asked = {"parameters": {"binary_data": True}} if facts.binary else {}
            body["outputs"] = [{"name": name, **asked} for name in self._outputs]
        header = in_json(body)
        if not facts.binary:
            return Request(f"{self._path}/infer", header)
        headers = {"Content-Type": "application/octet-stream", _HEADER_LENGTH: str(len(header))}
        return Request(f"{self._path}/infer", b"".join([header, *blobs]), headers)

    def _columns(self, examples: list[Any], facts: _Facts) -> dict[str, tuple[str, Array]]:
        """Each input's datatype, and its values of all examples in one array."""
        if not isinstance(examples[0], Mapping):
            if len(facts.inputs) != 1:
                raise ValueError(
                    f"found an example of type {type(examples[0]).__name__}, expected a dict: the model "
                    f"{self.model!r} has the inputs {sorted(facts.inputs)}"
                )
            (name,) = facts.inputs
            examples = [{name: example} for example in examples]
        columns: dict[str, tuple[str, Array]] = {}
        for name in examples[0]:
            if name not in facts.inputs:
                raise ValueError(f"found {name!r} in an example, expected the model's inputs {sorted(facts.inputs)}")
            datatype, shape = facts.inputs[name]
            try:
                array = cast_to(_stacked([example[name] for example in examples], datatype), datatype)
            except (KeyError, ValueError) as error:
                raise ValueError(f"the examples don't fit the input {name!r}: {error}") from None
            # A model of one number per example often calls that a row of one.
            columns[name] = datatype, array[:, None] if array.ndim == 1 and shape[1:] in ((1,), (-1,)) else array
        return columns

    def read(self, reply: Reply, count: int, facts: Any) -> Answer:
        length = reply.headers.get(_HEADER_LENGTH.lower(), "")
        header = replace(reply, body=reply.body[: int(length)]) if length.isdecimal() else reply
        answer = header.json()
        outputs = answer.get("outputs")
        if not isinstance(outputs, list) or not outputs:
            raise reply.misread(f"an object with {sorted(answer)}", "a list `outputs`")
        rest = memoryview(reply.body)[len(header.body) :]
        found: dict[str, Array] = {}
        for output in outputs:
            name, array, taken = _tensor(output, rest, reply)
            if array.shape[:1] != (count,):
                shape = list(array.shape)
                raise reply.wrong(f"{name!r} of shape {shape} for {count} examples", f"the shape [{count}, ...]")
            found[name] = array
            rest = rest[taken:]
        version = answer.get("model_version")
        said = answer.get("model_name") or self.model
        return Answer(self._split(found, count), f"{said}/versions/{version}" if version else said)

    def _split(self, outputs: dict[str, Array], count: int) -> Block:
        if len(outputs) > 1:
            return [{name: array[row] for name, array in outputs.items()} for row in range(count)]
        (array,) = outputs.values()
        return list(array) if array.dtype == object else array


def _speaks_binary(ask: Ask) -> bool:
    try:
        extensions = ask(Request("/v2")).json().get("extensions")
    except RemoteModelError:
        return False  # It need not tell.
    return isinstance(extensions, list) and _BINARY in extensions


def _tensor(output: Any, rest: memoryview, reply: Reply) -> tuple[str, Array, int]:
    """Name and values of an output, and how many of the bytes behind the JSON were its own."""
    try:
        name, datatype, shape = output["name"], output["datatype"], tuple(output["shape"])
        parameters = cast("dict[str, Any]", output.get("parameters") or {})
        size = parameters.get("binary_data_size")
        if size is None:
            values = from_json(output["data"], datatype, shape)
        else:
            values = from_bytes(bytearray(rest[:size]), datatype, shape)
        if parameters.get("content_type") == _JSON:
            values = _decoded(values)
        return name, values, size or 0
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        expected = "`name`, `datatype`, `shape` and as many values as that"
        raise reply.wrong(f"an output that can't be read ({type(error).__name__}: {error})", expected) from None


def _decoded(texts: Array) -> Array:
    """Objects that are no tensors, such as a label with its score, travel as JSON."""
    objects = np.empty(texts.shape, object)
    objects.reshape(-1)[:] = [json.loads(text) for text in texts.reshape(-1).tolist()]
    return objects


def _stacked(values: list[Any], datatype: str) -> Array:
    if datatype == BYTES:
        texts = np.array(values, object)
        if not all(isinstance(text, str | bytes) for text in texts.reshape(-1).tolist()):
            raise ValueError(f"found values of type {type(values[0]).__name__}, expected text")
        return texts
    shapes = {np.shape(value) for value in values}
    if len(shapes) > 1:
        raise ValueError(f"found arrays of shapes {sorted(shapes)[:3]}, expected one shape in all examples")
    return np.asarray(values)


def _size(example: Any) -> int:
    if isinstance(example, Mapping):
        return sum(_size(value) for value in cast("Mapping[str, Any]", example).values())
    return len(example) if isinstance(example, str | bytes) else int(np.size(example))


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
