"""The guard of a team's page: it signs readers in, and refuses everyone else, before a route sees a request."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import html
import ipaddress
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any
from urllib.parse import parse_qs, quote

from starlette.datastructures import Headers
from starlette.responses import Response

from luminosity.operate.page.replies import error, json_bytes, with_headers
from luminosity.operate.page.team.openid import Attempts, OpenIdProvider, SignInError
from luminosity.operate.page.team.sessions import READER, Reader, Sessions, may_be
from luminosity.operate.page.team.settings import OpenIdSettings, ProxySettings, TeamSettings
from luminosity.operate.web_server import Access, cookies_named

__all__ = ["TeamGuard"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_ACT = re.compile(r"/api/runs/[^/]*/act")
_PATH = re.compile(r"/(?:runs|compare|drift)(?:[/?][\x21-\x5b\x5d-\x7e]*)?")  # to come back to after the sign-in
_FRIENDLY_SITES = ("same-origin", "none")  # Sec-Fetch-Site: this page itself, or the address bar
_MOST_USER = 200  # characters
_MOST_PATH = 500
_LOGIN_S = 600  # as long as an attempt counts
_SAID = """\
<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Luminosity</title>
<h1>{title}</h1>
<p>{text}</p>
{link}
</html>
"""
_SIGN_IN = '<p><a href="/login">Sign in</a></p>'


class TeamGuard:
    """An ASGI application around another one, which gets only requests of readers who have signed in.

    The scope of such a request has its :class:`Reader`.
    """

    def __init__(self, app: Any, team: TeamSettings, access: Access, *, can_act: bool) -> None:
        """Ask the OpenID provider for its keys, if there is one. Raises ``OptionError`` if it does not answer.

        ``access`` has the token with which Prometheus reads metrics. ``can_act`` says if anyone may act.
        """
        self._app = app
        self._team = team
        self._access = access
        self._can_act = can_act
        self._sessions = Sessions(team.session_s)
        self._attempts = Attempts()
        is_open_id = isinstance(team.login, OpenIdSettings)
        self._provider = OpenIdProvider(team.login, team.origin) if isinstance(team.login, OpenIdSettings) else None
        self._key = secrets.token_bytes(32)  # of the tokens for actions behind a proxy
        self._cookie = "__Host-luminosity" if team.is_encrypted else "luminosity-team"
        self._flags = f"Path=/; HttpOnly; SameSite=Lax{'; Secure' if team.is_encrypted else ''}"
        self._own: dict[str, Callable[[Scope, Headers], Awaitable[Response]]] = {}
        if is_open_id:
            self._own = {"/login": self._log_in, "/login/callback": self._come_back, "/signed-out": _signed_out}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # there are no other connections: uvicorn answers a WebSocket's handshake with 403 or 404
        send = with_headers(send)
        headers = Headers(scope=scope)
        refusal = self._refused_request(scope, headers)
        if refusal is None and scope["path"] in self._own and scope["method"] in ("GET", "HEAD"):
            refusal = await self._own[scope["path"]](scope, headers)
        if refusal is None and scope["path"] == "/metrics" and self._may_scrape(headers):
            await self._app(scope, receive, send)
            return
        found = refusal or self._reader(scope, headers)
        if isinstance(found, Reader):
            found = self._refused_reader(scope, headers, found) or found
        if isinstance(found, Response):
            await found(scope, receive, send)
            return
        scope[READER] = found
        await self._serve(scope, receive, send, found)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, reader: Reader) -> None:
        """Let the application answer, for as long as the reader is signed in: replies with events may last."""

        async def send_to_reader(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.body" and not self._sessions.goes_on(reader):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                raise _SessionEnded
            await send(message)

        try:
            await self._app(scope, receive, send_to_reader)
        except _SessionEnded:
            return

    def _refused_request(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the reply to a request that no reader of this page makes, or None."""
        hosts = headers.getlist("host")
        if [each.lower() for each in hosts] != [self._team.host.lower()]:
            return error(421, f"found the Host {', '.join(hosts)[:100]!r}, expected {self._team.host}")
        path, method = scope["path"], scope["method"]
        if _ACT.fullmatch(path) or path == "/logout":
            return self._refused_change(scope, headers)
        if method not in ("GET", "HEAD"):
            return error(405, f"found {method}, expected GET", {"allow": "GET, HEAD"})
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        # A link in a message leads to a document, and so does the provider after the sign-in.
        is_link = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
        is_document = not path.startswith(("/api/", "/metrics", "/static/"))
        is_friendly = site in _FRIENDLY_SITES or (is_link and is_document)
        if not is_friendly or (origin is not None and origin != self._team.origin):
            return error(403, "found a request that another site has made, expected one of this page")
        return None

    def _refused_change(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the reply to an action, or to signing out, that this page's scripts have not sent."""
        if scope["method"] != "POST":
            return error(405, f"found {scope['method']}, expected POST", {"allow": "POST"})
        origin, site = headers.get("origin", ""), headers.get("sec-fetch-site", "same-origin")
        if origin != self._team.origin or site != "same-origin":
            return error(403, f"found an action from the origin {origin[:100]!r}, expected one of this page")
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return error(415, "found another Content-Type, expected application/json")
        return None

    def _refused_reader(self, scope: Scope, headers: Headers, reader: Reader) -> Response | None:
        """Return the reply to what this reader may not do, or the one of signing out; None if the application answers.

        A cookie is not enough to act, since browsers send it by themselves.
        """
        is_action = _ACT.fullmatch(scope["path"]) is not None
        if not is_action and scope["path"] != "/logout":
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        is_known = hmac.compare_digest(given.strip().encode("utf-8", "replace"), reader.token.encode())
        if scheme.lower() != "bearer" or not is_known:
            return error(
                401, "found no token for actions, expected the one of your session", {"www-authenticate": "Bearer"}
            )
        if not is_action:
            if not reader.session:
                return error(404, "found no session of this page, expected to sign out at the proxy")
            self._sessions.end(reader)
            said = json_bytes({"message": "You are signed out.", "next": "/signed-out"})
            gone = {"set-cookie": f"{self._cookie}=; Max-Age=0; {self._flags}"}
            return Response(said, 200, gone, "application/json")
        if not reader.may_act:
            return error(403, "found an action, expected none: you may read this page; its owner names who may act")
        return None

    def _may_scrape(self, headers: Headers) -> bool:
        """Return whether this is Prometheus, with the token of the page."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self._access.is_lasting(given.strip())

    def _reader(self, scope: Scope, headers: Headers) -> Reader | Response:
        """Return who asks, or the reply to someone who is not signed in."""
        if isinstance(self._team.login, ProxySettings):
            return self._named_by_proxy(self._team.login, scope, headers)
        for name in cookies_named(self._cookie, headers.getlist("cookie")):
            if (found := self._sessions.reader(name)) is not None:
                return found
        if _is_document(scope) and scope["method"] in ("GET", "HEAD"):
            query = scope["query_string"].decode("latin-1")
            path = scope["path"] + (f"?{query}" if query else "")
            return Response(status_code=303, headers={"location": f"/login?to={quote(path[:_MOST_PATH], safe='')}"})
        return error(401, "found no session, expected to be signed in at /login", {"www-authenticate": "Cookie"})

    def _named_by_proxy(self, proxy: ProxySettings, scope: Scope, headers: Headers) -> Reader | Response:
        """Return whom the proxy names. Anyone else could send the same header: address and secret must be right."""
        host = (scope.get("client") or ("",))[0]
        users, given = headers.getlist(proxy.header), headers.getlist(proxy.secret_header)
        if not _is_within(host, proxy):
            return _refused(scope, 403, f"found a request from {host or 'nowhere'}, expected one from the proxy")
        if len(given) != 1 or not hmac.compare_digest(given[0].encode("latin-1", "replace"), proxy.secret):
            return _refused(scope, 403, "found no secret of the proxy, or another one, expected it once")
        if len(users) != 1 or not 0 < len(users[0]) <= _MOST_USER or not users[0].isprintable():
            return _refused(scope, 401, "found no name of a user from the proxy, expected one")
        user = users[0]
        if not may_be(user, self._team.users):
            return _refused(scope, 403, f"{user} is signed in, but is not one of the users of this page")
        token = hmac.new(self._key, user.encode(), hashlib.sha256).hexdigest()
        return Reader(user, self._may_act(user), token, time.monotonic() + self._team.session_s)

    def _may_act(self, user: str) -> bool:
        return self._can_act and may_be(user, self._team.actors)

    async def _log_in(self, scope: Scope, headers: Headers) -> Response:
        """Send a browser to the provider."""
        assert self._provider is not None
        (to,) = _only(scope, "to")
        name, attempt = self._attempts.begin(to if _PATH.fullmatch(to) else "/runs")
        reply = Response(status_code=303, headers={"location": self._provider.address(attempt)})
        reply.headers.append("set-cookie", f"{self._cookie}-login={name}; Max-Age={_LOGIN_S}; {self._flags}")
        return reply

    async def _come_back(self, scope: Scope, headers: Headers) -> Response:
        """Begin a session for a browser that comes back from the provider."""
        assert self._provider is not None
        assert isinstance(self._team.login, OpenIdSettings)
        code, state, issuer, problem = _only(scope, "code", "state", "iss", "error")
        names = cookies_named(f"{self._cookie}-login", headers.getlist("cookie"))
        try:
            attempt = self._attempts.take(names[0] if len(names) == 1 else "", state)
            if issuer not in ("", self._team.login.issuer):
                raise SignInError("Another provider has answered.")
            if problem or not code:
                raise SignInError(f"The provider has refused: {problem[:100] or 'it sent no code'}.")
            user = await asyncio.to_thread(self._provider.user, code, attempt)
        except SignInError as found:
            return _said(401, "You are not signed in", str(found), _SIGN_IN)
        if not may_be(user, self._team.users):
            return _said(403, "You may not read this page", f"{user} is not one of its users.", _SIGN_IN)
        for old in cookies_named(self._cookie, headers.getlist("cookie")):
            if (reader := self._sessions.reader(old)) is not None:
                self._sessions.end(reader)
        name = self._sessions.begin(user, may_act=self._may_act(user))
        reply = Response(status_code=303, headers={"location": attempt.path})
        reply.headers.append("set-cookie", f"{self._cookie}={name}; Max-Age={int(self._team.session_s)}; {self._flags}")
        reply.headers.append("set-cookie", f"{self._cookie}-login=; Max-Age=0; {self._flags}")
        return reply


class _SessionEnded(Exception):
    """A reader's session has ended while a reply was sent."""


def _only(scope: Scope, *names: str) -> Sequence[str]:
    """Return parameters of a request; empty for those that are not there, or more than once."""
    found = parse_qs(scope["query_string"].decode("latin-1"))
    return [found[name][0] if len(found.get(name, ())) == 1 else "" for name in names]


def _is_within(host: str, proxy: ProxySettings) -> bool:
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False  # a Unix socket has no address
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return any((mapped or found) in network for network in proxy.addresses)


def _is_document(scope: Scope) -> bool:
    return scope["path"] == "/" or _PATH.fullmatch(scope["path"]) is not None


def _refused(scope: Scope, status: int, message: str) -> Response:
    return _said(status, "You may not read this page", message) if _is_document(scope) else error(status, message)


def _said(status: int, title: str, text: str, link: str = "") -> Response:
    body = _SAID.format(title=html.escape(title), text=html.escape(text), link=link)
    return Response(body, status, media_type="text/html")


async def _signed_out(scope: Scope, headers: Headers) -> Response:
    return _said(200, "You are signed out", "The provider may still know you.", _SIGN_IN)
