"""Bundles that are split while they run: idle workers get the rest, and nothing is lost or doubled."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import apache_beam as beam
import pytest
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.transforms.core import RestrictionProvider
from apache_beam.transforms.window import SlidingWindows

from luminosity.engine.loop import splits
from luminosity.engine.loop.bundle import Attempt, Bundle
from tests.runners import IS_REFERENCE, collect, new_pipeline

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(IS_REFERENCE, reason="it has one worker"),
]

_WAIT_S = 120.0  # far above what a loaded machine takes


def _wait_until(path: Path, count: int) -> None:
    """Wait until the folder holds ``count`` files."""
    deadline = time.monotonic() + _WAIT_S
    while len(os.listdir(path)) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"found {sorted(os.listdir(path))}, expected {count} files")
        time.sleep(0.01)


class _FirstWaitsForTheOthers(beam.DoFn):
    """The first element waits until another worker has processed all others. Then it may fail, once."""

    def __init__(self, folder: Path, elements: int, fails: bool) -> None:
        self._folder = folder
        self._elements = elements
        self._fails = fails

    def process(self, element: int) -> Iterator[int]:
        if element == 0:
            _wait_until(self._folder, self._elements - 1)
            if self._fails and not (failed := self._folder.parent / "failed").exists():
                failed.touch()
                raise RuntimeError("on purpose")
        else:
            with open(self._folder / str(element), "xb"):  # raises if an element is processed twice
                pass
        yield element


@pytest.mark.parametrize("fails", [False, True])
def test_a_slow_element_does_not_keep_others_from_an_idle_worker(tmp_path: Path, fails: bool) -> None:
    """If its bundle fails, only what the bundle kept is retried."""
    done = tmp_path / "done"
    done.mkdir()

    def build(pipeline: beam.Pipeline) -> Any:
        return pipeline | beam.Create(range(20)) | beam.ParDo(_FirstWaitsForTheOthers(done, 20, fails))

    assert sorted(collect(build, tmp_path, new_pipeline("--cpu_workers=2"))) == list(range(20))
    assert (tmp_path / "failed").exists() == fails


class _Offsets(RestrictionProvider):
    def initial_restriction(self, element: int) -> OffsetRange:
        return OffsetRange(0, element)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element: int, restriction: OffsetRange) -> int:
        return restriction.size()

    def split(self, element: int, restriction: OffsetRange) -> Iterator[OffsetRange]:
        yield restriction  # only the runner splits it


_OFFSETS = beam.DoFn.RestrictionParam(_Offsets())


class _Count(beam.DoFn):
    """Emits offsets. The first one waits until another process has emitted some; then it may fail, once."""

    def __init__(self, folder: Path, fails: bool) -> None:
        self._folder = folder
        self._fails = fails

    def process(self, element: int, tracker: Any = _OFFSETS) -> Iterator[int]:
        offset = tracker.current_restriction().start
        while tracker.try_claim(offset):
            if offset == 0:
                _wait_until(self._folder, 1)
                if self._fails and not (failed := self._folder.parent / "failed").exists():
                    failed.touch()
                    raise RuntimeError("on purpose")
            else:
                (self._folder / str(os.getpid())).touch()
            yield offset
            offset += 1


@pytest.mark.parametrize("fails", [False, True])
def test_an_idle_worker_takes_half_of_a_restriction(tmp_path: Path, fails: bool) -> None:
    others = tmp_path / "others"
    others.mkdir()

    def build(pipeline: beam.Pipeline) -> Any:
        return pipeline | beam.Create([1000]) | beam.ParDo(_Count(others, fails))

    assert sorted(collect(build, tmp_path, new_pipeline("--cpu_workers=2"))) == list(range(1000))
    assert (tmp_path / "failed").exists() == fails


class _CountInWindow(beam.DoFn):
    """Emits offsets slowly, each with its window."""

    def process(
        self, element: int, window: Any = beam.DoFn.WindowParam, tracker: Any = _OFFSETS
    ) -> Iterator[tuple[int, str]]:
        offset = tracker.current_restriction().start
        while tracker.try_claim(offset):
            time.sleep(0.01)
            yield offset, str(window)
            offset += 1


def test_a_restriction_in_several_windows_is_not_cut(tmp_path: Path) -> None:
    """Beam repeats windows if a step that looks at its window is cut in the first of several."""

    def build(pipeline: beam.Pipeline) -> Any:
        sliding = beam.WindowInto(SlidingWindows(size=30, period=10))
        return pipeline | beam.Create([20, 20, 20]) | sliding | beam.ParDo(_CountInWindow())

    found = collect(build, tmp_path, new_pipeline("--cpu_workers=2"))
    assert set(Counter(found).values()) == {3}
    assert len(found) == 3 * 3 * 20


@pytest.mark.parametrize(("is_unbounded", "expected"), [(True, [0.0] * 6), (False, [0.0, 0.02, 0.1, 0.5, 0.0, 0.02])])
def test_a_restriction_without_an_end_is_only_cut_where_it_is(is_unbounded: bool, expected: list[float]) -> None:
    """The far part of an endless restriction would never have an element, but hold the watermark back."""
    requests: list[Any] = []
    plan = SimpleNamespace(is_splittable=True, is_unbounded=is_unbounded, can_cut_elements=True)
    blocks = [SimpleNamespace(count=1)]
    bundle = SimpleNamespace(stage=SimpleNamespace(plan=plan), inputs={"read": blocks})
    worker = SimpleNamespace(instruct=requests.append)
    attempt = SimpleNamespace(worker=worker, instruction_id="b", splits_requested=0, split_at=0.0, pending_splits={})
    for _ in expected:
        splits.request(cast(Bundle, bundle), cast(Attempt, attempt))
    desired = [request.process_bundle_split.desired_splits["read"] for request in requests]
    assert [each.fraction_of_remainder for each in desired] == expected
