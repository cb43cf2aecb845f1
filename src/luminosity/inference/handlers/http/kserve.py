"""The client of the Open Inference Protocol, KServe's version 2, which Triton and others speak, too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from luminosity.errors import EndpointError, InvalidArgument, RemoteModelError
from luminosity.inference.blocks import Block, rows
from luminosity.inference.handlers.http.protocol import (
    HttpProtocol,
    Predictions,
    Request,
    Response,
    Send,
    to_json_bytes,
)
from luminosity.inference.handlers.http.tensors import (
    AS_JSON,
    BINARY,
    BYTES,
    HEADER_LENGTH,
    Array,
    cast_to,
    from_bytes,
    from_json,
    write_tensor,
)

__all__ = ["KServe"]


@dataclass(frozen=True)
class _Facts:
    """The server's description of its model."""

    inputs: Mapping[str, tuple[str, tuple[int, ...]]]
    """The datatype and shape of each input by name; a size of -1 may vary."""
    binary: bool


class KServe(HttpProtocol):
    """``POST /v2/models/{model}/infer``: takes arrays or dicts of arrays, returns rows of the model's outputs.

    The server says which names and types the tensors have. Tensors are sent as bytes if the server has that extension,
    otherwise as JSON. A prediction is a row of the output, or a dict of rows if there are several outputs.

    Args:
        model: the name by which the server knows the model.
        version: the version of the model, or None for the server's choice.
        outputs: the outputs to request, or None for all.
        parameters: sent with every request.
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
        """Return the number of values of each example plus one; a text counts its characters."""
        return np.array([_size(example) for example in rows(prepared)]) + 1

    def load_facts(self, send: Send) -> _Facts:
        """Ask the server for the model's inputs, and whether it takes tensors as bytes."""
        try:
            response = send(Request(self._path))
        except EndpointError:
            raise
        except RemoteModelError as error:  # some servers respond 400 to an unknown model
            raise EndpointError(error.message, fix=f"check the model's name, {self.model!r}") from error
        described = response.json()
        try:
            inputs = {
                each["name"]: (str(each["datatype"]), tuple(int(size) for size in each["shape"]))
                for each in described["inputs"]
            }
        except (KeyError, TypeError, ValueError):
            expected = "a model's `inputs`, each with `name`, `datatype` and `shape`"
            raise response.endpoint_error(f"an object with {sorted(described)}", expected) from None
        return _Facts(inputs, _speaks_binary(send))

    def request(self, prepared: Block, arguments: dict[str, Any], facts: Any) -> Request:
        """Return the request with one tensor for each input, as bytes or JSON."""
        tensors: list[dict[str, Any]] = []
        blobs: list[bytes] = []
        for name, (datatype, array) in self._columns(list(rows(prepared)), facts).items():
            tensor, data = write_tensor(name, array, datatype, facts.binary)
            tensors.append(tensor)
            blobs.append(data)
        parameters = {**self._parameters, **arguments, **({"binary_data_output": True} if facts.binary else {})}
        body: dict[str, Any] = {"inputs": tensors}
        body |= {"parameters": parameters} if parameters else {}
        if self._outputs is not None:
            binary = {"parameters": {"binary_data": True}} if facts.binary else {}
            body["outputs"] = [{"name": name, **binary} for name in self._outputs]
        header = to_json_bytes(body)
        if not facts.binary:
            return Request(f"{self._path}/infer", header)
        headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(header))}
        return Request(f"{self._path}/infer", b"".join([header, *blobs]), headers)

    def _columns(self, examples: list[Any], facts: _Facts) -> dict[str, tuple[str, Array]]:
        """Return each input's datatype, and its values of all examples in one array."""
        if not isinstance(examples[0], Mapping):
            if len(facts.inputs) != 1:
                raise InvalidArgument(
                    f"found an example of type {type(examples[0]).__name__}, expected a dict: the model "
                    f"{self.model!r} has the inputs {sorted(facts.inputs)}"
                )
            (name,) = facts.inputs
            examples = [{name: example} for example in examples]
        columns: dict[str, tuple[str, Array]] = {}
        for name in examples[0]:
            if name not in facts.inputs:
                raise InvalidArgument(
                    f"found {name!r} in an example, expected the model's inputs {sorted(facts.inputs)}"
                )
            datatype, shape = facts.inputs[name]
            try:
                array = cast_to(_stacked([example[name] for example in examples], datatype), datatype)
            except (KeyError, ValueError) as error:
                raise InvalidArgument(f"the examples don't fit the input {name!r}: {error}") from None
            # A model that takes one number per example often declares it as a row of one.
            columns[name] = datatype, array[:, None] if array.ndim == 1 and shape[1:] in ((1,), (-1,)) else array
        return columns

    def read(self, response: Response, count: int, facts: Any) -> Predictions:
        """Return a row of the outputs for each example, and the model's name with its version."""
        length = response.headers.get(HEADER_LENGTH.lower(), "")
        header = replace(response, body=response.body[: int(length)]) if length.isdecimal() else response
        content = header.json()
        outputs = content.get("outputs")
        if not isinstance(outputs, list) or not outputs:
            raise response.endpoint_error(f"an object with {sorted(content)}", "a list `outputs`")
        rest = memoryview(response.body)[len(header.body) :]
        found: dict[str, Array] = {}
        for output in outputs:
            name, array, taken = _tensor(output, rest, response)
            if array.shape[:1] != (count,):
                shape = list(array.shape)
                raise response.model_error(
                    f"{name!r} of shape {shape} for {count} examples", f"the shape [{count}, ...]"
                )
            found[name] = array
            rest = rest[taken:]
        version = content.get("model_version")
        name = content.get("model_name") or self.model
        return Predictions(self._split(found, count), f"{name}/versions/{version}" if version else name)

    def _split(self, outputs: dict[str, Array], count: int) -> Block:
        if len(outputs) > 1:
            return [{name: array[row] for name, array in outputs.items()} for row in range(count)]
        (array,) = outputs.values()
        return list(array) if array.dtype == object else array


