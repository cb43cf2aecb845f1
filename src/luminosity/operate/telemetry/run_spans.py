"""The spans of a run, made from its events: the run, its stages, its workers, and bundles summed up over intervals.

Events come about five times a second, so the times of stages and bundles are exact to a fifth of a second. Spans hold
names of steps, pools and workers, and counts; no values of rows, and of an exception its type and its frames, because
its message may hold values.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from luminosity.events import (
    BundleRetried,
    BundleStalled,
    Event,
    ModelLoaded,
    RunEnded,
    RunStarted,
    Snapshot,
    StageInfo,
    WorkerEnded,
    WorkerLost,
    WorkerStarted,
)
from luminosity.operate.telemetry.stage_spans import StageSpans
from luminosity.runs.manifest.masking import mask_text

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

__all__ = ["MOST_STAGES", "MOST_WORKERS", "RunSpans"]

MOST_STAGES = 200  # as many as have metrics
MOST_WORKERS = 1000  # spans of workers; a run that loses worker after worker starts more

_TYPE = re.compile(r"[A-Za-z_][\w.]*")
_FRAME = re.compile(r'^\s*(File "[^"\n]*", line \d+, in \S+)$', re.MULTILINE)
_MOST_FRAMES = 50


class RunSpans:
    """Makes the spans of one run. Begins the run's own when it is made; then one thread calls :meth:`take`."""

    def __init__(self, tracer: Tracer, parent: Context | None) -> None:
        """Make the spans with a tracer. ``parent`` has the span in which the run began, if there is one."""
        from opentelemetry import trace

        self._tracer = tracer
        self.span: Span = tracer.start_span("run", parent)
        self._context = trace.set_span_in_context(self.span)
        self._began_ns = 0  # the run's start
        self._stages: dict[str, StageSpans] = {}
        self._infos: tuple[StageInfo, ...] = ()
        self._workers: dict[str, Span] = {}
        self._workers_seen = 0
        self._seen_s = 0.0  # of the last snapshot

    @property
    def traceparent(self) -> str:
        """The run's span as a W3C ``traceparent``, for what belongs to the run in other processes."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, self._context)
        return carrier.get("traceparent", "")

    def take(self, event: Event) -> None:
        """Take an event into account. The spans that it ends go to the tracer's processor."""
        if isinstance(event, RunStarted):
            self._begin(event)
        elif isinstance(event, Snapshot):
            self._look(event)
        elif isinstance(event, WorkerStarted):
            self._start_worker(event)
        elif isinstance(event, WorkerLost | WorkerEnded):
            self._end_worker(event)
        elif isinstance(event, BundleRetried):
            self._retry(event)
        elif isinstance(event, BundleStalled):
            self._stall(event)
        elif isinstance(event, ModelLoaded):
            self._load(event)
        elif isinstance(event, RunEnded):
            self._end(event)

    def _at(self, seconds: float) -> int:
        return self._began_ns + int(seconds * 1e9)

    def _begin(self, event: RunStarted) -> None:
        self._began_ns = int(event.started_at * 1e9)
        self._infos = event.stages[:MOST_STAGES]
        self._stages = {
            info.id: StageSpans(self._tracer, self._context, info, self._at, counts_go_on=bool(event.checkpoint_dir))
            for info in self._infos
        }
        self.span.update_name(f"run {event.title}")
        self.span.set_attributes(
            {
                "luminosity.run": event.run,
                "luminosity.pipeline": event.title,
                "luminosity.version": event.version,
                "luminosity.pools": [pool.name for pool in event.pools],
                "luminosity.stages": len(event.stages),
            }
        )

    def _look(self, event: Snapshot, *, is_last: bool = False) -> None:
        for view in event.stages:
            if (stage := self._stages.get(view.id)) is not None:
                stage.look(view, self._seen_s, event.seconds, is_last=is_last)
        self._seen_s = event.seconds

    def _stage_of(self, step: str) -> StageSpans | None:
        """Return the spans of the stage that runs a step, or that has this label."""
        info = next((info for info in self._infos if step in info.steps or step == info.label), None)
        return None if info is None else self._stages[info.id]

    def _start_worker(self, event: WorkerStarted) -> None:
        self._workers_seen += 1
        if self._workers_seen > MOST_WORKERS:
            return
        attributes: dict[str, Any] = {
            "luminosity.worker": event.worker,
            "luminosity.pool": event.pool,
            **({"process.pid": event.pid} if event.pid else {}),  # on a cluster it is not known
        }
        if event.devices:
            attributes["luminosity.devices"] = event.devices
        if event.node:
            attributes["luminosity.node"] = event.node
        self._workers[event.worker] = self._tracer.start_span(
            "worker", self._context, attributes=attributes, start_time=self._at(event.seconds)
        )

    def _end_worker(self, event: WorkerLost | WorkerEnded) -> None:
        span = self._workers.pop(event.worker, None)
        if span is None:
            return
        span.set_attributes(
            {"luminosity.cpu_seconds": event.cpu_seconds, "luminosity.peak_resident_bytes": event.peak_resident}
        )
        if isinstance(event, WorkerLost):
            reason = mask_text(event.reason)
            lost = {"luminosity.reason": reason, "luminosity.bundles": event.bundles}
            span.add_event("worker lost", lost, self._at(event.seconds))
            _set_error(span, reason)
        span.end(self._at(event.seconds))

    def _retry(self, event: BundleRetried) -> None:
        if (stage := self._stage_of(event.step)) is not None:
            attributes = _exception(event.exception, event.traceback, event.place)
            more = {
                "luminosity.step": event.step,
                "luminosity.tries": event.tries,
                "luminosity.elements": event.elements,
            }
            stage.bundle_failed({**attributes, **more}, self._seen_s, event.seconds)

    def _stall(self, event: BundleStalled) -> None:
        stall = event.stall
        attributes = {
            "luminosity.step": stall.step,
            "luminosity.worker": stall.worker,
            "luminosity.doing": stall.doing,
            "luminosity.seconds": stall.seconds,
            "luminosity.place": stall.place,
        }
        self._note(stall.step, "bundle stalled", attributes, event.seconds)

    def _load(self, event: ModelLoaded) -> None:
        attributes = {
            "luminosity.step": event.step,
            "luminosity.model": mask_text(event.model),
            "luminosity.worker": event.worker,
            "luminosity.device": event.device,
            "luminosity.seconds": event.load_seconds,
            "luminosity.bytes": event.model_bytes,
        }
        self._note(event.step, "model loaded", attributes, event.seconds)

    def _note(self, step: str, name: str, attributes: dict[str, Any], seconds: float) -> None:
        """Add an event to the span of the stage with a step, or to the run's."""
        stage = self._stage_of(step)
        span = self.span if stage is None or stage.span is None else stage.span
        span.add_event(name, attributes, self._at(seconds))

    def _end(self, event: RunEnded) -> None:
        failure: dict[str, Any] | None = None
        if event.state == "failed":
            failure = _failure(event)
            if event.step and (stage := self._stage_of(event.step)) is not None:
                stage.failed(failure, self._seen_s, event.seconds)
        self._look(event.last, is_last=True)
        for stage in self._stages.values():
            stage.end(event.seconds)
        for span in self._workers.values():
            span.end(self._at(event.seconds))  # it has ended, but nothing has said so
        if failure is not None:
            self.span.add_event("exception", failure, self._at(event.seconds))
            _set_error(self.span, failure["exception.message"])
        self.span.set_attribute("luminosity.state", event.state)
        left_out = {
            "luminosity.stages_left_out": max(0, len(event.last.stages) - MOST_STAGES),
            "luminosity.workers_left_out": max(0, self._workers_seen - MOST_WORKERS),
        }
        self.span.set_attributes({name: count for name, count in left_out.items() if count})
        self.span.end(self._at(event.seconds))


def _set_error(span: Span, description: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, description))


def _exception(line: str, traceback: str, place: str) -> dict[str, Any]:
    """Return the attributes of an exception of user code, without its message."""
    kind = _TYPE.match(line)
    attributes: dict[str, Any] = {"exception.type": kind.group() if kind is not None else "Exception"}
    if frames := _FRAME.findall(traceback):
        attributes["exception.stacktrace"] = "\n".join(frames[-_MOST_FRAMES:])
    if place:
        attributes["luminosity.place"] = place
    return attributes


def _failure(event: RunEnded) -> dict[str, Any]:
    """Return the attributes of what failed a run. What the engine itself says names no values."""
    if not event.step and not event.traceback:
        return {"exception.type": "luminosity.errors.RunFailed", "exception.message": mask_text(event.failure)}
    last = next((line for line in reversed(event.traceback.splitlines()) if _TYPE.match(line)), event.failure)
    attributes = _exception(last, event.traceback, event.place)
    kind = attributes["exception.type"]
    where = f" (at {event.place})" if event.place else ""
    message = f"step {event.step!r} failed: {kind}{where}" if event.step else f"the run failed: {kind}"
    more = {"luminosity.step": event.step} if event.step else {}
    return {**attributes, **more, "exception.message": message}
