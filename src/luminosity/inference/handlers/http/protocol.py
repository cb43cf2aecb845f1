"""What a handler needs to know of the language that a server speaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from luminosity.inference.blocks import Block
from luminosity.inference.handlers.http.messages import Answer, Reply, Request

__all__ = ["Ask", "HttpProtocol"]

Ask: TypeAlias = Callable[[Request], Reply]
"""Sends a request, with all retries; raises what can't be mended so."""


class HttpProtocol:
    """Examples into requests, replies into predictions. `request` and `read` are a complete protocol.

    It is pickled with the handler, and used by many threads at once: it keeps nothing of what it sees.
    """

    one_by_one: bool = False
    """Whether each example is a request of its own."""
    max_batch_size: int | None = 64
    """How many examples a request has at most, unless the user says so."""
    output_type: pa.DataType | None = None
    """The Arrow type of one prediction, where that is known."""

    def __init__(self, model: str) -> None:
        if not model:
            raise ValueError("found no model's name, expected the one by which the server knows it: model='...'")
        self.model = model

    def prepare(self, block: Block) -> Block:
        """On CPU workers: check and convert examples, one for one."""
        return block

    def cost(self, prepared: Block) -> npt.NDArray[Any]:
        return np.ones(len(prepared))

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        """Raise for `inference_args` that this protocol can't take."""

    def greet(self, ask: Ask) -> Any:
        """When the model is loaded: ask the server what `request` and `read` need to know; they get it as `facts`."""
        return None

    def request(self, prepared: Block, arguments: dict[str, Any], facts: Any) -> Request:
        """The request for these examples; `arguments` are RunInference's `inference_args`."""
        raise NotImplementedError(f"{type(self).__name__} has no `request`")

    def read(self, reply: Reply, count: int, facts: Any) -> Answer:
        """A prediction for each of the `count` examples, in their order."""
        raise NotImplementedError(f"{type(self).__name__} has no `read`")
