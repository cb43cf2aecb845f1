"""The rule for the size of pools that grow and shrink."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from luminosity.engine.elastic.rule import Idle, Limits, comes_too_late, horizon, to_end, wanted

_WORK = st.floats(0.0, 1e7)
_STARTS = st.floats(0.1, 900.0)


@given(_WORK, _STARTS)
def test_no_worker_is_asked_for_whose_share_is_shorter_than_its_start(work_s: float, start_s: float) -> None:
    count = wanted(work_s, start_s, Limits(0, 10_000))
    assert count <= 1 or work_s / count > start_s


@given(_STARTS, st.integers(1, 50))
def test_work_that_is_done_before_a_worker_could_start_adds_none(start_s: float, up: int) -> None:
    """However many are up, they have no more than a start's worth of work each."""
    assert wanted(up * start_s, start_s, Limits(0, 10_000)) <= up
    assert comes_too_late(0.99 * up * start_s, up, start_s)


@given(_WORK, _STARTS, st.integers(0, 5), st.integers(5, 20))
def test_limits_hold(work_s: float, start_s: float, least: int, most: int) -> None:
    assert least <= wanted(work_s, start_s, Limits(least, most)) <= most


@given(_WORK, _WORK, _STARTS)
def test_more_work_never_means_fewer_workers(one: float, other: float, start_s: float) -> None:
    less, more = sorted((one, other))
    limits = Limits(0, 10_000)
    assert wanted(less, start_s, limits) <= wanted(more, start_s, limits)


@given(_WORK, _STARTS)
def test_a_worker_that_was_asked_for_is_not_withdrawn_at_once(work_s: float, start_s: float) -> None:
    count = wanted(work_s, start_s, Limits(0, 10_000))
    assert not any(comes_too_late(work_s, up, start_s) for up in {1, count - 1} if 0 < up < count)


def test_the_horizon_follows_the_measured_start() -> None:
    assert [horizon(start_s) for start_s in (0.5, 12.0, 100.0)] == [60.0, 60.0, 500.0]
    assert not comes_too_late(1.0, 0, 60.0), "without a worker, nothing would ever be done"


def test_accelerators_are_given_back_first_and_then_the_emptiest_nodes() -> None:
    idle = [
        Idle("c1", "cpu", "full", False),
        Idle("c2", "cpu", "empty", False),
        Idle("d1", "device", "gpus", True),
        Idle("d2", "device", "gpus", True),
    ]
    on_node = {"full": 8, "empty": 1, "gpus": 9}
    assert to_end(idle, {"cpu": 1, "device": 1}, on_node) == ["d1", "c2"]
    assert to_end(idle, {"cpu": 0, "device": 2}, on_node) == ["d1", "d2"]
    assert to_end(idle, {}, on_node) == []
