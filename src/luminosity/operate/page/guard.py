"""The guard around the page's application: it refuses strangers, and actions of others, before a route sees them."""

from __future__ import annotations

import html
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers
from starlette.responses import Response

from luminosity.operate.page.replies import error, with_headers
from luminosity.operate.web_server import Access, is_loopback, is_own_peer

__all__ = ["Guard"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_METHODS = ("GET", "HEAD")
_ACT = re.compile(r"/api/runs/[^/]*/act")
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

    def __init__(self, app: Any, access: Access, *, can_act: bool = False) -> None:
        self._app = app
        self._access = access
        self._can_act = can_act

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # there are no other connections: uvicorn answers a WebSocket's handshake with 403 or 404
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        await (refusal or self._app)(scope, receive, with_headers(send))

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the reply to a request that no route may see, or None."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not is_loopback(hosts[0]):
            found = f"found the Host {', '.join(hosts)!r}" if hosts else "found no Host"
            return error(
                421, f"{found}, expected localhost or 127.0.0.1: this page is only for browsers on this machine"
            )
        if _ACT.fullmatch(scope["path"]):
            return self._refused_action(scope["method"], hosts[0], headers)
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

    def _refused_action(self, method: str, host: str, headers: Headers) -> Response | None:
        """Return the reply to an action that is not allowed, or None.

        A cookie is not enough, since browsers send it by themselves. A page of another site can neither know the token
        nor send the header: that takes a reply to ``OPTIONS`` which this server does not give.
        """
        if not self._can_act:
            return error(403, "found an action, expected none: this page only reads; use `lum stop` and the like")
        if method != "POST":
            return error(405, f"found {method}, expected POST", {"allow": "POST"})
        origin, site = headers.get("origin", ""), headers.get("sec-fetch-site", "same-origin")
        if origin != f"http://{host}" or site != "same-origin":
            return error(403, f"found an action from the origin {origin[:100]!r}, expected one of this page")
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return error(415, "found another Content-Type, expected application/json")
        if not self._access.may_act(headers.get("authorization", "")):
            return error(
                401,
                "found no token for actions, expected the header Authorization: Bearer TOKEN; in a browser, open the "
                "address that `lum ui` has printed",
                {"www-authenticate": "Bearer"},
            )
        return None

    def _without_access(self, scope: Scope, headers: Headers) -> Response | None:
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        tokens = [value for name, value in query if name == "token"]
        is_known = self._access.has_cookie(headers.getlist("cookie"))
        is_right = len(tokens) == 1 and self._access.is_token(tokens[0])
        if tokens and (is_known or is_right):
            # The address bar, the history and bookmarks get the address without the token.
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            place = "/" + quote(scope["path"].lstrip("/\\")) + (f"?{rest}" if rest else "")
            # Others may have seen a token that counts once: it must come from a process of this user.
            is_own = is_right and (self._access.is_lasting(tokens[0]) or is_own_peer(scope))
            if is_own and self._can_act:
                place += f"#act={self._access.action_token}"  # which stays in the browser: its script takes it away
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
