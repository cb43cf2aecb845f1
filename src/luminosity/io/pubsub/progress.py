"""How far a subscription is read: a restriction that never ends, and the watermark that its messages allow."""

from __future__ import annotations

import threading
from typing import Any, Final, NamedTuple

from apache_beam.io.iobase import WatermarkEstimator
from apache_beam.transforms.core import WatermarkEstimatorProvider
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.timestamp import MIN_TIMESTAMP, Timestamp

from luminosity.io.endless import EndlessTracker

__all__ = ["GO_ON", "LAST", "Reading", "ReadingTracker", "ReadingWatermark", "ReadingWatermarks"]

GO_ON: Final = "go on"
LAST: Final = "last"
_MIN_MICROS = MIN_TIMESTAMP.micros
_MAX_MICROS = GlobalWindow().max_timestamp().micros


class Reading(NamedTuple):
    """The restriction of a reader: how many of its bundles are done. Pub/Sub itself knows what is left."""

    bundles: int = 0


class ReadingTracker(EndlessTracker):
    """Lets a reader go on until it is asked to stop, and then defer the rest.

    A rest that a runner takes away might run before the bundle that read its beginning is committed, which would mix
    the messages of a key. If that bundle is run again, it would even hand over the same rest twice. So a request to
    split, which comes from another thread than the reader's, only asks the reader to stop.

    >>> tracker = ReadingTracker(Reading(3))
    >>> tracker.try_claim(GO_ON), tracker.try_split(0.5), tracker.try_claim(GO_ON)
    (True, None, False)
    >>> tracker.try_claim(LAST), tracker.try_split(0)
    (True, (Reading(bundles=3), Reading(bundles=4)))
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._should_stop = False
        self._splitter: int | None = None  # the thread that may split: the reader's, once it has stopped

    def current_restriction(self) -> Reading:
        """Return the restriction."""
        return self._reading

    def try_claim(self, position: str) -> bool:
        """Return whether the reader may :data:`GO_ON`; with :data:`LAST`, note that it defers the rest next."""
        if self._has_split:
            return False
        if position == LAST:
            self._splitter = threading.get_ident()
            return True
        return not self._should_stop

    def try_split(self, fraction_of_remainder: float) -> tuple[Reading, Reading] | None:
        """Hand over the rest if the reader itself asks, after it has said that it stops; otherwise ask it to stop."""
        del fraction_of_remainder
        if self._has_split:
            return None
        if self._splitter != threading.get_ident():
            self._should_stop = True
            return None
        self._has_split = True
        return self._reading, Reading(self._reading.bundles + 1)


class ReadingWatermark(WatermarkEstimator):
    """The watermark of a reader. It never moves back.

    The state has the name of what held the reader's messages, too: another holder does not know which messages are
    on their way again.

    >>> watermark = ReadingWatermark((0, ""))
    >>> watermark.move(7_000_000)
    >>> watermark.move(5_000_000)
    >>> watermark.current_watermark()
    Timestamp(7)
    """

    def __init__(self, state: tuple[int, str]) -> None:
        self._reached, self._holder = state

    def observe_timestamp(self, timestamp: Timestamp) -> None:
        """Do nothing: :meth:`move` knows of messages that are not emitted yet, too."""

    def move(self, micros: int) -> None:
        """Move the watermark forward."""
        self._reached = max(self._reached, min(micros, _MAX_MICROS))

    def take_over(self, holder: str) -> str:
        """Note what holds the reader's messages now, and return what has held them before; empty for nothing."""
        before, self._holder = self._holder, holder
        return before

    def current_watermark(self) -> Timestamp:
        """Return the watermark."""
        return Timestamp(micros=self._reached)

    def get_estimator_state(self) -> tuple[int, str]:
        """Return the state with which the next bundle continues."""
        return self._reached, self._holder


class ReadingWatermarks(WatermarkEstimatorProvider):
    """Makes a :class:`ReadingWatermark` for each reader."""

    def initial_estimator_state(self, element: Any, restriction: Any) -> tuple[int, str]:
        """Return the state of a reader that has not begun."""
        return _MIN_MICROS, ""

    def create_watermark_estimator(self, estimator_state: tuple[int, str]) -> ReadingWatermark:
        """Return a watermark that continues at the state."""
        return ReadingWatermark(estimator_state)
