"""The server's side of KServe's Open Inference Protocol, version 2: predictions, health and metadata."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, cast

import numpy as np
import pyarrow as pa
from starlette.responses import Response

from luminosity._shared.text import shorten_repr
from luminosity.errors import OptionError
from luminosity.inference.handler import Handler
from luminosity.inference.handlers.http.tensors import (
    AS_JSON,
    BINARY,
    BYTES,
    DATATYPES,
    HEADER_LENGTH,
    Array,
    datatype_of,
    from_bytes,
    from_json,
    objects,
    write_tensor,
)
from luminosity.inference.handlers.text.text_handler import TextHandler
from luminosity.inference.serving.served_model import RequestError, ServedModel, json_response, read_json

__all__ = [
    "declared_inputs",
    "infer",
    "live",
    "model_metadata",
    "model_ready",
    "ready",
    "server_metadata",
]


_OUTPUT = "output"
_SHOWN_CHARACTERS = 80  # how much of a value an error message shows

Described = dict[str, Any]


def server_metadata() -> Response:
    """Return the response of ``GET /v2``."""
    return json_response({"name": "luminosity", "version": version("luminosity"), "extensions": [BINARY]})


def live() -> Response:
    """Return the response of ``GET /v2/health/live``."""
    return json_response({"live": True})


def ready(model: ServedModel) -> Response:
    """Return the response of ``GET /v2/health/ready``."""
    return json_response({"ready": model.is_ready}, 200 if model.is_ready else 503)


def model_ready(model: ServedModel, name: str) -> Response:
    """Return the response of ``GET /v2/models/NAME/ready``."""
    _check_name(model, name)
    status = 200 if model.is_ready else 503
    return json_response({"name": name, "ready": model.is_ready}, status)


def model_metadata(model: ServedModel, name: str) -> Response:
    """Return the response of ``GET /v2/models/NAME``: the names, types and shapes of inputs and outputs."""
    _check_name(model, name)
    inputs = model.inputs or known_inputs(model.handler)
    about = {"name": name, "platform": "luminosity", "inputs": inputs, "outputs": known_outputs(model.handler)}
    return json_response(about)


def infer(model: ServedModel, name: str, body: bytes, header_length: str | None) -> Response:
    """Return the response of ``POST /v2/models/NAME/infer``.

    ``header_length`` is the size of the JSON if binary data follows it.
    """
    _check_name(model, name)
    header, binary = _split(body, header_length)
    request = read_json(header)
    as_binary = _wants_binary(request)
    array, datatype, parameters = output_of(model.predict(_examples(_inputs(request, binary))).values)
    output, data = write_tensor(_OUTPUT, array, datatype, as_binary, parameters)
    response: dict[str, Any] = {"model_name": name, "outputs": [output]}
    if "id" in request:
        response["id"] = request["id"]
    if not as_binary:
        return json_response(response)
    text = json.dumps(response).encode()
    return Response(text + data, headers={HEADER_LENGTH: str(len(text))}, media_type="application/octet-stream")


def _check_name(model: ServedModel, name: str) -> None:
    if name != model.name:
        raise RequestError(404, f"found the model {name!r}, expected {model.name!r}")


def _split(body: bytes, header_length: str | None) -> tuple[memoryview, memoryview]:
    """Split the body into the JSON and the binary data after it."""
    whole = memoryview(body)
    if header_length is None:
        return whole, whole[:0]
    if not header_length.isdecimal() or int(header_length) > len(whole):
        raise RequestError(400, f"{HEADER_LENGTH} is {header_length!r}, and the body has {len(whole)} bytes")
    return whole[: int(header_length)], whole[int(header_length) :]


def _inputs(request: dict[str, Any], binary: memoryview) -> dict[str, Sequence[Any]]:
    """Return the values of each input by name."""
    found = request.get("inputs")
    if not isinstance(found, list) or not found:
        raise RequestError(400, "inputs are missing, expected a list of tensors: name, shape, datatype, data")
    inputs: dict[str, Sequence[Any]] = {}
    for described in cast("list[Any]", found):
        name, values, length = _read_input(described, binary)
        if name in inputs:
            raise RequestError(400, "two inputs have the same name")
        inputs[name] = values
        binary = binary[length:]
    if len(binary):
        raise RequestError(400, f"found {len(binary)} bytes after the data of the inputs, expected none")
    return inputs


def _read_input(described: Any, binary: memoryview) -> tuple[str, Sequence[Any], int]:
    """Return the name and the values of an input, and how many of the binary bytes it takes."""
    if not isinstance(described, dict):
        raise RequestError(400, f"found the input {_short(described)}, expected an object with name, shape, data")
    fields = cast("dict[str, Any]", described)
    name = fields.get("name")
    if not isinstance(name, str):
        raise RequestError(400, f"found an input whose name is {_short(name)}, expected a string")
    shape, datatype, data = _shape(name, fields.get("shape")), fields.get("datatype"), fields.get("data")
    if datatype not in DATATYPES:
        known = ", ".join(DATATYPES)
        raise RequestError(400, f"input {name!r} has the datatype {_short(datatype)}, expected one of {known}")
    parameters: Any = fields.get("parameters") or {}
    length = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
    if length is not None and (not isinstance(length, int) or not 0 <= length <= len(binary)):
        raise RequestError(
            400, f"input {name!r} has the binary_data_size {_short(length)}, expected at most {len(binary)}"
        )
    if length is None and not isinstance(data, list):
        raise RequestError(400, f"input {name!r} has the data {_short(data)}, expected a list")
    try:
        array = from_json(data, datatype, shape) if length is None else from_bytes(binary[:length], datatype, shape)
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError(400, f"the data of input {name!r} is not {datatype}: {error}") from None
    return name, _texts(name, array) if datatype == BYTES else cast("Sequence[Any]", array), length or 0


def _shape(name: str, found: Any) -> list[int]:
    sizes = cast("list[Any]", found) if isinstance(found, list) else []
    # A size of 0 after the first would allow any number of examples in an empty body.
    if not sizes or not all(type(size) is int and size >= 0 for size in sizes) or 0 in sizes[1:]:
        raise RequestError(
            400, f"input {name!r} has the shape {_short(found)}, expected a list of sizes, the number of examples first"
        )
    return sizes


def _texts(name: str, array: Array) -> list[str]:
    texts = array.reshape(-1).tolist()
    wrong = next((text for text in texts if not isinstance(text, str)), None)
    if wrong is not None:
        raise RequestError(400, f"input {name!r} has {_short(wrong)} in its data, expected strings in UTF-8 for BYTES")
    if len(texts) != len(array):
        raise RequestError(
            400, f"input {name!r} has the shape {list(array.shape)}, expected one string for each example"
        )
    return texts


def _short(value: Any) -> str:
    return shorten_repr(value, _SHOWN_CHARACTERS)


def _examples(inputs: dict[str, Sequence[Any]]) -> list[Any]:
    """Return the rows of one tensor, or of several tensors, dicts of their rows by name."""
    counts = {name: len(values) for name, values in inputs.items()}
    if len(set(counts.values())) > 1:
        raise RequestError(400, f"the inputs have different numbers of examples: {counts}")
    if not next(iter(counts.values())):
        raise RequestError(400, "there are no examples in the inputs")
    if len(inputs) == 1:
        return list(next(iter(inputs.values())))
    return [dict(zip(inputs, row, strict=True)) for row in zip(*inputs.values(), strict=True)]


def output_of(values: list[Any]) -> tuple[Array, str, dict[str, Any]]:
    """Return predictions as the array, the datatype and the parameters of one tensor.

    Strings, numbers and arrays of one shape become a tensor directly, other values become JSON strings.

    >>> output_of([np.float32([1, 2]), np.float32([3, 4])])[0].tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    >>> output_of([{"label": "good"}])
    (array(['{"label": "good"}'], dtype=object), 'BYTES', {'content_type': 'json'})
    """
    if all(isinstance(value, str) for value in values):
        return objects(values, [len(values)]), BYTES, {}
    try:
        array = np.asarray(values)
    except (ValueError, TypeError):  # for example, arrays of different shapes
        array = np.empty(0, object)
    if (datatype := datatype_of(array.dtype)) is not None:
        return array, datatype, {}
    return objects([json.dumps(value, default=plain) for value in values], [len(values)]), BYTES, AS_JSON


def plain(value: Any) -> Any:
    """Return a value that JSON does not know in a form that it knows."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, set | frozenset):
        return sorted(cast("set[Any]", value), key=repr)
    return getattr(value, "__dict__", None) or str(value)


