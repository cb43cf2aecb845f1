"""How much work is left for a pool, also of what is still upstream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from luminosity.engine.elastic.work_left import WorkLeft, work_left
from tests.engine.elastic.pools import pool, stage

_POOL = pool("cpu", "a")


def _left(stages: list[Any], **buffers: Any) -> WorkLeft:
    return work_left(cast(Any, stages), cast(Any, {name.encode(): each for name, each in buffers.items()}))[_POOL]


def _buffer(*writers: Any, out: float = 1.0) -> Any:
    return SimpleNamespace(writers=writers, fraction_out=lambda: out)


def _reading(each: Any, name: str) -> Any:
    each.plan.reads = [SimpleNamespace(buffer_id=name.encode())]
    return each


def _source(total: float, done: float) -> Any:
    source = stage(_POOL, name="source")
    source.sized_work = SimpleNamespace(total=total, done=done)
    source.busy = SimpleNamespace(seconds=2.0 * done)
    return source


def test_queued_elements_count_at_the_measured_rate() -> None:
    left = _left([stage(_POOL, queued=100, seconds=0.5)])
    assert (left.seconds, left.has_waiting, left.is_done) == (pytest.approx(50.0, rel=0.01), True, False)
    assert _left([stage(_POOL, queued=100)]).seconds == 0.0, "nothing was measured"


def test_what_is_upstream_counts_as_much_as_has_come_so_far() -> None:
    """A quarter of the source is read, and 100 elements came of it: 300 are to come."""
    source = _source(total=40.0, done=10.0)
    model = _reading(stage(_POOL, queued=60, done=40, seconds=0.5), "texts")
    left = _left([source, model], texts=_buffer(source))
    assert left.seconds == pytest.approx(2.0 * 30.0 + 0.5 * 360.0, rel=0.01)


def test_a_source_without_a_known_size_adds_only_what_has_arrived() -> None:
    source = _source(total=0.0, done=0.0)
    source.sized_work.total = None
    model = _reading(stage(_POOL, queued=60, done=40, seconds=0.5), "texts")
    assert _left([source, model], texts=_buffer(source)).seconds == pytest.approx(30.0, rel=0.01)


def test_groups_that_have_not_come_out_count() -> None:
    before = stage(_POOL, name="before")
    before.is_done = lambda: True
    after = _reading(stage(_POOL, queued=10, done=10, seconds=0.5, name="after"), "groups")
    assert _left([before, after], groups=_buffer(before, out=0.5)).seconds == pytest.approx(15.0, rel=0.01)


def test_a_stream_counts_what_waits_and_what_runs() -> None:
    model = _reading(stage(_POOL, queued=60, done=40_000, seconds=0.5), "texts")
    model.plan.has_endless_input = True
    worker = SimpleNamespace(bundles={"b": SimpleNamespace(stage=model, left=20)})
    _POOL.workers[0] = cast(Any, worker)
    try:
        assert _left([model], texts=_buffer()).seconds == pytest.approx(40.0, rel=0.01)
    finally:
        _POOL.workers.clear()


def test_a_pool_whose_stages_get_no_more_input_is_done() -> None:
    done = stage(_POOL, seconds=1.0)
    done.is_done = lambda: True
    assert _left([done]) == WorkLeft(0.0, False, True)
