"""OpenAI's API for embeddings."""

from __future__ import annotations

import base64
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from starlette.responses import Response

from luminosity.inference.serving.requests import RequestError, json_response, read_json
from luminosity.inference.serving.served_model import ServedModel

__all__ = ["embeddings", "models"]


def models(model: ServedModel) -> Response:
    """Return the response of ``GET /v1/models``."""
    one = {"id": model.name, "object": "model", "created": 0, "owned_by": "luminosity"}
    return json_response({"object": "list", "data": [one]})


def embeddings(model: ServedModel, body: bytes) -> Response:
    """Return the response of ``POST /v1/embeddings``."""
    request = read_json(body)
    texts = _texts(request)
    form = request.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise RequestError(400, f"encoding_format is {form!r}, expected float or base64")
    name = request.get("model")
    if name not in (None, model.name):
        raise RequestError(404, f"found the model {name!r}, expected {model.name!r}", "model_not_found")
    predictions = model.predict(texts)
    vectors = [_vector(value) for value in predictions.values]
    dimensions = request.get("dimensions")
    if dimensions not in (None, len(vectors[0])):
        raise RequestError(400, f"dimensions is {dimensions!r}, expected {len(vectors[0])}")
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, form)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": predictions.cost, "total_tokens": predictions.cost}
    return json_response({"object": "list", "data": data, "model": model.name, "usage": usage})


def _texts(request: dict[str, Any]) -> list[str]:
    found = request.get("input")
    texts: list[Any] = cast("list[Any]", found) if isinstance(found, list) else [found]
    if not texts:
        raise RequestError(400, "input is an empty list, expected a string or a list of strings")
    for text in texts:
        if not isinstance(text, str):
            hint = "; token ids are not supported" if isinstance(text, int | list) else ""
            problem = "is missing" if found is None else f"has a value of type {type(text).__name__}"
            raise RequestError(400, f"input {problem}, expected a string or a list of strings{hint}")
    return texts


def _vector(value: Any) -> npt.NDArray[np.float32]:
    try:
        vector = np.asarray(value, np.float32)
    except (ValueError, TypeError):
        vector = np.empty(())
    if vector.ndim != 1:
        raise RequestError(
            400, f"this model returns a {type(value).__name__} for a text, not an embedding; use /v2 for predictions"
        )
    return cast("npt.NDArray[np.float32]", vector)


def _encoded(vector: npt.NDArray[np.float32], form: str) -> Any:
    if form == "float":
        return vector.tolist()
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
