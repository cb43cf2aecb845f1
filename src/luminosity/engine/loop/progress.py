"""How far a stage is, how quickly it goes on, and about how long it still takes."""

from __future__ import annotations

from luminosity.engine.loop.inference import inference_views
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.loop.pace import Pace
from luminosity.engine.loop.stage import StageRun
from luminosity.events import InferenceView

_LEAST_ARRIVED = 0.02  # what is known of less says nothing about the rest
_LEAST_SECONDS = 2.0


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
