"""OpenAI's protocols for embeddings and chat completions, which many other servers speak, too."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from copy import copy
from typing import Any, Literal, NoReturn, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from luminosity.errors import Fix, IncompleteAnswer, InvalidArgument, InvalidType
from luminosity.inference.answer_format import AnswerFormat
from luminosity.inference.blocks import Block, rows
from luminosity.inference.handlers.http.protocol import (
    HttpProtocol,
    Predictions,
    Request,
    Response,
    to_json_bytes,
)
from luminosity.inference.handlers.http.usage import Usage
from luminosity.inference.handlers.text.tokens import texts_of

__all__ = ["Chat", "Embeddings"]


_ONE_RESPONSE = {"n": 1, "stream": False}
_LIMITS = ("max_completion_tokens", "max_tokens")
_SHOWN_TEXT = 1000  # characters of an incomplete answer in its error: enough to see where it ends in most cases

# The words of servers for the end of an answer, in lower case.
_COMPLETE = frozenset({"stop", "eos", "eos_token", "stop_sequence", "end_turn", "complete"})
_CUT = frozenset({"length", "max_tokens", "model_length"})
_WITHHELD = frozenset({"content_filter", "safety", "recitation", "blocklist", "prohibited_content"})
_BROKEN_OFF = frozenset({"abort", "cancelled", "error", "insufficient_system_resource"})

_KEEP = Fix("to keep such texts, pass allow_incomplete=True")
_ALLOW_MORE = Fix(
    "raise max_tokens in parameters=, ask for a shorter answer, or keep such texts with allow_incomplete=True",
    command="raise the server's limit of tokens, or ask for a shorter answer",
)
_CHANGE_PROMPT = Fix("change the prompt, or keep such texts with allow_incomplete=True", command="change the prompt")
_CHECK_JSON = Fix(
    "check that the server knows response_format, and that the prompt asks for JSON; allow_incomplete=True keeps "
    "such texts"
)


class _OpenAIProtocol(HttpProtocol):
    """What both protocols share: answers say how many tokens they took."""

    counts_tokens = True

    def usage(self, response: Response) -> Usage | None:
        """Return the tokens that the answer says were counted."""
        return Usage.of(response.json().get("usage"))


class Embeddings(_OpenAIProtocol):
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

    def most_new_tokens(self, arguments: dict[str, Any]) -> int:
        """Return 0: vectors have no tokens."""
        return 0

    def check_cache(self, arguments: dict[str, Any]) -> None:
        """Do nothing: the vector of a text is always the same."""

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


class Chat(_OpenAIProtocol):
    """``POST /v1/chat/completions``: takes a message or a list of messages, returns the text of the response."""

    one_by_one = True  # the server makes its own batches
    max_batch_size = None
    output_type = pa.string()

    def __init__(
        self,
        model: str,
        parameters: Mapping[str, Any] | None = None,
        allow_incomplete: bool = False,
        stream: bool = False,
    ) -> None:
        super().__init__(model)
        self._stream = stream
        self._parameters = dict(parameters or {})
        self._allow_incomplete = allow_incomplete
        self._answer_format: AnswerFormat | None = None
        self.check_arguments(self._parameters)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """What is sent with every request."""
        return self._parameters

    @property
    def is_stream(self) -> bool:
        """Whether answers come token by token."""
        return self._stream

    def with_answer_format(self, answer_format: AnswerFormat) -> Chat:
        """Return a copy that asks the server for answers of this format; whoever reads them checks them."""
        other = copy(self)
        other._parameters = {**self._parameters, "response_format": answer_format.response_format()}
        other._answer_format = answer_format
        return other

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        """Raise if an argument asks for several responses or for a stream."""
        for name, only in _ONE_RESPONSE.items():
            if arguments.get(name, only) != only:
                raise InvalidArgument(
                    f"{name} is {arguments[name]!r}, expected {only}: each example gets one complete response"
                )

    def most_new_tokens(self, arguments: dict[str, Any]) -> int | None:
        """Return the limit of an answer's tokens that every request has; None if it has none."""
        sent = {**self._parameters, **arguments}
        found = next((sent[name] for name in _LIMITS if sent.get(name) is not None), None)
        is_limit = isinstance(found, int) and not isinstance(found, bool) and found > 0  # some servers: -1 for no limit
        return found if is_limit else None

    def check_cache(self, arguments: dict[str, Any]) -> None:
        """Raise ``InvalidArgument`` if answers are sampled without a seed: each request may get another one."""
        sent = {**self._parameters, **arguments}
        if sent.get("temperature") and sent.get("seed") is None:
            raise InvalidArgument(
                f"found cache= with temperature={sent['temperature']!r} and no seed: one answer would stand for many",
                fix='pass a seed, parameters={"seed": 7}, or "temperature": 0, or leave cache= out',
            )

    def is_sampled(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether answers are drawn by chance: servers do so unless the temperature is 0."""
        sent = {**self._parameters, **arguments}
        return sent.get("temperature") != 0 and sent.get("seed") is None

    def prepare(self, block: Block) -> Block:
        """Turn each example into a list of messages."""
        return [_messages(example) for example in rows(block)]

    def cost(self, prepared: Block) -> npt.NDArray[Any]:
        """Return the number of characters of each example's messages plus one."""
        return np.array([sum(len(str(message.get("content"))) for message in chat) for chat in prepared]) + 1

    def request(self, prepared: Block, arguments: dict[str, Any], facts: Any) -> Request:
        """Return the request for the completion of one example."""
        body = {"model": self.model, **self._parameters, **arguments, "messages": prepared[0]}
        if self._stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return Request("/v1/chat/completions", to_json_bytes(body), is_stream=self._stream)

    def read(self, response: Response, count: int, facts: Any) -> Predictions:
        """Return the text of the only choice. Raises ``IncompleteAnswer`` unless it is all that was asked for."""
        content = response.json()
        choice = _only_choice(content, response)
        text = choice["message"]["content"]
        if not (self._allow_incomplete and isinstance(text, str)):
            _check_complete(choice, text, response, checks_json=self._answer_format is None)
        if self._answer_format is not None:
            text = self._answer_format.unwrapped(text)
        return Predictions([text], content.get("model"), may_pass=_reason(choice) in _BROKEN_OFF)


def _only_choice(content: dict[str, Any], response: Response) -> dict[str, Any]:
    """Return the choice of a chat completion, which has a message with content."""
    choices: Any = content.get("choices")
    if not choices and content.get("error"):
        # Gateways send the error of the server behind them with the status 200.
        raise response.model_error(f"the error {content['error']}", "an answer", may_pass=True)
    try:
        choice = choices[0]
        choice["message"]["content"]
    except (TypeError, LookupError):
        expected = "`choices` with a `message` that has `content`"
        raise response.endpoint_error(f"an object with {sorted(content)}", expected) from None
    if len(choices) > 1:
        raise response.model_error(f"{len(choices)} choices", "one: each example gets one response")
    return choice


def _reason(choice: Mapping[str, Any]) -> str:
    """Return the server's word for why a text has ended, in lower case."""
    return str(choice.get("finish_reason") or "stop").lower()


def _check_complete(choice: Mapping[str, Any], text: Any, response: Response, checks_json: bool) -> None:
    """Raise ``IncompleteAnswer`` if the text of a choice is not the whole answer.

    The same request gets the same answer, so none of these errors is retried, except that of a server which says that
    it stopped by its own fault.
    """
    message, reason = choice["message"], choice.get("finish_reason")
    came = f": {response.quoted(text, _SHOWN_TEXT)!r}" if isinstance(text, str) and text else ", without text"
    word = _reason(choice)

    def incomplete(found: str, fix: Fix | str, may_pass: bool = False) -> IncompleteAnswer:
        return IncompleteAnswer(f"{response.url} answered with {found}{came}", fix=fix, may_pass=may_pass)

    if message.get("refusal"):
        raise incomplete(f"a refusal ({response.quoted(str(message['refusal']))})", "change the prompt")
    if word in _CUT:
        raise incomplete(f"a text that it cut{_limit_of(_asked(response))} (finish_reason {reason!r})", _ALLOW_MORE)
    if word in _WITHHELD:
        raise incomplete(f"a text that its filter cut or removed (finish_reason {reason!r})", _CHANGE_PROMPT)
    if word in _BROKEN_OFF:
        raise incomplete(f"a text that it broke off (finish_reason {reason!r})", _KEEP, may_pass=True)
    if message.get("tool_calls") or message.get("function_call"):
        raise incomplete(f"a call of a tool (finish_reason {reason!r})", "remove tools from parameters")
    if not isinstance(text, str) or not text.strip():
        raise incomplete(f"an empty message (finish_reason {reason!r})", _CHANGE_PROMPT)
    if word not in _COMPLETE:
        raise incomplete(f"finish_reason {reason!r}, which is none of {sorted(_COMPLETE)}", _KEEP)
    if checks_json and (problem := _json_problem(text, _asked(response, "response_format").get("response_format"))):
        raise incomplete(f"a text that is not the JSON that response_format asks for ({problem})", _CHECK_JSON)


def _asked(response: Response, needed: str = "") -> dict[str, Any]:
    """Return what the request asked for; nothing if its body does not have the name ``needed``, to save the parsing."""
    body = response.request.body if response.request else None
    return json.loads(body) if body and needed.encode() in body else {}


def _limit_of(asked: Mapping[str, Any]) -> str:
    """Return the limit that a request has set.

    >>> _limit_of({"max_tokens": 16}), _limit_of({})
    (' at max_tokens=16', ' at its limit of tokens')
    """
    found = [f"{name}={asked[name]}" for name in _LIMITS if asked.get(name)]
    return f" at {found[0] if found else 'its limit of tokens'}"


def _json_problem(text: str, wanted: Any) -> str:
    """Return why a text is not the JSON that ``response_format`` asks for, or "". No schema is checked.

    >>> _json_problem('{"a": 1', {"type": "json_object"})
    "Expecting ',' delimiter, line 1 column 8"
    >>> _json_problem("[1]", {"type": "json_object"}), _json_problem("[1]", {"type": "json_schema"})
    ('a list, expected an object', '')
    """
    kind = cast("Mapping[str, Any]", wanted).get("type") if isinstance(wanted, Mapping) else None
    if kind not in ("json_object", "json_schema"):
        return ""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        return f"{error.msg}, line {error.lineno} column {error.colno}"
    except (ValueError, RecursionError) as error:
        return str(error)
    is_object = kind == "json_schema" or isinstance(value, dict)
    return "" if is_object else f"a {type(value).__name__}, expected an object"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


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
