"""The progress of a stage: its rate, the fraction that is done, the time left, and how its models do."""

from __future__ import annotations

from collections import deque

from luminosity.core import InferenceMetrics
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.loop.stage import StageRun
from luminosity.events import InferenceView

__all__ = ["Pace", "StageProgress", "inference_views"]

_LEAST_ARRIVED = 0.02  # a smaller fraction of the input says nothing about the rest
_LEAST_SECONDS = 2.0  # before that, a stage's speed is that of its start

_WINDOW_S = 10.0  # a rate covers this time: long enough to be steady, short enough to follow changes
_POINT_EVERY_S = 0.5  # bounds the number of points
_FEWEST_STEPS = 4  # a slow stage changes rarely: its rate covers at least 4 changes, however old
_MOST_POINTS = int(_WINDOW_S / _POINT_EVERY_S) + _FEWEST_STEPS + 2


class StageProgress:
    """Tracks the progress of a stage.

    Work is counted in elements. The work of a splittable stage, whose elements are few and large, is counted in the
    sizes of its restrictions.
    """

    def __init__(self, stage: StageRun, metrics: RunMetrics) -> None:
        self._stage = stage
        self._metrics = metrics
        self._bundles_seen = 0
        self._began_at: float | None = None
        self._updated_at = 0.0
        self._clock = 0.0  # seconds in which it could work: the time without input says nothing about its speed
        self._element_pace = self._work_pace = Pace(0.0)
        self.elements = 0
        self.rate = 0.0
        self.fraction: float | None = None
        self.seconds_left: float | None = None
        self.inference: tuple[InferenceView, ...] = ()

    def update(self, seconds: float, running: int, waiting: int, arrived: float | None) -> None:
        """Recompute all attributes, ``seconds`` after the run's start.

        ``running`` bundles run, ``waiting`` elements are not committed, and the fraction ``arrived`` of the stage's
        input has arrived.
        """
        has_news = self._stage.bundles_done != self._bundles_seen
        if has_news:
            self._bundles_seen = self._stage.bundles_done
            self.elements = self._metrics.elements(self._stage.id)
            self.inference = inference_views(self._stage, self._metrics)
        if self._stage.is_done():
            self.rate, self.fraction, self.seconds_left = 0.0, 1.0, None
            return
        if self._began_at is None:
            if not running and not self._stage.bundles_done:
                return
            self._began_at = self._updated_at = seconds
            self._element_pace, self._work_pace = Pace(seconds), Pace(0.0)
        # A sink gathers input before it starts a bundle.
        if has_news or running or (waiting and not self._stage.plan.is_sink):
            self._clock += seconds - self._updated_at
        self._updated_at = seconds
        if has_news:
            self._element_pace.reached(seconds, self.elements)
            self._work_pace.reached(self._clock, self._done())
        self.rate = self._element_pace.per_second(seconds)
        self._estimate(seconds, self._began_at, waiting, arrived)

    def _estimate(self, seconds: float, began_at: float, waiting: int, arrived: float | None) -> None:
        self.fraction = self.seconds_left = None
        if self._stage.plan.has_endless_input:
            return
        total_arrived = self._arrived(waiting)
        if total_arrived is None or arrived is None or arrived < _LEAST_ARRIVED:
            return
        total = total_arrived / arrived
        self.fraction = min(1.0, max(0.0, self._done() / total))
        pace = self._work_pace.per_second(self._clock)
        if pace > 0 and seconds - began_at >= _LEAST_SECONDS:
            self.seconds_left = max(0.0, total - self._done()) / pace

    def _done(self) -> float:
        sized_work = self._stage.sized_work
        return self._stage.elements_done if sized_work is None else sized_work.done

    def _arrived(self, waiting: int) -> float | None:
        """Return all work that has arrived so far, or None if there was none or it is unknown."""
        sized_work = self._stage.sized_work
        return self._stage.elements_done + waiting or None if sized_work is None else sized_work.total


class Pace:
    """The recent rate of something that grows.

    >>> pace = Pace(began_at=0.0)
    >>> for second in range(1, 31):
    ...     pace.reached(second, 5 * second)
    >>> pace.per_second(30)
    5.0
    """

    def __init__(self, began_at: float) -> None:
        self._points: deque[tuple[float, float]] = deque([(began_at, 0.0)], maxlen=_MOST_POINTS)

    def reached(self, seconds: float, amount: float) -> None:
        """Note that the total was ``amount`` at ``seconds``."""
        last_seconds, last_amount = self._points[-1]
        if amount != last_amount and (seconds - last_seconds >= _POINT_EVERY_S or len(self._points) == 1):
            self._points.append((seconds, amount))

    def per_second(self, now: float) -> float:
        """Return the rate over the last seconds, or over the last changes if they are rare."""
        points = list(self._points)
        candidates = range(len(points) - 1 - _FEWEST_STEPS, 0, -1)
        first = next((i for i in candidates if points[i][0] <= now - _WINDOW_S), 0)
        first_seconds, first_amount = points[first]
        last_seconds, last_amount = points[-1]
        # The next change is under way: its time counts only once it takes longer than changes usually do.
        usual = (last_seconds - first_seconds) / max(1, len(points) - 1 - first)
        elapsed = max(last_seconds, now - usual) - first_seconds
        return (last_amount - first_amount) / elapsed if elapsed > 0 else 0.0


def inference_views(stage: StageRun, metrics: RunMetrics) -> tuple[InferenceView, ...]:
    """Return a view for each model of a stage that has counted batches. Each model of a step has its own namespace."""
    by_step = metrics.counters(stage.id, InferenceMetrics.ALL)
    worker_seconds = round(stage.busy.first_to_last_seconds * stage.pool.most_workers(), 3)
    return tuple(
        _view(step if len(by_namespace) == 1 else _model_step(step, namespace), counters, worker_seconds)
        for step, by_namespace in by_step.items()
        for namespace, counters in sorted(by_namespace.items())
        if counters.get(InferenceMetrics.BATCHES)
    )


def _model_step(step: str, namespace: str) -> str:
    """Name the step after one model, if it is named after all of its models.

    >>> _model_step("Enrich/Infer language, tone", "tone")
    'Enrich/Infer tone'
    """
    parent, slash, label = step.rpartition("/")
    return f"{parent}{slash}{label.partition(' ')[0]} {namespace}"


def _view(step: str, counters: dict[str, int], worker_seconds: float) -> InferenceView:
    def count(name: str) -> int:
        return counters.get(name, 0)

    def seconds(name: str) -> float:
        return round(count(name) / 1e6, 6)

    return InferenceView(
        step,
        inferences=count(InferenceMetrics.EXAMPLES),
        batches=count(InferenceMetrics.BATCHES),
        useful_cost=count(InferenceMetrics.USEFUL_COST),
        padded_cost=count(InferenceMetrics.PADDED_COST),
        budget_cost=count(InferenceMetrics.BUDGET_COST),
        queue_wait_seconds=seconds(InferenceMetrics.QUEUE_WAIT),
        prepare_seconds=seconds(InferenceMetrics.PREPARE),
        collate_seconds=seconds(InferenceMetrics.COLLATE),
        transfer_seconds=seconds(InferenceMetrics.TRANSFER),
        compute_seconds=seconds(InferenceMetrics.COMPUTE),
        return_seconds=seconds(InferenceMetrics.RETURN),
        device_busy_seconds=seconds(InferenceMetrics.DEVICE_BUSY),
        worker_seconds=worker_seconds,
        out_of_memory=count(InferenceMetrics.OUT_OF_MEMORY),
    )
