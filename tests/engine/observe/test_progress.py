"""The estimate of the time that a stage still needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from luminosity.engine.loop.metrics import BusyTime, RunMetrics
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.loop.workers import PoolRun
from luminosity.engine.observe.progress import StageProgress
from luminosity.engine.resources.pools import Pool


class _Stage(SimpleNamespace):
    """A stage with all that its progress looks at."""

    def __init__(self, *, is_sink: bool = False, is_endless: bool = False) -> None:
        pool = PoolRun(Pool("cpu", 1.0, 0, 1, (), 1, ()), first_writer=0)
        plan = SimpleNamespace(is_sink=is_sink, has_endless_input=is_endless)
        super().__init__(id="s", plan=plan, pool=pool, busy=BusyTime(), sized_work=None)
        self.bundles_done = self.elements_done = 0

    def is_done(self) -> bool:
        return False

    def commit(self, elements: int) -> None:
        self.bundles_done += 1
        self.elements_done += elements


@pytest.mark.parametrize("is_sink", [False, True])
def test_time_without_input_does_not_count_against_a_stage(is_sink: bool) -> None:
    stage = _Stage(is_sink=is_sink)
    progress = StageProgress(cast(StageRun, stage), RunMetrics())
    progress.update(10.0, 1, 100, 0.1)
    stage.commit(50)
    progress.update(15.0, 1, 50, 0.1)
    stage.commit(50)
    progress.update(20.0, 0, 0, 0.1)
    assert progress.seconds_left == pytest.approx(90.0)
    progress.update(60.0, 0, 0, 0.1)  # nothing to do for 40 seconds
    assert progress.seconds_left == pytest.approx(90.0)
    progress.update(80.0, 0, 100, 0.2)
    assert progress.seconds_left is not None
    # A sink gathers its input; any other stage should have begun.
    assert progress.seconds_left == pytest.approx(90.0) if is_sink else progress.seconds_left > 100


def test_input_without_an_end_has_no_fraction_and_no_time_left() -> None:
    stage = _Stage(is_endless=True)
    progress = StageProgress(cast(StageRun, stage), RunMetrics())
    progress.update(10.0, 1, 100, 1.0)
    stage.commit(50)
    progress.update(15.0, 1, 50, 1.0)
    assert (progress.fraction, progress.seconds_left) == (None, None)
