"""Puts the answer of a chat together that a server has sent as a stream of events, one for each token or so."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from luminosity.inference.handlers.http.protocol import Response, to_json_bytes
from luminosity.inference.handlers.http.retries import RetryableError

__all__ = ["is_event_stream", "whole_answer"]

_TEXTS = ("content", "refusal")
_CALLS = ("tool_calls", "function_call")
_END = "[DONE]"


def is_event_stream(response: Response) -> bool:
    """Return whether a server has sent a stream of events; one that does not know ``stream`` sends JSON."""
    return 200 <= response.status < 300 and response.headers.get("content-type", "").startswith("text/event-stream")


def whole_answer(response: Response) -> Response:
    """Return the response that the server would have sent without a stream, with the time to the first token.

    Raises ``RetryableError`` if the stream ends before the answer does.
    """
    message: dict[str, Any] = {"role": "assistant", "content": None}
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": None}
    whole: dict[str, Any] = {"object": "chat.completion", "choices": [choice]}
    first_token_s: float | None = None
    has_ended = False
    for end, data in _events(response.body):
        if data == _END:
            has_ended = True
            break
        try:
            event: Any = json.loads(data)
        except ValueError:
            raise response.endpoint_error(f"the event {data!r}", "a JSON object") from None
        if not isinstance(event, dict):
            raise response.endpoint_error(f"the event {data!r}", "a JSON object")
        if event.get("error"):
            return replace(response, body=to_json_bytes({"error": event["error"]}))
        whole |= {name: event[name] for name in ("id", "model", "usage") if event.get(name) is not None}
        for part in _choices(event):
            if part.get("index", 0) != 0:
                raise response.model_error("several choices", "one: each example gets one response")
            if _add(part, choice) and first_token_s is None:
                first_token_s = _arrival(response.arrivals, end)
    if not (has_ended or choice["finish_reason"]):
        raise RetryableError(f"{response.url} broke the stream off")
    return replace(response, body=to_json_bytes(whole), arrivals=(), first_token_s=first_token_s)


def _events(body: bytes) -> Iterator[tuple[int, str]]:
    """Yield the data of each event, with the place in the body where it ends."""
    place = 0
    for line in body.splitlines(keepends=True):
        place += len(line)
        if line.startswith(b"data:"):
            yield place, line[5:].decode(errors="replace").strip()


def _choices(event: dict[str, Any]) -> list[dict[str, Any]]:
    found: Any = event.get("choices")
    return [each for each in cast("list[Any]", found) if isinstance(each, dict)] if isinstance(found, list) else []


def _add(part: dict[str, Any], choice: dict[str, Any]) -> bool:
    """Add what an event has to the answer, and return whether it has some of it."""
    choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
    delta: Any = part.get("delta")
    if not isinstance(delta, dict):
        return False
    found, message = cast("dict[str, Any]", delta), choice["message"]
    has_more = False
    for name in _TEXTS:
        if isinstance(found.get(name), str):
            message[name] = (message.get(name) or "") + found[name]
            has_more = has_more or bool(found[name])
    for name in _CALLS:
        if found.get(name):
            message[name] = found[name]  # an answer with a call is refused, whatever it calls
            has_more = True
    return has_more or bool(found.get("reasoning_content") or found.get("reasoning"))


def _arrival(arrivals: Sequence[tuple[int, float]], end: int) -> float | None:
    """Return when the body up to a place had arrived, in seconds since the request was sent."""
    return next((seconds for place, seconds in arrivals if place >= end), None)
