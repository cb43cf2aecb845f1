"""The open inference protocol: KServe's second version, which Triton and others speak."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from luminosity.errors import EndpointError, RemoteModelError
from luminosity.inference.blocks import Block, rows
from luminosity.inference.handlers.http.messages import Answer, Reply, Request, in_json
from luminosity.inference.handlers.http.protocol import Ask, HttpProtocol
from luminosity.inference.handlers.http.tensors import (
    BYTES,
    Array,
    cast_to,
    from_bytes,
    from_json,
    to_bytes,
    to_json,
)

__all__ = ["KServe"]

_HEADER_LENGTH = "Inference-Header-Content-Length"
_BINARY = "binary_tensor_data"
_JSON = "json"


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
