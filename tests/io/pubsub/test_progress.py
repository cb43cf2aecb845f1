"""The restriction of a reader: only the reader itself hands over its rest."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from luminosity.io.pubsub.progress import GO_ON, LAST, Reading, ReadingTracker


def test_a_request_of_the_runner_takes_nothing_however_late_it_comes() -> None:
    tracker = ReadingTracker(Reading(3))
    with ThreadPoolExecutor(1) as runner:
        assert tracker.try_claim(GO_ON)
        assert runner.submit(tracker.try_split, 0.0).result() is None
        assert not tracker.try_claim(GO_ON)
        assert tracker.try_claim(LAST)
        assert runner.submit(tracker.try_split, 0.0).result() is None  # before the reader defers the rest
        assert tracker.try_split(0.0) == (Reading(3), Reading(4))
        assert runner.submit(tracker.try_split, 0.0).result() is None
    assert tracker.check_done()
