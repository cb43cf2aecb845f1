"""The application of the page: its routes, and the guard that refuses strangers before a route sees them."""

from __future__ import annotations

import asyncio
import html
import logging
import os
import socket
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from luminosity.errors import MissingExtra
from luminosity.operate.cost.prices import load_prices
from luminosity.operate.page.event_stream import EventStream, Streams
from luminosity.operate.page.replies import HEADERS, REPORT_CSP, Packed, error, json_reply, reply
from luminosity.operate.page.run_data import DriftFiles, Run, RunFiles
from luminosity.operate.prometheus.exporter import Exporter
from luminosity.operate.web_server import Access, is_loopback, serve
from luminosity.runs.records import RUN_ID, Damaged

__all__ = ["FOLDER", "Sources", "app_of", "serve_page"]

_LOGGER = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "static"
_SHELL = "index.html"  # one document for all addresses; its scripts look at the address
_KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_LARGEST_NUMBER = 2**53  # numbers of events, as JavaScript has them
_GRACE_S = 1  # how long Ctrl-C waits for replies; those that wait for events end at once


@dataclass(frozen=True)
class Sources:
    """What the page shows."""

    folder: Path  # with the recorded runs
    histories: tuple[str, ...] = ()  # of drift, besides those in the default folder
    prices: str | None = None  # the file of a price sheet; by default the one that comes with the package


def serve_page(sources: Sources, token: str, listener: socket.socket, started: Callable[[Access], None]) -> None:
    """Serve the page until SIGINT or SIGTERM; call ``started`` when requests are accepted."""
    streams = Streams()
    access = Access(token, listener.getsockname()[1])
    app = app_of(sources, access, streams)
    serve(app, listener, lambda: started(access), grace_s=_GRACE_S, stopping=streams.stop)


def app_of(sources: Sources, access: Access, streams: Streams | None = None) -> Guard:
    """Return the application: the page, and the recorded runs as JSON and events."""
    replies = _Replies(sources, streams or Streams())
    routes = {
        "/": lambda _: RedirectResponse("/runs", 303),
        "/runs": _shell,
        "/runs/{run}": _shell,
        "/compare": _shell,
        "/drift": _shell,
        "/static/{name}": _static,
        "/api/runs": replies.runs,
        "/api/runs/{run}": replies.run,
        "/api/runs/{run}/events": replies.events,
        "/api/drift": replies.drift,
        "/api/drift/report": replies.drift_report,
        "/metrics": replies.metrics,
    }
    app = Starlette(
        routes=[Route(path, _threaded(endpoint)) for path, endpoint in routes.items()],
        exception_handlers={HTTPException: _not_found, Exception: _failed},
    )
    app.router.redirect_slashes = False
    return Guard(app, access)


class _Replies:
    """Answers requests for data. Each method is one address; it may be called on several threads."""

    def __init__(self, sources: Sources, streams: Streams) -> None:
        self._sources = sources
        self._streams = streams
        self._files = RunFiles(sources.folder, load_prices(sources.prices))
        self._drift = DriftFiles(sources.histories)
        self._lock = threading.Lock()
        self._exported: tuple[tuple[str, ...], Exporter] | None = None  # remembers files; made when it is needed

    def runs(self, request: Request) -> Response:
        return json_reply(request, self._files.list())

    def run(self, request: Request) -> Response:
        found = self._found(request)
        return found if isinstance(found, Response) else json_reply(request, found.content)

    def events(self, request: Request) -> Any:
        found = self._found(request)
        if isinstance(found, Response):
            return found
        after = _after(request)
        if after is None:
            return error(400, "found another value in after or Last-Event-ID, expected the number of an event")
        if found.state != "running" and after == found.number:
            return Response(status_code=204)  # a browser's EventSource stops asking
        if self._streams.is_full:
            return error(503, "found too many pages that wait for events; close some of them", {"retry-after": "5"})
        return EventStream(self._streams, self._files, request.path_params["run"], after)

    def drift(self, request: Request) -> Response:
        return json_reply(request, self._drift.data())

    def drift_report(self, request: Request) -> Response:
        found = self._drift.report(request.query_params.get("id", ""))
        if found is None:
            return error(404, "found no such report, expected one that a history of drift names and that still exists")
        return reply(
            request, Packed(found), "text/html; charset=utf-8", headers={"content-security-policy": REPORT_CSP}
        )

    def metrics(self, request: Request) -> Response:
        """Return what Prometheus reads."""
        try:
            with self._lock:
                histories = self._drift.paths
                if self._exported is None or self._exported[0] != histories:
                    self._exported = histories, Exporter(self._sources.folder, histories, self._sources.prices)
                exporter = self._exported[1]
            exported = exporter.export(request.headers.get("accept", ""))
        except MissingExtra as missing:
            return error(501, missing.for_command())
        return reply(request, Packed(exported.text.encode()), exported.content_type)

    def _found(self, request: Request) -> Run | Response:
        """Return the run that a request names, or the reply that says why there is none."""
        run_id = request.path_params["run"]
        found = self._files.run(run_id) if RUN_ID.fullmatch(run_id) else None
        if isinstance(found, Damaged):
            return error(500, f"{found.path.name} is damaged: {found.reason}")
        folder = self._sources.folder
        return found or error(404, f"found no run {run_id[:40]!r}, expected the id of a run in {folder}")


def _static(request: Request) -> Response:
    name = request.path_params["name"]
    found = _content_of(name)
    if found is None:
        return error(404, f"found no file {name[:40]!r} of the page")
    return reply(request, Packed(found[0]), found[1], headers={"cache-control": "no-cache"})


def _shell(request: Request) -> Response:
    found = _content_of(_SHELL)
    if found is None:
        return error(500, f"found no {_SHELL} of the page; install the package again")
    return reply(request, Packed(found[0]), found[1])


def _content_of(name: str) -> tuple[bytes, str] | None:
    """Return the content and the media type of a file, or None if the folder has no file of this name.

    ``name`` is compared with the names in the folder, and is never made into a path: nothing outside can be named.
    """
    for entry in os.scandir(FOLDER) if FOLDER.is_dir() else ():
        if entry.name == name and entry.is_file(follow_symlinks=False):
            kind = _KINDS.get(os.path.splitext(name)[1])
            return None if kind is None else (Path(entry.path).read_bytes(), kind)
    return None


def _threaded(endpoint: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """Run an endpoint on a thread: it reads files, and events of others must go on."""

    async def run(request: Request) -> Any:
        return await asyncio.to_thread(endpoint, request)

    return run


def _after(request: Request) -> int | None:
    """Return the number of the last event that the client has, or None if it gives something else."""
    given = request.headers.get("last-event-id") or request.query_params.get("after") or "0"
    is_number = given.isascii() and given.isdigit() and len(given) <= len(str(_LARGEST_NUMBER))
    return int(given) if is_number else None


async def _not_found(request: Request, found: Exception) -> Response:
    assert isinstance(found, HTTPException)
    return error(found.status_code, f"found nothing at {request.url.path[:100]!r}, expected a page such as /runs")


async def _failed(request: Request, found: Exception) -> Response:
    _LOGGER.error("the page failed to answer %s", request.url.path, exc_info=found)
    return error(500, f"the server failed to answer: {type(found).__name__}; its own output says more")


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
