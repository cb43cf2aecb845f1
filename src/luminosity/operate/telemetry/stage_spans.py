"""The spans of one stage: its own, and one for the bundles of each interval.

A span for each bundle would be millions. Those of an interval share one, which counts them; the intervals get longer
as the run goes on. So nothing is left out, and a stage has some hundred spans at most, also after a year.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from luminosity.events import StageInfo, StageView

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

__all__ = ["StageSpans"]

_FIRST_INTERVAL_S = 1.0
_OF_ONE_LENGTH = 30  # intervals, before they get twice as long
_OF_MODELS = {  # attributes, and the fields of ``InferenceView`` that they sum up
    "luminosity.inferences": "inferences",
    "luminosity.batches": "batches",
    "luminosity.requests": "requests",
    "luminosity.requests_again": "retries",
    "luminosity.requests_throttled": "throttled",
    "luminosity.retry_wait_seconds": "retry_wait_seconds",
}
_MOST_STEPS = 100  # names in one span


class StageSpans:
    """Makes the spans of a stage. Not thread-safe."""

    def __init__(
        self, tracer: Tracer, run: Context, info: StageInfo, at: Callable[[float], int], *, counts_go_on: bool
    ) -> None:
        """Make no span before the stage does something.

        ``run`` has the run's span. ``at`` turns seconds of the run into nanoseconds since 1970. ``counts_go_on`` says
        that counts may begin with those of an earlier start of the run.
        """
        self._tracer = tracer
        self._run = run
        self._at = at
        self._info = info
        self._seen = None if counts_go_on else StageView(info.id, "waiting")
        self.span: Span | None = None
        self._context: Context | None = None  # with the span
        self._began: StageView | None = None  # the counts when the span began
        self._active_s = 0.0  # when the stage last did something
        self._bundles: Span | None = None  # of the interval that goes on
        self._from: StageView | None = None  # the counts when it began
        self._from_s = 0.0
        self._intervals = 0

    def look(self, view: StageView, before_s: float, now_s: float, *, is_last: bool = False) -> None:
        """Take the stage's state into account. ``before_s`` is when it was seen before."""
        if self._seen is None:
            self._seen = view
        is_active = view.running > 0 or view.bundles > self._seen.bundles or view.retries > self._seen.retries
        if is_active:
            self._open(before_s)
            self._active_s = now_s
        self._seen = view
        if self._bundles is not None and (is_last or view.status == "done" or now_s - self._from_s >= self._interval_s):
            self._close_interval()
        if self.span is not None and view.status == "done":
            self.end(now_s)

    def bundle_failed(self, exception: dict[str, Any], before_s: float, now_s: float) -> None:
        """Note that an attempt of a bundle has failed."""
        self._open(before_s)
        self._active_s = now_s
        assert self._bundles is not None
        self._bundles.add_event("exception", exception, self._at(now_s))
        self._fail(self._bundles, exception["exception.type"])

    def failed(self, exception: dict[str, Any], before_s: float, now_s: float) -> None:
        """Note that the run has failed at a step of the stage."""
        self._open(before_s)
        self._active_s = now_s
        for span in (self.span, self._bundles):
            assert span is not None
            span.add_event("exception", exception, self._at(now_s))
            self._fail(span, exception["exception.message"])

    def end(self, now_s: float) -> None:
        """End the span, if there is one. The stage may begin another one."""
        if self.span is None or self._began is None or self._seen is None:
            return
        if self._bundles is not None:
            self._close_interval()
        self.span.set_attributes(_difference(self._began, self._seen))
        self.span.end(self._at(min(self._active_s, now_s)))
        self.span = self._context = self._began = None

    @property
    def _interval_s(self) -> float:
        return _FIRST_INTERVAL_S * 2 ** (self._intervals // _OF_ONE_LENGTH)

    def _open(self, at_s: float) -> None:
        """Begin the span of the stage and that of an interval, unless they go on."""
        from opentelemetry import trace

        if self._seen is None:
            self._seen = StageView(self._info.id, "waiting")
        if self.span is None:
            self._began = self._seen
            steps = self._info.steps[:_MOST_STEPS]
            attributes = {**self._names(), "luminosity.steps": steps, "luminosity.is_stream": self._info.is_stream}
            name = f"stage {self._info.label}"
            self.span = self._tracer.start_span(name, self._run, attributes=attributes, start_time=self._at(at_s))
            self._context = trace.set_span_in_context(self.span)
        if self._bundles is None:
            self._from, self._from_s = self._seen, at_s
            self._bundles = self._tracer.start_span(
                "bundles", self._context, attributes=self._names(), start_time=self._at(at_s)
            )

    def _names(self) -> dict[str, Any]:
        return {"luminosity.stage": self._info.label, "luminosity.pool": self._info.pool}

    def _close_interval(self) -> None:
        assert self._bundles is not None
        assert self._from is not None
        assert self._seen is not None
        self._bundles.set_attributes(_difference(self._from, self._seen))
        self._bundles.end(self._at(self._active_s))
        self._bundles = self._from = None
        self._intervals += 1

    @staticmethod
    def _fail(span: Span, description: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, description))


def _difference(first: StageView, last: StageView) -> dict[str, float]:
    """Return what a stage has done between two views. Counts begin again if a drain plans the pipeline anew."""
    counts: dict[str, float] = {
        "luminosity.bundles": last.bundles - first.bundles,
        "luminosity.elements": last.elements - first.elements,
        "luminosity.retries": last.retries - first.retries,
        "luminosity.busy_seconds": round(last.busy_seconds - first.busy_seconds, 3),
        "luminosity.cpu_seconds": round(last.cpu_seconds - first.cpu_seconds, 3),
    }
    for name, field in _OF_MODELS.items():
        before, after = (sum(getattr(model, field) for model in view.inference) for view in (first, last))
        if after > before:
            counts[name] = round(after - before, 3)
    return {name: max(0, count) for name, count in counts.items()}
