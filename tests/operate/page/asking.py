"""Requests to the application of the page, which is called in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from luminosity.operate.web_server import Access

__all__ = ["ACCESS", "COOKIE", "SIGNED_IN", "TOKEN", "Answer", "ask"]

TOKEN = "t" * 43
ACCESS = Access(TOKEN, 4747)
COOKIE = f"{ACCESS.cookie_name}={ACCESS.cookie_value}"
SIGNED_IN = {"host": "127.0.0.1:4747", "cookie": COOKIE}
_TIMEOUT_S = 60.0


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes
    cookies: list[str] = field(default_factory=list[str])

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    app: Any,
    target: str,
    headers: Mapping[str, str] | None = None,
    method: str = "GET",
    *,
    body: bytes = b"",
    client: tuple[str, int] | None = None,
    server: tuple[str, int] | None = None,
    until: Callable[[bytes], bool] = lambda _: False,
) -> Answer:
    """Send a request to the application; leave when the body so far is enough.

    ``client`` and ``server`` are the ends of its connection.
    """
    path, _, query = target.partition("?")
    given = SIGNED_IN if headers is None else headers
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "root_path": "",
        "client": client,
        "server": server,
    }
    messages: list[Any] = []

    def said() -> bytes:
        return b"".join(each.get("body", b"") for each in messages[1:])

    async def call() -> None:
        enough = asyncio.Event()
        requests = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if requests:
                return requests.pop()
            await enough.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            messages.append(message)
            if until(said()):
                enough.set()

        await asyncio.wait_for(app(scope, receive, send), _TIMEOUT_S)

    asyncio.run(call())
    start = messages[0]
    pairs = [(name.decode(), value.decode()) for name, value in start["headers"]]
    cookies = [value for name, value in pairs if name == "set-cookie"]
    return Answer(start["status"], dict(pairs), said(), cookies)
