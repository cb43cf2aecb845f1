"""The sender of traces and metrics by OTLP: a subscriber of a run's events, for ``--telemetry=otlp``."""

from __future__ import annotations

import importlib.metadata
import os
from typing import TYPE_CHECKING

from luminosity.events import Event, RunEnded, RunStarted
from luminosity.extras import require
from luminosity.operate.telemetry.collector_queue import CollectorQueue
from luminosity.operate.telemetry.otlp_metrics import OtlpMetrics
from luminosity.operate.telemetry.run_spans import RunSpans
from luminosity.operate.telemetry.settings import TelemetrySettings

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor

__all__ = ["OtlpSender", "otlp_sender"]

_EXTRA = "otel"
_EXPORTERS = "opentelemetry.exporter.otlp.proto.http"
_ENDPOINTS = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
)
_DEFAULT_PLACE = "http://localhost:4318"
_UNNAMED = "unknown_service"  # how OpenTelemetry's library begins the name of a service that has none


def otlp_sender(run_dir: str | None) -> OtlpSender | None:
    """Return the sender of a new run; None if the environment turns OpenTelemetry off.

    Raises :class:`MissingExtra` or :class:`OptionError`.
    """
    settings = TelemetrySettings.of()
    return OtlpSender(settings, run_dir) if settings.signals else None


class OtlpSender:
    """Sends the traces and metrics of one run. Events come on one thread."""

    def __init__(self, settings: TelemetrySettings, run_dir: str | None) -> None:
        """Begin the run's span. ``run_dir`` is the option, which metrics name."""
        require("opentelemetry.sdk.trace", _EXTRA)
        traces = require(f"{_EXPORTERS}.trace_exporter", _EXTRA)
        metrics = require(f"{_EXPORTERS}.metric_exporter", _EXTRA)
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        version = importlib.metadata.version("luminosity")
        resource = _resource()
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._metrics = OtlpMetrics(resource, InstrumentationScope("luminosity", version), run_dir)
        self._spans: RunSpans | None = None
        if "traces" in settings.signals:
            self._spans = RunSpans(provider.get_tracer("luminosity", version), _parent())
        self._queue = CollectorQueue(
            traces.OTLPSpanExporter(timeout=settings.trace_timeout_s) if "traces" in settings.signals else None,
            metrics.OTLPMetricExporter(timeout=settings.metric_timeout_s) if "metrics" in settings.signals else None,
            self._metrics.collect,
            spans_every_s=settings.spans_every_s,
            metrics_every_s=settings.metrics_every_s,
            place=next(filter(None, map(os.environ.get, _ENDPOINTS)), _DEFAULT_PLACE),
        )
        provider.add_span_processor(_to_queue(self._queue))

    @property
    def traceparent(self) -> str:
        """The run's span as a W3C ``traceparent``; empty if the run has no trace."""
        return "" if self._spans is None else self._spans.traceparent

    def __call__(self, event: Event) -> None:
        """Take an event. Only the last one may wait, for a few seconds at most."""
        if isinstance(event, RunStarted):
            self._queue.start()
        self._metrics.take(event)
        if self._spans is not None:
            self._spans.take(event)
        if isinstance(event, RunEnded):
            self._queue.close()

    def __repr__(self) -> str:
        return "the sender of --telemetry=otlp"


def _parent() -> Context | None:
    """Return what has the span in which the run begins: that of the script, or the one that TRACEPARENT names."""
    from opentelemetry import trace
    from opentelemetry.context import get_current
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if trace.get_current_span().get_span_context().is_valid:
        return get_current()
    given = {name: os.environ.get(name.upper(), "") for name in ("traceparent", "tracestate")}
    return TraceContextTextMapPropagator().extract(given) if given["traceparent"] else None


def _resource() -> Resource:
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    found = Resource.create()
    if str(found.attributes.get(SERVICE_NAME, _UNNAMED)).startswith(_UNNAMED):
        return found.merge(Resource({SERVICE_NAME: "luminosity"}))
    return found


def _to_queue(queue: CollectorQueue) -> SpanProcessor:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

    class ToQueue(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            queue.add(span)

    return ToQueue()
