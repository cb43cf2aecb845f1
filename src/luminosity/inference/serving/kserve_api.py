"""KServe's Open Inference Protocol, version 2: predictions, health and metadata."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, cast

import pyarrow as pa
from starlette.responses import Response

from luminosity.errors import OptionError
from luminosity.inference.handler import Handler
from luminosity.inference.handlers.text.text_handler import TextHandler
from luminosity.inference.serving.kserve_tensors import DATATYPES, OUTPUT, Tensor, datatype_of, of_values
from luminosity.inference.serving.requests import RequestError, json_response, read_json
from luminosity.inference.serving.served_model import ServedModel

__all__ = [
    "BINARY_HEADER",
    "declared_inputs",
    "infer",
    "live",
    "model_metadata",
    "model_ready",
    "ready",
    "server_metadata",
]


BINARY_HEADER = "Inference-Header-Content-Length"

Described = dict[str, Any]


def server_metadata() -> Response:
    """Return the response of ``GET /v2``."""
    return json_response({"name": "luminosity", "version": version("luminosity"), "extensions": ["binary_tensor_data"]})


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
    tensors = _inputs(request, binary)
    output = of_values(model.predict(_examples(tensors)).values)
    response: dict[str, Any] = {"model_name": name}
    if "id" in request:
        response["id"] = request["id"]
    if not as_binary:
        return json_response({**response, "outputs": [output.to_json()]})
    described, data = output.to_binary()
    text = json.dumps({**response, "outputs": [described]}).encode()
    headers = {BINARY_HEADER: str(len(text))}
    return Response(text + data, headers=headers, media_type="application/octet-stream")


def _check_name(model: ServedModel, name: str) -> None:
    if name != model.name:
        raise RequestError(404, f"found the model {name!r}, expected {model.name!r}")


def _split(body: bytes, header_length: str | None) -> tuple[memoryview, memoryview]:
    """Split the body into the JSON and the binary data after it."""
    whole = memoryview(body)
    if header_length is None:
        return whole, whole[:0]
    if not header_length.isdecimal() or int(header_length) > len(whole):
        raise RequestError(400, f"{BINARY_HEADER} is {header_length!r}, and the body has {len(whole)} bytes")
    return whole[: int(header_length)], whole[int(header_length) :]


def _inputs(request: dict[str, Any], binary: memoryview) -> list[Tensor]:
    found = request.get("inputs")
    if not isinstance(found, list) or not found:
        raise RequestError(400, "inputs are missing, expected a list of tensors: name, shape, datatype, data")
    tensors: list[Tensor] = []
    for described in cast("list[Any]", found):
        tensor, length = Tensor.read(described, binary)
        tensors.append(tensor)
        binary = binary[length:]
    if len(binary):
        raise RequestError(400, f"found {len(binary)} bytes after the data of the inputs, expected none")
    return tensors


def _examples(tensors: list[Tensor]) -> list[Any]:
    """Return the rows of one tensor, or of several tensors, dicts of their rows by name."""
    counts = {tensor.name: len(tensor.values) for tensor in tensors}
    if len(counts) < len(tensors):
        raise RequestError(400, "two inputs have the same name")
    if len(set(counts.values())) > 1:
        raise RequestError(400, f"the inputs have different numbers of examples: {counts}")
    if not next(iter(counts.values())):
        raise RequestError(400, "there are no examples in the inputs")
    if len(tensors) == 1:
        return list(tensors[0].values)
    names = list(counts)
    return [dict(zip(names, row, strict=True)) for row in zip(*(tensor.values for tensor in tensors), strict=True)]


def _wants_binary(request: dict[str, Any]) -> bool:
    outputs: Any = request.get("outputs") or []
    parameters: Any = request.get("parameters") or {}
    if not isinstance(outputs, list) or not isinstance(parameters, dict):
        raise RequestError(400, "expected outputs to be a list and parameters to be an object")
    default = bool(cast("dict[str, Any]", parameters).get("binary_data_output"))
    for output in cast("list[Any]", outputs):
        fields: dict[str, Any] = output if isinstance(output, dict) else {}
        if fields.get("name") != OUTPUT:
            raise RequestError(400, f"found the output {output!r}, expected {OUTPUT!r}, the only one")
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
    return [_described(OUTPUT, datatype, sizes) if datatype else _described(OUTPUT, "BYTES")]


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
