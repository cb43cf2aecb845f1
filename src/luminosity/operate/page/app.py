"""The application of the page: its routes. The guard around it refuses strangers before a route sees them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from luminosity.errors import MissingExtra, RecordError
from luminosity.operate.cost.prices import load_prices
from luminosity.operate.page.actions import MOST_BYTES, ActionAsked, Actions
from luminosity.operate.page.event_stream import EventStream, Streams
from luminosity.operate.page.graph_data import MOST_OPEN
from luminosity.operate.page.guard import Guard
from luminosity.operate.page.log_data import LinesWanted, LogFiles
from luminosity.operate.page.replies import REPORT_CSP, Packed, error, json_bytes, json_reply, reply
from luminosity.operate.page.run_data import DriftFiles, Run, RunFiles
from luminosity.operate.page.run_list import MOST_SHOWN, Asked
from luminosity.operate.page.team.sessions import READER, Reader
from luminosity.operate.web_server import Access, serve
from luminosity.runs.log_lines import LEVELS
from luminosity.runs.records import RUN_ID, Damaged

if TYPE_CHECKING:
    from luminosity.operate.page.team.settings import TeamSettings
    from luminosity.operate.page.team.team_guard import TeamGuard
    from luminosity.operate.prometheus.exporter import Exporter

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
_GROUPS = ("", "running", "done", "failed", "other")  # of runs, by their states
_LINES = 200  # of the list, if the request does not say
_MOST_WORDS = 200  # characters to search for
_LARGEST_NUMBER = 2**53  # numbers of events, as JavaScript has them
_OK = 200
_OTHER_LINES = "found another value in level, until or before, expected a level such as warning, and numbers"
_READ_ONLY = "This page only reads."
_GRACE_S = 1  # how long Ctrl-C waits for replies; those that wait for events end at once


@dataclass(frozen=True)
class Sources:
    """What the page shows."""

    folder: Path  # with the recorded runs
    histories: tuple[str, ...] = ()  # of drift, besides those in the default folder
    prices: str | None = None  # the file of a price sheet; by default the one that comes with the package
    can_act: bool = False  # whether readers may stop runs and save savepoints
    team: TeamSettings | None = None  # who else may read the page, from other machines


def serve_page(sources: Sources, token: str, listener: socket.socket, started: Callable[[Access], None]) -> None:
    """Serve the page until SIGINT or SIGTERM; call ``started`` when requests are accepted."""
    streams = Streams()
    access = Access(token, listener.getsockname()[1])
    app = app_of(sources, access, streams)
    certificate = None if sources.team is None else sources.team.certificate
    serve(
        app,
        listener,
        lambda: started(access),
        certificate=certificate,
        grace_s=_GRACE_S,
        stopping=streams.stop,
    )


def app_of(sources: Sources, access: Access, streams: Streams | None = None) -> Guard | TeamGuard:
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
        "/api/runs/{run}/graph": replies.graph,
        "/api/runs/{run}/logs": replies.logs,
        "/api/runs/{run}/log.txt": replies.log_text,
        "/api/runs/{run}/actions": replies.actions,
        "/api/account": _account,
        "/api/compare": replies.changes,
        "/api/drift": replies.drift,
        "/api/drift/report": replies.drift_report,
        "/metrics": replies.metrics,
    }
    served = [Route(path, _threaded(endpoint)) for path, endpoint in routes.items()]
    if sources.can_act:
        served.append(Route("/api/runs/{run}/act", replies.act, methods=["POST"]))
    app = Starlette(routes=served, exception_handlers={HTTPException: _not_found, Exception: _failed})
    app.router.redirect_slashes = False
    if sources.team is not None:
        from luminosity.operate.page.team.team_guard import TeamGuard  # brings an HTTP client: not for every page

        return TeamGuard(app, sources.team, access, can_act=sources.can_act)
    return Guard(app, access, can_act=sources.can_act)


class _Replies:
    """Answers requests for data. Each method is one address; it may be called on several threads."""

    def __init__(self, sources: Sources, streams: Streams) -> None:
        self._sources = sources
        self._streams = streams
        self._files = RunFiles(sources.folder, load_prices(sources.prices))
        self._drift = DriftFiles(sources.histories)
        self._logs = LogFiles(sources.folder)
        self._actions = Actions(sources.folder)
        self._lock = threading.Lock()
        self._exported: tuple[tuple[str, ...], Exporter] | None = None  # remembers files; made when it is needed

    def runs(self, request: Request) -> Response:
        """Return the list of runs, or what the request asks for of it."""
        query = request.query_params
        limit, group = query.get("limit", ""), query.get("group", "")
        if (limit and not _is_number(limit)) or group not in _GROUPS:
            return error(400, "found another value in limit or group, expected a number, and running, done or failed")
        asked = Asked(
            query.get("words", "")[:_MOST_WORDS],
            group,
            query.get("job", ""),
            query.get("folder"),
            min(int(limit or _LINES), MOST_SHOWN),
        )
        return json_reply(request, self._files.list(asked))

    def run(self, request: Request) -> Response:
        found = self._found(request)
        return found if isinstance(found, Response) else json_reply(request, found.content)

    def graph(self, request: Request) -> Response:
        """Return the graph of steps with the composites open that the request names by their places."""
        found = self._found(request)
        if isinstance(found, Response):
            return found
        words = [word for word in request.query_params.get("open", "").split(",") if word]
        if len(words) > MOST_OPEN or not all(_is_number(word) for word in words):
            return error(400, "found another value in open, expected the numbers of composites, such as 3,7")
        return json_reply(request, Packed(json_bytes(found.steps.drawn(map(int, words)))))

    def logs(self, request: Request) -> Response:
        """Return a page of log lines: those that the request asks for, the newest first."""
        found = self._found(request)
        if isinstance(found, Response):
            return found
        wanted = _lines_wanted(request)
        if wanted is None:
            return error(400, _OTHER_LINES)
        return json_reply(request, Packed(json_bytes(self._logs.page(request.path_params["run"], wanted))))

    def log_text(self, request: Request) -> Response:
        """Return the log lines that the request asks for as a file with text."""
        found = self._found(request)
        if isinstance(found, Response):
            return found
        wanted, run_id = _lines_wanted(request), request.path_params["run"]
        if wanted is None:
            return error(400, _OTHER_LINES)
        text = self._logs.text(run_id, wanted, found.started_at)
        if text is None:
            return error(404, f"found no log lines of run {run_id}, expected those of a run that has logged something")
        headers = {"content-disposition": f'attachment; filename="{run_id}.log"'}
        return reply(request, Packed(text.encode("utf-8", "replace")), "text/plain; charset=utf-8", headers=headers)

    def actions(self, request: Request) -> Response:
        """Return what can be done to a run, and what was done to it from the page."""
        reader = _reader(request)
        if not self._sources.can_act or (reader is not None and not reader.may_act):
            return json_reply(request, Packed(json_bytes({"actions": (), "why": _READ_ONLY, "done": ()})))
        return json_reply(request, Packed(json_bytes(self._actions.possible(request.path_params["run"]))))

    async def act(self, request: Request) -> Response:
        """Do something to a run. The guard has looked at who asks."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                return error(413, f"found a large request, expected at most {MOST_BYTES} bytes")
        asked = ActionAsked.of(body)
        if asked is None:
            return error(
                400, "found another request, expected JSON with action (stop, drain or save), confirmed and maybe name"
            )
        reader = _reader(request)
        user = "" if reader is None else reader.user
        try:
            outcome = await asyncio.to_thread(self._actions.act, request.path_params["run"], asked, user)
        except asyncio.CancelledError:  # the server stops; its process waits for the thread
            said = "goes on to its end, and the server stops after it"
            _LOGGER.warning("%s of run %s %s", asked.action, request.path_params["run"], said)
            return error(503, f"{asked.action} {said}; look at the run later")
        if outcome.status != _OK:
            return error(outcome.status, outcome.message)
        return json_reply(request, Packed(json_bytes({"message": outcome.message})))

    def changes(self, request: Request) -> Response:
        """Return what changed between the runs ``a`` and ``b``."""
        ids = [request.query_params.get(name, "") for name in ("a", "b")]
        if not all(RUN_ID.fullmatch(each) for each in ids):
            return error(400, "found another value in a or b, expected the ids of two runs")
        try:
            return json_reply(request, Packed(json_bytes(self._files.changes(*ids))))
        except RecordError as found:
            return error(404, found.message)

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
        found = self._drift.data(request.query_params.get("known", ""))
        return Response(status_code=204) if found is None else json_reply(request, found)

    def drift_report(self, request: Request) -> Response:
        found = self._drift.report(request.query_params.get("id", ""))
        if found is None:
            return error(404, "found no such report, expected one that a history of drift names and that still exists")
        return reply(
            request, Packed(found), "text/html; charset=utf-8", headers={"content-security-policy": REPORT_CSP}
        )

    def metrics(self, request: Request) -> Response:
        """Return what Prometheus reads."""
        from luminosity.operate.prometheus.exporter import Exporter

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