def _wants_binary(request: dict[str, Any]) -> bool:
    outputs: Any = request.get("outputs") or []
    parameters: Any = request.get("parameters") or {}
    if not isinstance(outputs, list) or not isinstance(parameters, dict):
        raise RequestError(400, "expected outputs to be a list and parameters to be an object")
    default = bool(cast("dict[str, Any]", parameters).get("binary_data_output"))
    for output in cast("list[Any]", outputs):
        fields: dict[str, Any] = output if isinstance(output, dict) else {}
        if fields.get("name") != _OUTPUT:
            raise RequestError(400, f"found the output {output!r}, expected {_OUTPUT!r}, the only one")
        default = bool((fields.get("parameters") or {}).get("binary_data", default))
    return default


def declared_inputs(declared: Sequence[str]) -> list[Described]:
    """Return KServe's description of inputs that a user declares with ``--input``.

    >>> declared_inputs(["pixels:FP32:224,224,3"])
    [{'name': 'pixels', 'datatype': 'FP32', 'shape': [-1, 224, 224, 3]}]
    """
    return [_declared(each) for each in declared]


def known_inputs(handler: Handler[Any, Any, Any]) -> list[Described]:
    """Return the description of the inputs of a text handler; the inputs of other handlers are not known."""
    return [_described("input", "BYTES")] if isinstance(handler, TextHandler) else []


def known_outputs(handler: Handler[Any, Any, Any]) -> list[Described]:
    """Return the description of the output, if the handler has an ``output_type``.

    >>> class Embedder(Handler):
    ...     output_type = pa.list_(pa.float32(), 384)
    >>> known_outputs(Embedder())
    [{'name': 'output', 'datatype': 'FP32', 'shape': [-1, 384]}]
    """
    kind: Any = handler.output_type
    if kind is None:
        return []
    sizes: list[int] = []
    while pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        sizes.append(kind.list_size if pa.types.is_fixed_size_list(kind) else -1)
        kind = kind.value_type
    datatype = datatype_of(kind.to_pandas_dtype()) if pa.types.is_primitive(kind) else None
    return [_described(_OUTPUT, datatype, sizes) if datatype else _described(_OUTPUT, "BYTES")]


def _described(name: str, datatype: str, sizes: Sequence[int] = ()) -> Described:
    return {"name": name, "datatype": datatype, "shape": [-1, *sizes]}


def _declared(text: str) -> Described:
    name, _, rest = text.partition(":")
    datatype, colon, sizes = rest.partition(":")
    try:
        numbers = [int(size) for size in sizes.split(",")] if colon else []
    except ValueError:
        numbers = [0]
    if not name or datatype not in DATATYPES or any(size < 1 and size != -1 for size in numbers):
        raise OptionError(
            f"--input={text}: expected NAME:DATATYPE or NAME:DATATYPE:SIZE,SIZE with one of {', '.join(DATATYPES)}"
        )
    return _described(name, datatype, numbers)
