"""Both ends of the requests to a fake BigQuery: the client that Beam's sink takes, and the server's handler."""

from __future__ import annotations

import gzip
import importlib
import json
import time
from collections.abc import Callable
from functools import cached_property
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from luminosity.errors import MissingExtra
from luminosity.testing.bigquery.tables import Refused

__all__ = ["BigQueryClient", "handler_of"]

_STATUSES = {"accessDenied": 403, "notFound": 404, "duplicate": 409, "notImplemented": 501}
_IDLE_S = 60  # after which a connection that a client keeps open is closed
_TIMEOUT_S = 60  # for a response of a server on the same machine


class BigQueryClient:
    """Both of the clients that Beam uses, with another address and without a key. Each process makes its own.

    Beam's wrapper calls the methods of its generated client, and ``insert_rows_json`` of Google's.
    """

    test_clock = staticmethod(time.time)  # Beam asks for it if it shards a stream itself

    def __init__(self, url: str, project: str) -> None:
        self._url = url
        self._project = project

    def __reduce__(self) -> Any:
        return BigQueryClient, (self._url, self._project)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._generated, name)  # jobs, tables, tabledata, datasets

    def insert_rows_json(self, table: str, json_rows: Any, **settings: Any) -> Any:
        """Insert rows, as ``google.cloud.bigquery.Client`` does, and return the errors of those that are refused."""
        return self._googles.insert_rows_json(table, json_rows, **settings)

    @cached_property
    def _generated(self) -> Any:
        try:
            import httplib2
            from apache_beam.io.gcp.internal.clients.bigquery import BigqueryV2
        except ImportError as error:
            raise _missing(error) from error
        http = httplib2.Http(timeout=_TIMEOUT_S, proxy_info=None)  # never through a proxy of the environment
        return BigqueryV2(url=f"{self._url}/bigquery/v2/", http=http, get_credentials=False, response_encoding="utf8")

    @cached_property
    def _googles(self) -> Any:
        try:
            options: Any = importlib.import_module("google.api_core.client_options")
            credentials: Any = importlib.import_module("google.auth.credentials")
            requests: Any = importlib.import_module("google.auth.transport.requests")
            bigquery: Any = importlib.import_module("google.cloud.bigquery")
        except ImportError as error:
            raise _missing(error) from error
        nobody = credentials.AnonymousCredentials()
        session = requests.AuthorizedSession(nobody)
        session.trust_env = False  # no proxy
        return bigquery.Client(
            project=self._project,
            credentials=nobody,
            _http=session,
            client_options=options.ClientOptions(api_endpoint=self._url),
        )


def _missing(error: ImportError) -> MissingExtra:
    return MissingExtra(
        f"{error.name} is not installed, which Beam needs for BigQuery",
        fix="install it with: pip install 'apache-beam[gcp]'",
    )


def handler_of(answer: Callable[[str, str, dict[str, Any]], dict[str, Any]]) -> type[BaseHTTPRequestHandler]:
    """Return a handler that sends what ``answer`` returns, or its refusal, as JSON.

    ``answer`` gets the method, the path, and the body or, if there is none, the parameters of the query.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _IDLE_S

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

        def _respond(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                content = gzip.decompress(content)
            address = urlsplit(self.path)
            asked = json.loads(content) if content else dict(parse_qsl(address.query))
            try:
                status, response = 200, answer(self.command, address.path, asked)
            except Refused as error:
                status = _STATUSES.get(error.reason, error.status)
                details = {"reason": error.reason, "message": error.message}
                response = {"error": {"code": status, "message": error.message, "errors": [details]}}
            sent = json.dumps(response).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json; charset=UTF-8")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        do_GET = do_POST = do_DELETE = _respond

    return Handler
