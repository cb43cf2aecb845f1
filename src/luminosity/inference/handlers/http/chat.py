"""Chat completions as OpenAI's servers speak of them, and many others by now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from luminosity.inference.blocks import Block, rows
from luminosity.inference.handlers.http.messages import Answer, Reply, Request, in_json, shortened
from luminosity.inference.handlers.http.protocol import HttpProtocol

__all__ = ["Chat"]

_ONE_WHOLE_ANSWER = {"n": 1, "stream": False}


class Chat(HttpProtocol):
    """`POST /v1/chat/completions`: a message, or a list of them, in; the text of the answer out."""

    one_by_one = True  # The server batches what comes at once.
    max_batch_size = None
    output_type = pa.string()

    def __init__(self, model: str, parameters: Mapping[str, Any] | None = None) -> None:
        super().__init__(model)
        self._parameters = dict(parameters or {})
        self.check_arguments(self._parameters)

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        for name, only in _ONE_WHOLE_ANSWER.items():
            if arguments.get(name, only) != only:
                raise ValueError(f"{name} is {arguments[name]!r}, expected {only}: an example has one answer, whole")

    def prepare(self, block: Block) -> Block:
        return [_messages(example) for example in rows(block)]

    def cost(self, prepared: Block) -> npt.NDArray[Any]:
        return np.array([sum(len(str(message.get("content"))) for message in chat) for chat in prepared]) + 1

    def request(self, prepared: Block, arguments: dict[str, Any], facts: Any) -> Request:
        body = {"model": self.model, **self._parameters, **arguments, "messages": prepared[0]}
        return Request("/v1/chat/completions", in_json(body))

    def read(self, reply: Reply, count: int, facts: Any) -> Answer:
        answer = reply.json()
        choices: Any = answer.get("choices")
        try:
            choice = choices[0]
            text = choice["message"]["content"]
        except (TypeError, LookupError):
            expected = "`choices` with a `message` that has `content`"
            raise reply.misread(f"an object with {sorted(answer)}", expected) from None
        if not isinstance(text, str):
            found = shortened(str(choice["message"].get("refusal") or choice.get("finish_reason")))
            raise reply.wrong(f"a message without text ({found})", "text")
        return Answer([text], answer.get("model"))


def _messages(example: Any) -> list[dict[str, Any]]:
    """
    >>> _messages("Hello")
    [{'role': 'user', 'content': 'Hello'}]
    """
    if isinstance(example, str):
        return [{"role": "user", "content": example}]
    listed = cast("list[Any]", list(example)) if isinstance(example, list | tuple) else []
    if not listed or not all(isinstance(message, Mapping) and "role" in message for message in listed):
        raise TypeError(
            f"an example is of type {type(example).__name__}, expected a message (str) or a list of messages such "
            'as {"role": "user", "content": "Hello"}'
        )
    return [dict(message) for message in listed]
