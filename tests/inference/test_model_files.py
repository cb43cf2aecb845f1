"""Models on any Beam filesystem are fetched once per machine, completely, and kept within a limit."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity.errors import ModelUnavailable, OptionError
from luminosity.inference.files import locks
from luminosity.inference.files.local import local_copy, use_cache
from luminosity.inference.handlers.jax import load_parameters
from luminosity.inference.options import ModelCacheConfig, threads_of
from tests.inference.stores import PAUSE, ROOT, fetchers, opened, wait_for_tick
from tests.processes import wait_for

pytestmark = pytest.mark.thorough


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "store"
    (folder / "bucket").mkdir(parents=True)
    monkeypatch.setenv(ROOT, str(folder))
    return folder / "bucket"


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "cache"
    use_cache(ModelCacheConfig(str(folder)))
    yield folder
    use_cache(ModelCacheConfig())


def entries(cache: Path) -> set[str]:
    """Return the names of the models in the cache."""
    return {path.name for path in cache.glob("*/files/*")}


def partials(cache: Path) -> list[Path]:
    return list(cache.glob("*.partial"))


def written(cache: Path) -> int:
    """Return the partial entries of models that are being fetched."""
    return sum(path.stat().st_size for path in cache.glob("*.partial/files/*"))


def test_what_is_local_or_no_path_stays_as_it_is(tmp_path: Path) -> None:
    spaced = tmp_path / "my model"
    spaced.mkdir()

    assert local_copy(str(tmp_path)) == str(tmp_path)
    assert local_copy(spaced.as_uri()) == str(spaced)
    assert local_copy("sentence-transformers/all-MiniLM-L6-v2") == "sentence-transformers/all-MiniLM-L6-v2"


def test_a_file_keeps_its_name_and_its_bytes(store: Path, cache: Path) -> None:
    (store / "weights.gz").write_bytes(b"not unpacked")

    copy = Path(local_copy("teststore://bucket/weights.gz"))

    assert copy.name == "weights.gz"
    assert copy.read_bytes() == b"not unpacked"
    assert local_copy("teststore://bucket/weights.gz") == str(copy)
    assert opened() == ["teststore://bucket/weights.gz"]
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.parametrize("scheme", ["teststore", "folderstore"])
@pytest.mark.parametrize("end", ["", "/"])
def test_a_folder_is_fetched_with_all_that_is_below_it(store: Path, cache: Path, scheme: str, end: str) -> None:
    model = {"config.json": b"{}", "weights/1.bin": b"one", "weights/deep/2.bin": b"two", "empty": b""}
    for name, contents in {**model, "../encoder-large/other": b"not this"}.items():
        path = store / "encoder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents)

    copy = Path(local_copy(f"{scheme}://bucket/encoder{end}"))

    assert copy.name == "encoder"
    assert {str(path.relative_to(copy)): path.read_bytes() for path in copy.rglob("*") if path.is_file()} == model


@pytest.mark.parametrize("scheme", ["teststore", "folderstore"])
def test_what_is_not_there_is_named(store: Path, cache: Path, scheme: str) -> None:
    with pytest.raises(ModelUnavailable, match=f"{scheme}://bucket/missing: no "):
        local_copy(f"{scheme}://bucket/missing")


def test_a_pattern_is_no_model(store: Path, cache: Path) -> None:
    with pytest.raises(ModelUnavailable, match="expected the address of one model, found a pattern"):
        local_copy("teststore://bucket/*.pt")


def test_of_several_processes_one_fetches(store: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (store / "model.pt").write_bytes(os.urandom(20_000))
    monkeypatch.setenv(PAUSE, "0.02")

    with fetchers(4, ModelCacheConfig(str(cache))) as processes:
        for process in processes:
            process.start("teststore://bucket/model.pt")
        copies = {process.result() for process in processes}

    assert [Path(copy).read_bytes() for copy in copies] == [(store / "model.pt").read_bytes()]
    assert opened() == ["teststore://bucket/model.pt"]


def test_of_several_threads_one_fetches(store: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (store / "model.pt").write_bytes(os.urandom(5_000))
    monkeypatch.setenv(PAUSE, "0.02")
    copies: list[str] = []
    threads = [
        threading.Thread(target=lambda: copies.append(local_copy("teststore://bucket/model.pt"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)

    assert len(copies) == 4
    assert len(set(copies)) == 1
    assert opened() == ["teststore://bucket/model.pt"]


def test_a_process_killed_midway_leaves_nothing_that_is_taken_for_whole(
    store: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model.pt", "never asked for again.pt"):
        (store / name).write_bytes(os.urandom(5_000_000))
    monkeypatch.setenv(PAUSE, "0.02")
    with fetchers(2, ModelCacheConfig(str(cache))) as (one, other):
        one.start("teststore://bucket/model.pt")
        other.start("teststore://bucket/never asked for again.pt")
        assert wait_for(lambda: len(partials(cache)) == 2 and written(cache) > 2_000, timeout_s=90)
        one.process.kill()
        other.process.kill()
    assert len(partials(cache)) == 2
    monkeypatch.delenv(PAUSE)

    copy = local_copy("teststore://bucket/model.pt")

    assert Path(copy).read_bytes() == (store / "model.pt").read_bytes()
    assert partials(cache) == []
    assert len(list(cache.glob("*.fetch"))) == 1, "the lock of the model that was never requested again is removed"


def test_a_wait_is_told_and_ends_when_the_other_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="luminosity")
    monkeypatch.setattr(locks, "_FIRST_MESSAGE_S", 0)
    monkeypatch.setattr(locks, "_LONGEST_STANDSTILL_S", 0.2)
    lock = str(tmp_path / "lock")

    with (
        locks.exclusive(lock, "model"),
        pytest.raises(ModelUnavailable, match="waited for model"),
        locks.exclusive(lock, "model"),
    ):
        pass

    assert any("waiting for model" in record.getMessage() for record in caplog.records)


def test_a_forked_child_does_not_keep_a_lock_for_its_parent(tmp_path: Path) -> None:
    lock = str(tmp_path / "lock")
    with locks.exclusive(lock, "model"), ProcessPoolExecutor(1, get_context("fork")) as child:
        assert lock not in child.submit(open_files).result()
        assert lock in open_files()


def open_files() -> set[str]:
    return {os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}


def test_a_fetch_that_fails_leaves_nothing(store: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (store / "model").mkdir(exist_ok=True)
        (store / "model" / name).write_bytes(b"contents")
    monkeypatch.setattr("tests.inference.stores.TestStore.open", _refuse)

    with pytest.raises(PermissionError, match="not for you"):
        local_copy("teststore://bucket/model")

    assert partials(cache) == []
    assert entries(cache) == set()


def _refuse(*args: object, **kwargs: object) -> None:
    raise PermissionError("not for you")


def test_a_damaged_copy_is_found_by_the_next_process(
    store: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (store / "model.pt").write_bytes(b"right")
    with fetchers(1, ModelCacheConfig(str(cache))) as (process,):
        copy = Path(process.fetch("teststore://bucket/model.pt"))
    times = copy.stat().st_atime_ns, copy.stat().st_mtime_ns
    copy.write_bytes(b"wrong")  # of the same length, as a failing disk might return it
    os.utime(copy, ns=times)

    assert Path(local_copy("teststore://bucket/model.pt")).read_bytes() == b"right"

    assert len(opened()) == 2
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "model.pt has other contents than were fetched" in warning


@pytest.mark.parametrize("contents", [b"wrong", b"longer than it was", None])
def test_a_copy_changed_under_a_process_is_fetched_again(
    store: Path, cache: Path, tmp_path: Path, contents: bytes | None
) -> None:
    (store / "model.pt").write_bytes(b"right")
    copy = Path(local_copy("teststore://bucket/model.pt"))
    wait_for_tick(tmp_path)
    if contents is None:
        copy.unlink()
    else:
        copy.write_bytes(contents)

    assert Path(local_copy("teststore://bucket/model.pt")).read_bytes() == b"right"
    assert len(opened()) == 2


def test_a_copy_that_was_only_touched_is_not_fetched_again(store: Path, cache: Path) -> None:
    (store / "model.pt").write_bytes(b"right")
    os.utime(local_copy("teststore://bucket/model.pt"))

    local_copy("teststore://bucket/model.pt")

    assert len(opened()) == 1


def test_a_changed_source_is_fetched_anew(store: Path, cache: Path) -> None:
    (store / "model.pt").write_bytes(b"old")
    old = local_copy("teststore://bucket/model.pt")
    (store / "model.pt").write_bytes(b"new")
    os.utime(store / "model.pt", (1_000_000_000, 1_000_000_000))

    new = local_copy("teststore://bucket/model.pt")

    assert Path(new).read_bytes() == b"new"
    assert Path(old).read_bytes() == b"old", "whoever loads it now can go on"


def test_what_was_not_used_for_longest_goes_and_what_is_in_use_stays(store: Path, cache: Path) -> None:
    for name in "abcd":
        (store / name).write_bytes(name.encode() * 1000)
    config = ModelCacheConfig(str(cache), limit=2500)
    use_cache(config)
    with fetchers(1, config) as (process,):
        for name in "aba":
            process.fetch(f"teststore://bucket/{name}")
    assert entries(cache) == {"a", "b"}

    local_copy("teststore://bucket/c")
    assert entries(cache) == {"a", "c"}, "b was not used for longest"

    with fetchers(1, config) as (process,):
        process.fetch("teststore://bucket/a")
        with pytest.raises(ModelUnavailable, match=r"d has 1 kB; .* may hold 2.5 kB, of which 2 kB are in use now"):
            local_copy("teststore://bucket/d")
        assert entries(cache) == {"a", "c"}

    local_copy("teststore://bucket/d")
    assert entries(cache) == {"c", "d"}, "the process that used a has ended"
    assert len(list(cache.glob("*.use"))) == 2, "locks go with what they lock"


def test_a_model_larger_than_the_cache_is_refused_with_both_sizes(store: Path, cache: Path) -> None:
    (store / "large").write_bytes(bytes(3000))
    use_cache(ModelCacheConfig(str(cache), limit=2500))

    with pytest.raises(ModelUnavailable, match=r"large has 3 kB, and the model cache .* may hold 2.5 kB"):
        local_copy("teststore://bucket/large")

    assert opened() == []


def test_a_full_disk_is_seen_before_the_fetch(store: Path, one_megabyte: Path) -> None:
    (store / "large").write_bytes(bytes(2_000_000))
    use_cache(ModelCacheConfig(str(one_megabyte / "models"), limit=3_000_000))
    try:
        with pytest.raises(ModelUnavailable, match=r"large has 2 MB; .* its disk has 1\.05 MB free"):
            local_copy("teststore://bucket/large")
    finally:
        use_cache(ModelCacheConfig())


def test_a_folder_that_others_can_write_to_is_refused(store: Path, cache: Path) -> None:
    (store / "model.pt").write_bytes(b"right")
    cache.mkdir()
    cache.chmod(0o777)

    with pytest.raises(OptionError, match=r"no other user can write to .*mode 777"):
        local_copy("teststore://bucket/model.pt")


def test_the_cache_folder_follows_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert config().local_folder() == "/home/me/.cache/luminosity/models"
    assert config("--model_cache=~/models").local_folder() == "/home/me/models"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert config().local_folder() == "/var/cache/me/luminosity/models"
    assert config("--model_cache=models").local_folder() == os.path.abspath("models")


def test_the_limit_leaves_half_of_a_small_disk() -> None:
    assert config().limit_in_bytes(free=10**12, held=0) == 50 * 10**9
    assert config().limit_in_bytes(free=10**9, held=10**9) == 10**9
    assert config("--model_cache_limit=20GB").limit_in_bytes(free=10**9, held=0) == 20 * 10**9


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--model_cache=gs://bucket/models", "a folder on the machine's own disk"),
        ("--model_cache_limit=plenty", "a size from 1MB up"),
        ("--model_cache_limit=10", "a size from 1MB up"),
        ("--model_threads=0", "a whole number from 1"),
        ("--model_threads=some", "a whole number from 1"),
    ],
)
def test_flags_are_checked(flag: str, expected: str) -> None:
    options = PipelineOptions([flag])
    with pytest.raises(OptionError, match=f"{flag}: expected {expected}"):
        assert ModelCacheConfig.of(options) is None or threads_of(options)


def config(*flags: str) -> ModelCacheConfig:
    return ModelCacheConfig.of(PipelineOptions(list(flags)))


def test_parameters_of_jax_go_through_the_cache(store: Path, cache: Path) -> None:
    np.savez(store / "weights.npz", weights=np.arange(3))
    assert load_parameters("teststore://bucket/weights.npz")["weights"].tolist() == [0, 1, 2]
    assert len(entries(cache)) == 1
