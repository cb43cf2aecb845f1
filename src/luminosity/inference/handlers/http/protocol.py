"""Requests, responses and API keys, and the interface that every protocol of a model server implements."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from luminosity._shared.text import shorten
from luminosity.errors import EndpointError, InvalidArgument, RemoteModelError
from luminosity.inference.blocks import Block
from luminosity.inference.handlers.http.usage import Usage

__all__ = ["ApiKey", "HttpProtocol", "Predictions", "Request", "Response", "Send", "one_line", "to_json_bytes"]


_READ_CHARACTERS = 10_000  # how much of a text is searched for line breaks and keys, so that huge pages cost nothing
_SHOWN_CHARACTERS = 300  # how much of a server's text an error message shows

Send: TypeAlias = "Callable[[Request], Response]"
"""Sends a request and retries it; raises ``RemoteModelError`` when retries don't help."""


class ApiKey:
    """An API key that can be sent to its server, but not shown or pickled."""

    def __init__(self, variable: str, header: str, value: str) -> None:
        self._variable = variable
        self._header = header
        self._value = value

    @classmethod
    def read(cls, variable: str, header: str) -> ApiKey:
        """Read the key from an environment variable. Raises ``EndpointError`` if it is not set or not a key."""
        value = os.environ.get(variable, "").strip()
        if not value:
            raise EndpointError(
                f"the environment variable {variable}, which api_key_env names, is not set on the worker",
                fix=f"set it before the pipeline starts: export {variable}=...",
            )
        if not (value.isascii() and value.isprintable()):
            # http.client raises for these, too, but its message shows the key.
            raise EndpointError(f"the environment variable {variable} holds characters that no API key has")
        return cls(variable, header, value)

    def headers(self) -> dict[str, str]:
        """Return the header that carries the key."""
        bearer = self._header.lower() == "authorization" and " " not in self._value
        return {self._header: f"Bearer {self._value}" if bearer else self._value}

    def redact(self, text: str) -> str:
        """Replace the key in ``text``: some servers repeat a wrong key in their response."""
        return text.replace(self._value, "***")

    def __repr__(self) -> str:
        return f"ApiKey({self._variable!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} stays in the process that has read it")


@dataclass(frozen=True)
class Request:
    """A request to a model server.

    ``path`` is relative to the server's address. A request without a body is a GET.
    """

    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    is_stream: bool = False
    """Whether the response may come in pieces whose times say something."""


@dataclass(frozen=True)
class Response:
    """A response of a model server.

    Header names are in lower case. ``url`` is the part of the address that error messages may show.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str
    key: ApiKey | None = field(default=None, repr=False)
    request: Request | None = field(default=None, repr=False)
    """The request that the server answered."""
    arrivals: tuple[tuple[int, float], ...] = field(default=(), repr=False)
    """Of a stream: how many bytes of the body were there after how many seconds."""
    first_token_s: float | None = None
    """Seconds from the request to the first token of the answer; None if they are not known."""

    def json(self) -> dict[str, Any]:
        """Return the body as a JSON object. Raises ``EndpointError`` if it is anything else."""
        return self._object

    @cached_property
    def _object(self) -> dict[str, Any]:
        """The body's JSON object, parsed once: several readers need a part of it."""
        try:
            value = json.loads(self.body)
        except ValueError:
            raise self.endpoint_error(f"the text {self.quoted(self.body)!r}", "a JSON object") from None
        if not isinstance(value, dict):
            raise self.endpoint_error(f"the JSON value {self.quoted(self.body)!r}", "a JSON object")
        return value

    def quoted(self, text: bytes | str, most: int = _SHOWN_CHARACTERS) -> str:
        """Return ``text`` for an error message: on one line of ``most`` characters, and without the API key."""
        start = text[:_READ_CHARACTERS]
        whole = start.decode(errors="replace") if isinstance(start, bytes) else start
        return one_line(self.key.redact(whole) if self.key else whole, most)

    def endpoint_error(self, found: str, expected: str) -> EndpointError:
        """Return an error for a response of another protocol: no other example would succeed, either."""
        return EndpointError(
            f"{self.url} answered {self.quoted(found)}, expected {expected}",
            fix="check that this is the address of a server with this protocol",
        )

    def model_error(self, found: str, expected: str, may_pass: bool = False) -> RemoteModelError:
        """Return an error for a response of the right protocol that does not fit these examples."""
        return RemoteModelError(f"{self.url} answered {self.quoted(found)}, expected {expected}", may_pass=may_pass)


