"""OpenAI's protocols for embeddings and chat completions, which many other servers speak, too."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from luminosity.errors import InvalidArgument, InvalidType
from luminosity.inference.blocks import Block, rows
from luminosity.inference.handlers.http.protocol import (
    HttpProtocol,
    Predictions,
    Request,
    Response,
    one_line,
    to_json_bytes,
)
from luminosity.inference.handlers.text.tokens import texts_of

__all__ = ["Chat", "Embeddings"]


_ONE_RESPONSE = {"n": 1, "stream": False}


class Embeddings(HttpProtocol):
    """``POST /v1/embeddings``: takes texts, returns a float32 vector for each.

    Vectors are requested in base64, which takes a quarter of the bytes of decimal digits. A server that does not know
    it may respond with digits.
    """

    output_type = pa.list_(pa.float32())

    def __init__(
        self,
        model: str,
        parameters: Mapping[str, Any] | None = None,
        encoding_format: Literal["base64", "float"] = "base64",
    ) -> None:
        super().__init__(model)
        self._parameters = {"encoding_format": encoding_format, **(parameters or {})}

    def prepare(self, block: Block) -> Block:
        """Check that the examples are texts."""
        return texts_of(block)

    def cost(self, prepared: Block) -> npt.NDArray[Any]:
        """Return the number of characters of each text plus one."""
        return np.array([len(text) for text in prepared]) + 1

    def request(self, prepared: Block, arguments: dict[str, Any], facts: Any) -> Request:
        """Return the request for the embeddings of all texts."""
        body = {"model": self.model, **self._parameters, **arguments, "input": list(prepared)}
        return Request("/v1/embeddings", to_json_bytes(body))

    def read(self, response: Response, count: int, facts: Any) -> Predictions:
        """Return the vectors in the order of the texts. Raises if one is missing, not finite or of another length."""
        content = response.json()
        data = content.get("data")
        if not isinstance(data, list) or not all(isinstance(item, dict) and "embedding" in item for item in data):
            raise response.endpoint_error(
                f"an object with {sorted(content)}", "a list `data` of objects with an `embedding`"
            )
        if len(data) != count:
            raise response.model_error(f"{len(data)} vectors for {count} texts", "one for each")
        places = [item.get("index", place) for place, item in enumerate(data)]
        if sorted(place for place in places if isinstance(place, int)) != list(range(count)):
            raise response.model_error(f"vectors with the indices {places[:8]}", f"0 to {count - 1}")
        vectors = [_vector(item["embedding"], response) for item in data]
        lengths = {vector.shape for vector in vectors}
        if len(lengths) != 1:
            raise response.model_error(
                f"vectors of the lengths {sorted(size for (size,) in lengths)[:8]}", "one length"
            )
        together = np.empty((count, *vectors[0].shape), np.float32)
        together[places] = vectors
        if not np.isfinite(together).all():
            raise response.model_error("a vector with NaN or infinite numbers in it", "finite numbers")
        return Predictions(together, content.get("model"))


def _vector(value: Any, response: Response) -> npt.NDArray[np.float32]:
    try:
        if isinstance(value, str):
            return np.frombuffer(base64.b64decode(value, validate=True), "<f4")
        vector = np.asarray(value, np.float32)
    except (TypeError, ValueError, binascii.Error):
        raise response.model_error("an `embedding` that can't be read", "numbers, or float32 in base64") from None
    if vector.ndim != 1:
        raise response.model_error(f"an `embedding` of {vector.ndim} dimensions", "a list of numbers")
    return vector


class Chat(HttpProtocol):
    """``POST /v1/chat/completions``: takes a message or a list of messages, returns the text of the response."""

    one_by_one = True  # the server makes its own batches
    max_batch_size = None
    output_type = pa.string()

    def __init__(self, model: str, parameters: Mapping[str, Any] | None = None) -> None:
        super().__init__(model)
        self._parameters = dict(parameters or {})
        self.check_arguments(self._parameters)

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        """Raise if an argument asks for several responses or for a stream."""
        for name, only in _ONE_RESPONSE.items():
            if arguments.get(name, only) != only:
                raise InvalidArgument(
                    f"{name} is {arguments[name]!r}, expected {only}: each example gets one complete response"
                )

    def prepare(self, block: Block) -> Block:
        """Turn each example into a list of messages."""
        return [_messages(example) for example in rows(block)]

    def cost(self, prepared: Block) -> npt.NDArray[Any]:
        """Return the number of characters of each example's messages plus one."""
        return np.array([sum(len(str(message.get("content"))) for message in chat) for chat in prepared]) + 1

    def request(self, prepared: Block, arguments: dict[str, Any], facts: Any) -> Request:
        """Return the request for the completion of one example."""
        body = {"model": self.model, **self._parameters, **arguments, "messages": prepared[0]}
        return Request("/v1/chat/completions", to_json_bytes(body))

    def read(self, response: Response, count: int, facts: Any) -> Predictions:
        """Return the text of the first choice. Raises if it has no text."""
        content = response.json()
        choices: Any = content.get("choices")
        try:
            choice = choices[0]
            text = choice["message"]["content"]
        except (TypeError, LookupError):
            expected = "`choices` with a `message` that has `content`"
            raise response.endpoint_error(f"an object with {sorted(content)}", expected) from None
        if not isinstance(text, str):
            found = one_line(str(choice["message"].get("refusal") or choice.get("finish_reason")))
            raise response.model_error(f"a message without text ({found})", "text")
        return Predictions([text], content.get("model"))


def _messages(example: Any) -> list[dict[str, Any]]:
    """Return an example as a list of messages.

    >>> _messages("Hello")
    [{'role': 'user', 'content': 'Hello'}]
    """
    if isinstance(example, str):
        return [{"role": "user", "content": example}]
    listed = cast("list[Any]", list(example)) if isinstance(example, list | tuple) else []
    if not listed or not all(isinstance(message, Mapping) and "role" in message for message in listed):
        raise InvalidType(
            f"found an example of type {type(example).__name__}, expected a message (str) or a list of messages such "
            'as {"role": "user", "content": "Hello"}'
        )
    return [dict(message) for message in listed]
