"""The sizes of models that the workers of a run share, and the memory of one worker for small models."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from luminosity._shared.model_sizes import RUN_FOLDER_VARIABLE, LocalShare, ModelSizes
from luminosity._shared.shared_files import try_lock
from luminosity.core import WorkerShare


def test_what_one_worker_measures_all_workers_know(tmp_path: Path) -> None:
    one, other = ModelSizes(str(tmp_path)), ModelSizes(str(tmp_path))
    assert other.get(("tag", "k1")) is None
    one.add(("tag", "k1"), "Handler", 1000)
    other.add(("tag", "k2"), "Handler", 2000)
    assert [each.get(("tag", key)) for each in (one, other) for key in ("k1", "k2")] == [1000, 2000, 1000, 2000]
    assert one.get(("tag", "k3")) is None


def test_one_worker_measures_at_a_time(tmp_path: Path) -> None:
    one, other = ModelSizes(str(tmp_path)), ModelSizes(str(tmp_path))
    order: list[str] = []

    def measure() -> None:
        order.append("waits")
        with other.measuring("Handler", LocalShare(1000)):
            order.append("other")

    with one.measuring("Handler", LocalShare(1000)):
        thread = threading.Thread(target=measure)
        thread.start()
        while not order:
            pass
        thread.join(0.2)
        order.append("one")
    thread.join(60)
    assert order == ["waits", "one", "other"]


def test_models_of_a_kind_that_was_small_are_loaded_at_once(tmp_path: Path) -> None:
    one, other = ModelSizes(str(tmp_path)), ModelSizes(str(tmp_path))
    share = LocalShare(requested=1_000_000)
    for number in range(4):
        one.add(number, "Small", 1000)
        one.add(number + 4, "Mixed", 1000 if number else 400_000)
    assert other.get(0) == 1000
    with one.measuring("Small", share), other.measuring("Small", share):
        pass  # Both load at the same time.
    with one.measuring("Mixed", share):
        assert _is_locked(tmp_path / "model-sizes")
    with one.measuring("New", share):
        assert _is_locked(tmp_path / "model-sizes")
    with one.measuring("Small", share):
        assert not _is_locked(tmp_path / "model-sizes")


def _is_locked(path: Path) -> bool:
    with open(path) as file:
        return not try_lock(file.fileno())


def test_only_workers_of_the_engine_share_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_FOLDER_VARIABLE, raising=False)
    assert ModelSizes.of_run() is None
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path))
    sizes = ModelSizes.of_run()
    assert sizes is not None
    assert sizes is ModelSizes.of_run()
    assert os.listdir(tmp_path) == ["model-sizes"]


def test_a_worker_has_half_of_its_part_for_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    (variable,) = WorkerShare("cpu", 1.0, 2**30, (), workers=2).to_environment().items()
    monkeypatch.setenv(*variable)
    share = LocalShare(requested=400)
    assert share.take("a", 60)
    assert share.take("a", 60), "another step of this process uses the same model"
    assert share.take("b", 40)
    assert not share.take("c", 1)
    share.give_back("a")
    assert not share.take("c", 1)
    share.give_back("a")
    assert share.take("c", 60)
