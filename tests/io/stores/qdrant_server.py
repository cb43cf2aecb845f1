"""A stand-in for a Qdrant server: HTTP on loopback, in front of the client's own in-memory store."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from qdrant_client import QdrantClient, models

Script = Callable[[str, str], tuple[int, str] | None]


@dataclass
class StandIn:
    """A server with settings for tests, and the requests that it got."""

    url: str = ""
    store: QdrantClient = field(default_factory=lambda: QdrantClient(":memory:"))
    script: Script = lambda method, path: None
    """What to answer to a request instead of doing it."""
    after: Script = lambda method, path: None
    """The same, once it is done: an answer that is lost."""
    key: str | None = None
    requests: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def points(self, collection: str) -> dict[Any, Any]:
        records, _ = self.store.scroll(collection, limit=100_000, with_payload=True, with_vectors=True)
        return {record.id: record for record in records}


@contextmanager
def qdrant_server() -> Iterator[StandIn]:
    stand_in = StandIn()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            with stand_in.lock:
                stand_in.requests.append(f"{self.command} {path}")
                status, answer = self._outcome(path, body)
            encoded = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        do_GET = do_PUT = do_POST = do_DELETE = _serve

        def _outcome(self, path: str, body: bytes) -> tuple[int, Any]:
            if stand_in.key is not None and self.headers.get("api-key") != stand_in.key:
                return 401, _error(f"Must provide an API key, found {self.headers.get('api-key')}")
            if scripted := stand_in.script(self.command, path):
                return scripted[0], _error(scripted[1])
            try:
                status, answer = _done(stand_in.store, self.command, path.strip("/").split("/"), body)
            except ValueError as error:
                return 400, _error(f"Wrong input: {error}")
            if scripted := stand_in.after(self.command, path):
                return scripted[0], _error(scripted[1])
            return status, answer

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    stand_in.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield stand_in
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=60)


def fails(times: int, status: int, message: str, what: str = "") -> Script:
    """Return a script that answers the first ``times`` requests whose method and path match with an error."""
    left = times

    def script(method: str, path: str) -> tuple[int, str] | None:
        nonlocal left
        if left and re.match(what, f"{method} {path}"):
            left -= 1
            return status, message
        return None

    return script


def _error(message: str) -> Any:
    return {"status": {"error": message}, "time": 0.0}


def _result(result: Any) -> tuple[int, Any]:
    return 200, {"result": result, "status": "ok", "time": 0.0}


def _aliases_changed(store: QdrantClient, body: bytes) -> tuple[int, Any]:
    """Change aliases as a server does: none may have the name of a collection."""
    operations = models.ChangeAliasesOperation.model_validate(json.loads(body)).actions
    names = {found.name for found in store.get_collections().collections}
    for each in operations:
        if isinstance(each, models.CreateAliasOperation) and each.create_alias.alias_name in names:
            return 409, _error(f"Wrong input: Collection `{each.create_alias.alias_name}` already exists!")
    return _result(store.update_collection_aliases(operations))


def _done(store: QdrantClient, method: str, names: list[str], body: bytes) -> tuple[int, Any]:
    if names == [""]:
        return 200, {"title": "qdrant - vector search engine"}
    if names == ["aliases"]:
        return _result(store.get_aliases().model_dump(mode="json"))
    if names == ["collections"]:
        return _result(store.get_collections().model_dump(mode="json"))
    if names[1:] == ["aliases"]:
        return _aliases_changed(store, body)
    collection, action = names[1], "/".join(names[2:])
    if not store.collection_exists(collection) and (method, action) != ("PUT", ""):
        return 404, _error(f"Not found: Collection `{collection}` doesn't exist!")
    if (method, action) == ("DELETE", ""):
        return _result(store.delete_collection(collection))
    if method == "GET":
        return _result(store.get_collection(collection).model_dump(mode="json"))
    given = json.loads(body)
    if (method, action) == ("PUT", ""):
        if store.collection_exists(collection):
            return 409, _error(f"Wrong input: Collection `{collection}` already exists!")
        vectors = models.CreateCollection.model_validate(given).vectors
        return _result(store.create_collection(collection, vectors))
    if action == "points/count":
        return _result({"count": store.count(collection).count})
    if action == "points/scroll":
        wanted = models.ScrollRequest.model_validate(given)
        found, _ = store.scroll(collection, scroll_filter=wanted.filter, limit=wanted.limit or 10, with_payload=True)
        return _result({"points": [each.model_dump(mode="json") for each in found], "next_page_offset": None})
    if action == "points/query/batch":
        requests = models.QueryRequestBatch.model_validate(given).searches
        return _result([answer.model_dump(mode="json") for answer in store.query_batch_points(collection, requests)])
    if action == "points/delete":
        store.delete(collection, models.PointIdsList.model_validate(given))
    elif (method, action) == ("PUT", "points"):
        store.upsert(collection, models.PointsList.model_validate(given).points)
    else:
        return 404, _error(f"{method} {action} is not known here")
    return _result({"operation_id": 1, "status": "completed"})
