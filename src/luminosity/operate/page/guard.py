"""Refuses requests of strangers before any route sees them, and gives every reply its headers."""

from __future__ import annotations

import html
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

from luminosity.operate.page.access import Access, is_loopback
from luminosity.operate.page.replies import HEADERS, error

__all__ = ["Guard"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_METHODS = ("GET", "HEAD")
_FRIENDLY_SITES = ("same-origin", "none")  # Sec-Fetch-Site: this page itself, or the address bar
_OPEN_IT = """\
<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Luminosity</title>
<h1>This page needs its token</h1>
<p>{found}. Open the address that <code>lum ui</code> has printed: it contains the token.</p>
</html>
"""


class Guard:
    """An ASGI application around another one, which gets only requests of the user who started the server."""

    def __init__(self, app: Any, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # there are no other connections: uvicorn answers a WebSocket's handshake with 403 or 404
        headers = Headers(scope=scope)

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    found.setdefault(name, value)
            await send(message)

        refusal = self._refusal(scope, headers)
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the reply to a request that no route may see, or None."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not is_loopback(hosts[0]):
            found = f"found the Host {', '.join(hosts)!r}" if hosts else "found no Host"
            return error(
                421, f"{found}, expected localhost or 127.0.0.1: this page is only for browsers on this machine"
            )
        if scope["method"] not in _METHODS:
            return error(405, f"found {scope['method']}, expected GET: this page only reads", {"allow": "GET, HEAD"})
        site, origin = headers.get("sec-fetch-site", "none"), headers.get("origin")
        if site not in _FRIENDLY_SITES or (origin is not None and origin != f"http://{hosts[0]}"):
            return error(
                403,
                "found a request that another site has made, expected one of this page; to open the page, copy its "
                "address into the address bar",
            )
        return self._without_access(scope, headers)

    def _without_access(self, scope: Scope, headers: Headers) -> Response | None:
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        tokens = [value for name, value in query if name == "token"]
        is_known = self._access.has_cookie(headers.getlist("cookie"))
        if tokens and (is_known or (len(tokens) == 1 and self._access.is_token(tokens[0]))):
            # The address bar, the history and bookmarks get the address without the token.
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            place = "/" + quote(scope["path"].lstrip("/\\")) + (f"?{rest}" if rest else "")
            return Response(status_code=303, headers={"location": place, "set-cookie": self._access.set_cookie})
        if is_known or self._access.has_bearer(headers.get("authorization", "")):
            return None
        found = (
            "The token in this address is not the one of this server" if tokens else "No token came with the request"
        )
        if scope["path"].startswith(("/api/", "/metrics")):
            fix = "expected the cookie of the page, or the header Authorization: Bearer TOKEN"
            return error(401, f"{found[0].lower()}{found[1:]}; {fix}", {"www-authenticate": "Bearer"})
        body = _OPEN_IT.format(found=html.escape(found))
        return Response(body, 401, media_type="text/html", headers={"www-authenticate": "Bearer"})
