"""A small collector of OpenTelemetry: an HTTP server on loopback that takes what is sent by OTLP apart."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Collector", "attributes"]


def attributes(found: Any) -> dict[str, Any]:
    """Return attributes of OTLP as a dictionary."""
    return {each.key: _value(each.value) for each in found}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


class Collector:
    """Keeps what it gets. ``status`` is what it answers."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.requests: list[tuple[str, dict[str, str], bytes]] = []

    def __enter__(self) -> Collector:
        ours = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                ours.requests.append((self.path, dict(self.headers), body))
                self.send_response(ours.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def spans(self) -> list[Any]:
        """Return all spans, in the order in which they ended."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        found = [ExportTraceServiceRequest.FromString(body) for path, _, body in self.requests if path == "/v1/traces"]
        return [s for each in found for r in each.resource_spans for scope in r.scope_spans for s in scope.spans]

    def resources(self) -> list[dict[str, Any]]:
        """Return the attributes of the resource of each request."""
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        found: list[dict[str, Any]] = []
        for path, _, body in self.requests:
            if path == "/v1/traces":
                found += [
                    attributes(r.resource.attributes) for r in ExportTraceServiceRequest.FromString(body).resource_spans
                ]
            else:
                sent = ExportMetricsServiceRequest.FromString(body).resource_metrics
                found += [attributes(r.resource.attributes) for r in sent]
        return found

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the last request with some, by name."""
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        body = [body for path, _, body in self.requests if path == "/v1/metrics"][-1]
        sent = ExportMetricsServiceRequest.FromString(body).resource_metrics
        return {m.name: m for r in sent for scope in r.scope_metrics for m in scope.metrics}
