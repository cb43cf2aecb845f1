"""What goes to a server and what comes back, whichever protocol says what it means."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from luminosity.errors import EndpointError, RemoteModelError
from luminosity.inference.blocks import Block
from luminosity.inference.handlers.http.address import ApiKey

__all__ = ["Answer", "Ask", "HttpProtocol", "Reply", "Request", "in_json", "shortened"]


_READ_CHARACTERS = 10_000
_SHOWN_CHARACTERS = 300

Ask: TypeAlias = "Callable[[Request], Reply]"
"""Sends a request, with all retries; raises what can't be mended so."""


@dataclass(frozen=True)
class Request:
    """`path` stands below the address that the user gave. Without a body it is a GET."""

    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})


@dataclass(frozen=True)
class Reply:
    """`url` is what errors may show of the address; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str
    key: ApiKey | None = field(default=None, repr=False)

    def json(self) -> dict[str, Any]:
        """The body as an object; anything else means that something else than this protocol answers there."""
        try:
            value = json.loads(self.body)
        except ValueError:
            raise self.misread(f"the text {self.quoted(self.body)!r}", "a JSON object") from None
        if not isinstance(value, dict):
            raise self.misread(f"the JSON value {self.quoted(self.body)!r}", "a JSON object")
        return value

    def quoted(self, text: bytes | str) -> str:
        """For messages: a server may say anything, and the key, too."""
        start = text[:_READ_CHARACTERS]
        whole = start.decode(errors="replace") if isinstance(start, bytes) else start
        return shortened(self.key.hidden_in(whole) if self.key else whole)

    def misread(self, found: str, expected: str) -> EndpointError:
        """Another protocol than the expected one: no example would fare better."""
        return EndpointError(
            f"{self.url} answered {self.quoted(found)}, expected {expected}; is this the address of such a server?"
        )

    def wrong(self, found: str, expected: str) -> RemoteModelError:
        """The right protocol, but not what these examples should get."""
        return RemoteModelError(f"{self.url} answered {self.quoted(found)}, expected {expected}")


@dataclass(frozen=True)
class Answer:
    """A prediction for each example of a request, and what the server calls its model."""

    values: Block
    model_id: str | None = None


def in_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def shortened(text: str) -> str:
    """The beginning, on one line: pages and traces are long.

    >>> shortened("<html>\\n  <body>" + 1000 * "x")[:30]
    '<html> <body>xxxxxxxxxxxxxxxxx'
    """
    line = " ".join(text[:_READ_CHARACTERS].split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}…"


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
