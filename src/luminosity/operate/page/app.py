"""The routes of the page."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from luminosity.errors import MissingExtra
from luminosity.operate.cost.prices import load_prices
from luminosity.operate.page.access import Access
from luminosity.operate.page.drift_data import DriftFiles
from luminosity.operate.page.event_stream import EventStream, Streams
from luminosity.operate.page.guard import Guard
from luminosity.operate.page.metrics import Metrics
from luminosity.operate.page.replies import REPORT_CSP, Packed, error, json_reply, reply
from luminosity.operate.page.run_data import Run, RunFiles
from luminosity.operate.page.static_files import SHELL, content_of
from luminosity.runs.records import RUN_ID, Damaged

__all__ = ["Sources", "app_of"]

_LOGGER = logging.getLogger(__name__)
_LARGEST_NUMBER = 2**53  # numbers of events, as JavaScript has them


@dataclass(frozen=True)
class Sources:
    """What the page shows."""

    folder: Path  # with the recorded runs
    histories: tuple[str, ...] = ()  # of drift, besides those in the default folder
    prices: str | None = None  # the file of a price sheet; by default the one that comes with the package


def app_of(sources: Sources, access: Access, streams: Streams | None = None) -> Guard:
    """Return the application: the page, and the recorded runs as JSON and events."""
    folder = sources.folder
    files = RunFiles(folder, load_prices(sources.prices))
    drift_files = DriftFiles(sources.histories)
    exporter = Metrics(sources.folder, drift_files, sources.prices)
    connections = streams or Streams()

    def run_of(request: Request) -> Run | Response:
        run_id = request.path_params["run"]
        found = files.run(run_id) if RUN_ID.fullmatch(run_id) else None
        if isinstance(found, Damaged):
            return error(500, f"{found.path.name} is damaged: {found.reason}")
        return found or error(404, f"found no run {run_id[:40]!r}, expected the id of a run in {folder}")

    def runs(request: Request) -> Response:
        return json_reply(request, files.list())

    def one_run(request: Request) -> Response:
        found = run_of(request)
        return found if isinstance(found, Response) else json_reply(request, found.content)

    def events(request: Request) -> Any:
        found = run_of(request)
        if isinstance(found, Response):
            return found
        after = _after(request)
        if after is None:
            return error(400, "found another value in after or Last-Event-ID, expected the number of an event")
        if found.state != "running" and after == found.number:
            return Response(status_code=204)  # a browser's EventSource stops asking
        if connections.is_full:
            return error(503, "found too many pages that wait for events; close some of them", {"retry-after": "5"})
        return EventStream(connections, files, request.path_params["run"], after)

    def drift(request: Request) -> Response:
        return json_reply(request, drift_files.data())

    def drift_report(request: Request) -> Response:
        found = drift_files.report(request.query_params.get("id", ""))
        if found is None:
            return error(404, "found no such report, expected one that a history of drift names and that still exists")
        return reply(
            request, Packed(found), "text/html; charset=utf-8", headers={"content-security-policy": REPORT_CSP}
        )

    def metrics(request: Request) -> Response:
        try:
            exported = exporter.export(request.headers.get("accept", ""))
        except MissingExtra as missing:
            return error(501, missing.for_command())
        return reply(request, Packed(exported.text.encode()), exported.content_type)

    def static(request: Request) -> Response:
        name = request.path_params["name"]
        found = content_of(name)
        if found is None:
            return error(404, f"found no file {name[:40]!r} of the page")
        return reply(request, Packed(found[0]), found[1], headers={"cache-control": "no-cache"})

    def shell(request: Request) -> Response:
        found = content_of(SHELL)
        if found is None:
            return error(500, f"found no {SHELL} of the page; install the package again")
        return reply(request, Packed(found[0]), found[1])

    routes = {
        "/": lambda _: RedirectResponse("/runs", 303),
        "/runs": shell,
        "/runs/{run}": shell,
        "/compare": shell,
        "/drift": shell,
        "/static/{name}": static,
        "/api/runs": runs,
        "/api/runs/{run}": one_run,
        "/api/runs/{run}/events": events,
        "/api/drift": drift,
        "/api/drift/report": drift_report,
        "/metrics": metrics,
    }
    app = Starlette(
        routes=[Route(path, _threaded(endpoint)) for path, endpoint in routes.items()],
        exception_handlers={HTTPException: _not_found, Exception: _failed},
    )
    app.router.redirect_slashes = False
    return Guard(app, access)


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