@dataclass(frozen=True)
class Predictions:
    """A prediction for each example of a request, and the server's name of the model."""

    values: Block
    model_id: str | None = None
    may_pass: bool = False
    """Whether the server says that it broke off by its own fault: the same request may get more."""


def to_json_bytes(value: Any) -> bytes:
    """Return ``value`` as compact JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def one_line(text: str, most: int = _SHOWN_CHARACTERS) -> str:
    """Return the beginning of ``text`` on one line: pages and tracebacks are long.

    >>> one_line("<html>\\n  <body>" + 1000 * "x")[:30]
    '<html> <body>xxxxxxxxxxxxxxxxx'
    """
    line = " ".join(text[:_READ_CHARACTERS].split())
    return shorten(line, most)


class HttpProtocol:
    """Turns examples into requests and responses into predictions.

    A subclass needs ``request`` and ``read``; everything else has a default. The protocol is pickled with the handler,
    and many threads call it at once, so it must not change after it is made.

    >>> class Scores(HttpProtocol):
    ...     def request(self, prepared, arguments, facts):
    ...         return Request("/score", to_json_bytes({"texts": list(prepared)}))
    ...
    ...     def read(self, response, count, facts):
    ...         return Predictions(response.json()["scores"])
    >>> Scores("small").request(["good"], {}, None).body
    b'{"texts":["good"]}'

    Args:
        model: the name by which the server knows the model.
    """

    one_by_one: bool = False
    """Whether each request has exactly one example."""
    max_batch_size: int | None = 64
    """The most examples in a request, unless the user passes ``max_batch_size``."""
    output_type: pa.DataType | None = None
    """The Arrow type of one prediction, if it is known."""
    counts_tokens: bool = False
    """Whether the server computes tokens of texts, for which ``most_new_tokens`` and ``usage`` tell."""

    def __init__(self, model: str) -> None:
        if not model:
            raise InvalidArgument(
                "found no model's name", fix="pass the name by which the server knows it: model='...'"
            )
        self.model = model

    def prepare(self, block: Block) -> Block:
        """Check and convert examples, one prepared example for each. Runs on CPU workers."""
        return block

    def cost(self, prepared: Block) -> npt.NDArray[Any]:
        """Return the cost of each prepared example. Runs on CPU workers."""
        return np.ones(len(prepared))

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        """Raise if this protocol can't take these ``inference_args``."""

    def most_new_tokens(self, arguments: dict[str, Any]) -> int | None:
        """Return the most tokens that the answer to one request may have; None if nothing bounds them."""
        return None

    def check_cache(self, arguments: dict[str, Any]) -> None:
        """Raise ``InvalidArgument`` unless the same request may get the answer that it got before.

        Answers are kept as they were sent if requests have one example, and as float32 vectors otherwise. The default
        raises.
        """
        raise InvalidArgument(
            f"found cache= for {type(self).__name__}, whose answers can't be kept",
            fix="use HttpModelHandler.chat or HttpModelHandler.embeddings, or leave cache= out",
        )

    def load_facts(self, send: Send) -> Any:
        """Ask the server what ``request`` and ``read`` need to know; they get the return value as ``facts``.

        Called once, when the model is loaded.
        """
        return None

    def request(self, prepared: Block, arguments: dict[str, Any], facts: Any) -> Request:
        """Return the request for these examples; ``arguments`` are RunInference's ``inference_args``."""
        raise NotImplementedError(f"{type(self).__name__} has no method `request`")

    def usage(self, response: Response) -> Usage | None:
        """Return the tokens that the server says it has counted; None if it says nothing, the default.

        Called before ``read``, also for answers that ``read`` refuses: they were paid for, too.
        """
        return None

    def read(self, response: Response, count: int, facts: Any) -> Predictions:
        """Return a prediction for each of the ``count`` examples, in their order."""
        raise NotImplementedError(f"{type(self).__name__} has no method `read`")
