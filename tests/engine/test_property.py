"""Property tests: any small pipeline has the same results as on Beam's own runner.

Also while workers are killed, bundles are split and data is on disk.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from luminosity.engine import options
from luminosity.engine.loop import splits
from luminosity.engine.loop import splits as loop_splits
from luminosity.engine.loop.bundle import Attempt, Bundle
from luminosity.engine.loop.sizing import BundleSize
from tests.processes import kill_workers_of
from tests.recipes import OPERATIONS, Recipe
from tests.runners import IS_REFERENCE, collect, new_pipeline

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600), pytest.mark.usefixtures("leaves_nothing")]

_SETTINGS = settings(
    deadline=None,
    derandomize=True,
    print_blob=True,
    database=None,
    # An example runs two pipelines, which is slow, and its files have unique names.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
# A failure while workers are killed may not happen again, so shrinking would mislead.
_WITHOUT_SHRINKING = settings(_SETTINGS, phases=[Phase.explicit, Phase.generate])

_OPERATIONS = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(2, 4))


def _with_one_gather(operations: list[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Remove all operations "gather" but the first.

    Beam's runner fires timers before all elements of the same timestamp have arrived, which happens after a second
    "gather". Its result is wrong then; tests/engine/loop/test_time.py has the right one.
    """
    first = next((i for i, (name, _) in enumerate(operations) if name == "gather"), None)
    return tuple(o for i, o in enumerate(operations) if o[0] != "gather" or i == first)


def recipes(min_data: int = 0, min_operations: int = 1) -> st.SearchStrategy[Recipe]:
    return st.builds(
        Recipe,
        data=st.lists(st.integers(0, 50), min_size=min_data, max_size=12).map(tuple),
        window_s=st.none() | st.integers(5, 30),
        operations=st.lists(_OPERATIONS, min_size=min_operations, max_size=5).map(_with_one_gather),
    )


def check(recipe: Recipe, expected: Recipe, folder: Path, *flags: str) -> None:
    wanted = collect(expected.build, folder, beam.Pipeline(runner=FnApiRunner()))
    found = collect(recipe.build, folder, new_pipeline("--cpu_workers=2", *flags))
    assert Counter(found) == Counter(wanted)


@settings(_SETTINGS, max_examples=15)
@given(recipe=recipes())
def test_as_beams_own_runner(tmp_path: Path, recipe: Recipe) -> None:
    check(recipe, recipe, tmp_path)


@pytest.mark.skipif(IS_REFERENCE, reason="it has no budget")
@settings(_SETTINGS, max_examples=10)
@given(recipe=recipes(min_operations=2))
def test_as_beams_own_runner_with_everything_on_disk(tmp_path: Path, recipe: Recipe) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "_LEAST_BUDGET_BYTES", 1)
        check(recipe, recipe, tmp_path, "--memory_budget=1B")


@pytest.mark.skipif(IS_REFERENCE, reason="its bundles are not split")
def test_as_beams_own_runner_with_bundles_split_at_random_moments(tmp_path: Path) -> None:
    splits_before, total = loop_splits.apply, 0

    def counted(bundle: Bundle, attempt: Attempt, response: beam_fn_api_pb2.InstructionResponse, now: float) -> None:
        nonlocal total
        total += bool(response.process_bundle_split.channel_splits)
        splits_before(bundle, attempt, response, now)

    @settings(_WITHOUT_SHRINKING, max_examples=12)
    @given(recipe=recipes(min_data=8, min_operations=3), seed=st.integers(0, 1000))
    def check_while_splitting(recipe: Recipe, seed: int) -> None:
        chance = random.Random(seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BundleSize, "deadline_seconds", lambda self, now: chance.uniform(0.0, 0.05))
            patch.setattr(BundleSize, "worth_taking", lambda *_, **__: True)
            patch.setattr(splits, "_FIRST_TAKE_S", chance.uniform(0.0, 0.02))
            patch.setattr(loop_splits, "apply", counted)
            check(replace(recipe, seconds_each=0.005), recipe, tmp_path)

    check_while_splitting()
    assert total > 0


@pytest.mark.skipif(IS_REFERENCE, reason="there are no workers to kill")
def test_as_beams_own_runner_while_workers_are_killed(tmp_path: Path) -> None:
    total = 0

    @settings(_WITHOUT_SHRINKING, max_examples=5)
    @given(recipe=recipes(min_data=8, min_operations=3), seed=st.integers(0, 1000))
    def check_while_killing(recipe: Recipe, seed: int) -> None:
        nonlocal total
        at_work = tmp_path / "at-work"
        slow = replace(recipe, seconds_each=0.02, at_work=str(at_work))
        with kill_workers_of(os.getpid(), every_s=0.2, at_work=at_work, seed=seed) as kills:
            check(slow, recipe, tmp_path)
        note(f"{kills.count} workers were killed")
        total += kills.count

    check_while_killing()
    assert total > 0
