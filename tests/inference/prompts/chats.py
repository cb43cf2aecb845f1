"""A scripted server of chats for tests of prompts, and answers as it sends them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from luminosity import HttpModelHandler
from tests.inference.handlers.model_server import ModelServer, Said, Seen


def said(text: str, finish_reason: str = "stop") -> Said:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return Said({"object": "chat.completion", "choices": [choice], "model": "talker"})


def replying(reply: Callable[[list[dict[str, str]]], str]) -> Callable[[Seen], Said]:
    """Return a script that answers with what ``reply`` makes of the messages, in the form that was asked for."""
    return lambda seen: said(in_format(seen, reply(seen.json["messages"])))


def in_format(seen: Seen, text: str) -> str:
    """Wrap an answer as servers do that know ``response_format``."""
    wanted = seen.json.get("response_format", {}).get("json_schema", {}).get("schema", {})
    if list(wanted.get("properties", ())) != ["answer"]:
        return text
    kind = wanted["properties"]["answer"].get("type")
    return json.dumps({"answer": text if kind == "string" else json.loads(text)})


def last(messages: list[dict[str, str]]) -> str:
    return messages[-1]["content"]


def talker(server: ModelServer, **arguments: Any) -> HttpModelHandler:
    return HttpModelHandler.chat(server.url, "talker", **arguments)


class Counted:
    """Answers that count the requests with each text."""

    def __init__(self, reply: Callable[[list[dict[str, str]]], str]) -> None:
        self.reply = reply
        self.counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, seen: Seen) -> Said:
        messages = seen.json["messages"]
        with self._lock:
            self.counts[last(messages)] = self.counts.get(last(messages), 0) + 1
        return said(in_format(seen, self.reply(messages)))