def _reader(request: Request) -> Reader | None:
    """Return who has signed in to a team's page; None on a page of one user."""
    return request.scope.get(READER)


def _account(request: Request) -> Response:
    """Return who the reader is, and the token that actions of this reader need."""
    reader = _reader(request)
    if reader is None:
        return json_reply(request, Packed(json_bytes({"user": ""})))
    known = {"user": reader.user, "token": reader.token, "signs_out": bool(reader.session)}
    return json_reply(request, Packed(json_bytes(known)))


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
    return int(given) if _is_number(given) else None


def _lines_wanted(request: Request) -> LinesWanted | None:
    """Return which log lines a request asks for, or None if it gives something else."""
    query = request.query_params
    words, step, worker = (query.get(name, "")[:_MOST_WORDS] for name in ("words", "step", "worker"))
    level, until, before = (query.get(name, "") for name in ("level", "until", "before"))
    if (level and level not in LEVELS) or not all(not each or _is_number(each) for each in (until, before)):
        return None
    return LinesWanted(words, level, step, worker, float(until) if until else None, int(before) if before else None)


def _is_number(given: str) -> bool:
    return given.isascii() and given.isdigit() and len(given) <= len(str(_LARGEST_NUMBER))


async def _not_found(request: Request, found: Exception) -> Response:
    assert isinstance(found, HTTPException)
    return error(found.status_code, f"found nothing at {request.url.path[:100]!r}, expected a page such as /runs")


async def _failed(request: Request, found: Exception) -> Response:
    _LOGGER.error("the page failed to answer %s", request.url.path, exc_info=found)
    return error(500, f"the server failed to answer: {type(found).__name__}; its own output says more")