def _speaks_binary(send: Send) -> bool:
    try:
        extensions = send(Request("/v2")).json().get("extensions")
    except RemoteModelError:
        return False  # servers need not have this endpoint
    return isinstance(extensions, list) and BINARY in extensions


def _tensor(output: Any, rest: memoryview, response: Response) -> tuple[str, Array, int]:
    """Return the name and values of an output, and how many bytes it takes of those behind the JSON."""
    try:
        name, datatype, shape = output["name"], output["datatype"], tuple(output["shape"])
        parameters = cast("dict[str, Any]", output.get("parameters") or {})
        size = parameters.get("binary_data_size")
        if size is None:
            values = from_json(output["data"], datatype, shape)
        else:
            values = from_bytes(bytearray(rest[:size]), datatype, shape)
        if AS_JSON.items() <= parameters.items():
            values = _decoded(values)
        return name, values, size or 0
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        expected = "`name`, `datatype`, `shape` and as many values as that"
        raise response.model_error(
            f"an output that can't be read ({type(error).__name__}: {error})", expected
        ) from None


def _decoded(texts: Array) -> Array:
    """Parse values that are not tensors, such as a label with its score, from JSON."""
    objects = np.empty(texts.shape, object)
    objects.reshape(-1)[:] = [json.loads(text) for text in texts.reshape(-1).tolist()]
    return objects


def _stacked(values: list[Any], datatype: str) -> Array:
    if datatype == BYTES:
        texts = np.array(values, object)
        if not all(isinstance(text, str | bytes) for text in texts.reshape(-1).tolist()):
            raise InvalidArgument(f"found values of type {type(values[0]).__name__}, expected text")
        return texts
    shapes = {np.shape(value) for value in values}
    if len(shapes) > 1:
        raise InvalidArgument(f"found arrays of shapes {sorted(shapes)[:3]}, expected one shape in all examples")
    return np.asarray(values)


def _size(example: Any) -> int:
    if isinstance(example, Mapping):
        return sum(_size(value) for value in cast("Mapping[str, Any]", example).values())
    return len(example) if isinstance(example, str | bytes) else int(np.size(example))
