"""Tests of claims: what a run gets beside others, what it says, and what killed runs leave."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity.core import machine_ram_bytes
from luminosity.engine.options import EngineConfig
from luminosity.engine.resources import claims
from luminosity.engine.resources.claims import Claim
from luminosity.engine.resources.hints import Needs
from luminosity.engine.resources.machine import Machine
from luminosity.engine.resources.pools import Assignment, Pool, assign
from luminosity.errors import ResourcesBusy
from tests.marks import wait_for_file
from tests.runners import IS_REFERENCE, finished, start

_GIB = 1 << 30
_MACHINE = Machine(cores=8, ram_bytes=64 * _GIB, devices=("gpu:0", "gpu:1"))
_ONE_GPU = Machine(cores=8, ram_bytes=64 * _GIB, devices=("gpu:0",))
_ON_GPU = Needs(accelerator_count=1)

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")


@dataclass(frozen=True)
class Step:
    id: str = "s"
    label: str = "Step"
    is_source: bool = False


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "claims"


def take(claim: Claim, needs: Needs, machine: Machine = _MACHINE, mode: str = "share") -> Pool:
    config = EngineConfig.of(PipelineOptions([]))

    def place(machine: Machine, *, is_quiet: bool = False) -> dict[str, Assignment]:
        return assign([(Step(), needs)], machine, config, is_quiet=is_quiet)

    return claim.take({"s": needs}, machine, mode, place)["s"].pool


def devices(pool: Pool) -> list[str]:
    return [device for group in pool.device_groups for device in group]


def claims_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def hold(folder: Path, needs: Needs, machine: Machine) -> Callable[[], None]:
    """Let another process take a claim. Returns a function that kills it."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def other() -> None:
        take(Claim("other.py", folder), needs, machine)
        ready.set()
        context.Event().wait(120)

    process = context.Process(target=other, daemon=True)
    process.start()
    assert ready.wait(60)

    def kill() -> None:
        process.kill()
        process.join(60)

    return kill


def test_steps_without_accelerators_and_ram_neither_claim_nor_wait(folder: Path) -> None:
    pool = take(Claim("a.py", folder), Needs(cpu_count=2), mode="fail")
    assert pool.workers == 4
    assert not folder.exists()
    declared = Machine(8, 64 * _GIB, ("declared:0",))
    for _ in range(2):
        assert devices(take(Claim("a.py", folder), _ON_GPU, declared, "fail")) == ["declared:0"]
    assert not folder.exists(), "a device that was only declared can't be taken twice"


def test_a_second_run_takes_the_devices_and_the_ram_that_are_left(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kill = hold(folder, Needs(min_ram_bytes=16 * _GIB, accelerator_count=1), _ONE_GPU)
    with caplog.at_level(logging.WARNING):
        first = Claim("b.py", folder)
        pool = take(first, Needs(min_ram_bytes=30 * _GIB, accelerator_count=1), mode="wait")
        assert devices(pool) == ["gpu:1"]
        (line,) = caplog.messages
        assert "other.py (process " in line
        assert "holds gpu:0 and 17.2 GB of RAM; this run takes what is left: gpu:1 and 51.5 GB of RAM" in line
    caplog.clear()
    small = Claim("c.py", folder)
    assert take(small, Needs(min_ram_bytes=_GIB), mode="fail").workers == 8
    assert not caplog.messages, "it gets all that it would get alone"
    assert {claim["name"]: claim["ram"] // _GIB for claim in claims_in(folder)} == {
        "other.py": 16,
        "b.py": 30,
        "c.py": 8,
    }
    for claim in (first, small):
        claim.release()
        claim.release()
    kill()
    with caplog.at_level(logging.WARNING):
        assert devices(take(Claim("d.py", folder), _ON_GPU)) == ["gpu:0", "gpu:1"]
    assert not caplog.messages
    assert [claim["name"] for claim in claims_in(folder)] == ["d.py"], "the claim of a killed run is gone"


def test_a_run_that_does_not_fit_shares_or_fails_or_waits(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = hold(folder, Needs(min_ram_bytes=40 * _GIB, accelerator_count=1), _ONE_GPU)
    needs = Needs(min_ram_bytes=30 * _GIB, accelerator_count=1)
    with pytest.raises(
        ResourcesBusy, match=r"other\.py \(process \d+\) holds gpu:0 and 42\.9 GB of RAM; this run needs"
    ) as found:
        take(Claim("b.py", folder), needs, _ONE_GPU, "fail")
    assert "1 accelerator and 32.2 GB of RAM, and no accelerator and 25.8 GB of RAM is left" in str(found.value)
    assert len(claims_in(folder)) == 1
    shared = Claim("b.py", folder)
    with caplog.at_level(logging.WARNING):
        pool = take(shared, needs, _ONE_GPU, "share")
    assert devices(pool) == ["gpu:0"]
    assert (pool.workers, pool.ram_per_worker) == (1, 30 * _GIB)
    (line,) = caplog.messages
    assert "uses the same gpu:0 and RAM beside it" in line
    shared.release()
    caplog.clear()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            kill()

    monkeypatch.setattr(claims.time, "sleep", sleep)
    with caplog.at_level(logging.WARNING):
        waiting = Claim("b.py", folder)
        assert devices(take(waiting, needs, _ONE_GPU, "wait")) == ["gpu:0"]
        take(waiting, needs, _ONE_GPU, "wait")  # planned again for a drain
    assert len(slept) == 3
    (line,) = caplog.messages
    assert line.startswith("this run waits: other.py")
    assert "--when_busy=share goes on beside others" in line
    assert [claim["name"] for claim in claims_in(folder)] == ["b.py"]


def test_a_folder_that_others_could_change_is_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir(mode=0o755)
    os.chmod(folder, 0o755)
    with caplog.at_level(logging.WARNING):
        assert devices(take(Claim("a.py", folder), _ON_GPU)) == ["gpu:0", "gpu:1"]
    assert "found something else than a private folder" in caplog.text
    assert not list(folder.iterdir())


def test_claims_of_other_versions_count_for_nothing_and_go_with_their_process(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    names = [f"{os.getpid()}-999999999.json", "999999999-0.json", "odd.json"]
    for name in names:
        (folder / name).write_text('{"later": 1}')
    claim = Claim("a.py", folder)
    assert devices(take(claim, _ON_GPU, mode="fail")) == ["gpu:0", "gpu:1"]
    claim.release()
    assert [path.name for path in folder.glob("*.json")] == names[:1]


@pytest.mark.alone
def test_two_real_runs_do_not_take_the_same_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, begun, release = tmp_path / "claims", tmp_path / "begun", tmp_path / "release"
    monkeypatch.setenv("LUMINOSITY_CLAIM_DIR", str(folder))
    ram = f"{machine_ram_bytes() * 6 // 10}B"

    def build(pipeline: beam.Pipeline) -> None:
        def step(_: bytes) -> None:
            begun.touch()
            wait_for_file(release)

        _ = pipeline | beam.Impulse() | beam.Map(step).with_resource_hints(min_ram=ram)

    first = start(build, "--cpu_workers=1")
    wait_for_file(begun)
    with pytest.raises(ResourcesBusy, match="of RAM; this run needs"):
        start(build, "--cpu_workers=1", "--when_busy=fail")
    second = start(build, "--cpu_workers=1")
    assert len(claims_in(folder)) == 2
    release.touch()
    assert finished(first).state == finished(second).state == "DONE"
    assert claims_in(folder) == []
