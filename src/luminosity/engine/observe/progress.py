"""How far a stage is, how quickly it goes on, and about how long it still takes."""

from __future__ import annotations

from collections import deque

from luminosity.core import InferenceMetrics
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.loop.stage import StageRun
from luminosity.events import InferenceView

_LEAST_ARRIVED = 0.02  # what is known of less says nothing about the rest
_LEAST_SECONDS = 2.0

_WINDOW_S = 10.0
_POINT_EVERY_S = 0.5
_FEWEST_STEPS = 4  # slow things change seldom: their pace is that of their last few steps, however long ago
_MOST_POINTS = int(_WINDOW_S / _POINT_EVERY_S) + _FEWEST_STEPS + 2


class StageProgress:
    """Looks at a stage now and then.

    Work is counted in elements; that of a splittable step, whose elements are few and large, in the sizes of its
    restrictions.
    """

    def __init__(self, stage: StageRun, metrics: RunMetrics) -> None:
        self._stage = stage
        self._metrics = metrics
        self._bundles_seen = 0
        self._began_at: float | None = None
        self._element_pace = self._work_pace = Pace(0.0)
        self.elements = 0
        self.rate = 0.0
        self.fraction: float | None = None
        self.seconds_left: float | None = None
        self.inference: tuple[InferenceView, ...] = ()

    def look(self, seconds: float, running: int, waiting: int, arrived: float | None) -> None:
        """``running`` bundles run, ``waiting`` elements are not done, and of all input the part ``arrived`` is here."""
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
            self._began_at = seconds
            self._element_pace, self._work_pace = Pace(seconds), Pace(seconds)
        if has_news:
            self._element_pace.reached(seconds, self.elements)
            self._work_pace.reached(seconds, self._done())
        self.rate = self._element_pace.per_second(seconds)
        self._estimate(seconds, self._began_at, waiting, arrived)

    def _estimate(self, seconds: float, began_at: float, waiting: int, arrived: float | None) -> None:
        self.fraction = self.seconds_left = None
        came = self._came(waiting)
        if came is None or arrived is None or arrived < _LEAST_ARRIVED:
            return
        total = came / arrived
        self.fraction = min(1.0, max(0.0, self._done() / total))
        pace = self._work_pace.per_second(seconds)
        if pace > 0 and seconds - began_at >= _LEAST_SECONDS:
            self.seconds_left = max(0.0, total - self._done()) / pace

    def _done(self) -> float:
        sized_work = self._stage.sized_work
        return self._stage.elements_done if sized_work is None else sized_work.done

    def _came(self, waiting: int) -> float | None:
        """All work that was ever here, if there was any and it is known."""
        sized_work = self._stage.sized_work
        return self._stage.elements_done + waiting or None if sized_work is None else sized_work.total


class Pace:
    """
    >>> pace = Pace(began_at=0.0)
    >>> for second in range(1, 31):
    ...     pace.reached(second, 5 * second)
    >>> pace.per_second(30)
    5.0
    """

    def __init__(self, began_at: float) -> None:
        self._points: deque[tuple[float, float]] = deque([(began_at, 0.0)], maxlen=_MOST_POINTS)

    def reached(self, seconds: float, amount: float) -> None:
        """At ``seconds``, ``amount`` was done in all."""
        last_seconds, last_amount = self._points[-1]
        if amount != last_amount and (seconds - last_seconds >= _POINT_EVERY_S or len(self._points) == 1):
            self._points.append((seconds, amount))

    def per_second(self, now: float) -> float:
        points = list(self._points)
        candidates = range(len(points) - 1 - _FEWEST_STEPS, 0, -1)
        first = next((i for i in candidates if points[i][0] <= now - _WINDOW_S), 0)
        first_seconds, first_amount = points[first]
        last_seconds, last_amount = points[-1]
        # A step that is under way has no amount yet: its time counts only once it is longer than they usually are.
        usual = (last_seconds - first_seconds) / max(1, len(points) - 1 - first)
        elapsed = max(last_seconds, now - usual) - first_seconds
        return (last_amount - first_amount) / elapsed if elapsed > 0 else 0.0


def inference_views(stage: StageRun, metrics: RunMetrics) -> tuple[InferenceView, ...]:
    """One for each model of a stage that has counted batches. Models of one step have a namespace each."""
    by_step = metrics.counters(stage.id, InferenceMetrics.ALL)
    worker_seconds = round(stage.busy.first_to_last_seconds * stage.pool.plan.workers, 3)
    return tuple(
        _view(step if len(by_namespace) == 1 else _of_one(step, namespace), counters, worker_seconds)
        for step, by_namespace in by_step.items()
        for namespace, counters in sorted(by_namespace.items())
        if counters.get(InferenceMetrics.BATCHES)
    )


def _of_one(step: str, namespace: str) -> str:
    """A step may be called after all of its models.

    >>> _of_one("Enrich/Infer language, tone", "tone")
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
