"""Tests of resource hints: they decide which processes run a step, how many there are, and what these may use."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import apache_beam as beam
import pytest

from luminosity.core import WorkerShare, machine_ram_bytes
from luminosity.errors import ResourcesExceeded
from tests.dofns import Sighting, look
from tests.marks import note
from tests.runners import IS_REFERENCE, collect, new_pipeline, run

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does"),
    pytest.mark.usefixtures("leaves_nothing"),
]

_ONE_DEVICE = {"accelerator": "type:nvidia-tesla-t4;count:1"}
_TWO_DEVICES = {"accelerator": "type:nvidia-tesla-t4;count:2"}
_A_THIRD_OF_RAM = {"min_ram": f"{machine_ram_bytes() // 3}B"}


def sightings(
    steps: dict[str, dict[str, str]],
    folder: Path,
    *flags: str,
    elements: int = 20,
    seconds: float = 0.0,
    at_once: int | None = None,
) -> list[Sighting]:
    """Send elements to several steps, each with its hints; return where each element was processed.

    With ``at_once``, the first elements wait until this many are being processed.
    """
    meeting = None if at_once is None else (folder / "meeting", at_once)

    def build(pipeline: beam.Pipeline) -> beam.PCollection:
        created = pipeline | beam.Create(range(elements)) | beam.Reshuffle()
        seen = [
            created | step >> beam.Map(look, step=step, seconds=seconds, meeting=meeting).with_resource_hints(**hints)
            for step, hints in steps.items()
        ]
        return seen | beam.Flatten()

    found = collect(build, folder, new_pipeline(*flags))
    assert len(found) == elements * len(steps)
    return found


def pids_of(found: list[Sighting], *steps: str) -> set[int]:
    return {sighting.pid for sighting in found if sighting.step in steps}


def shares_of(found: list[Sighting]) -> dict[str, WorkerShare]:
    """Return the share of a worker of each pool; all workers of a pool have the same."""
    return {sighting.share.pool: sighting.share for sighting in found}


def most_at_once(found: list[Sighting]) -> int:
    """Return the largest number of elements that were processed at the same time."""
    changes = sorted([(s.end_s, -1) for s in found] + [(s.start_s, 1) for s in found])
    in_hand = [sum(change for _, change in changes[: i + 1]) for i in range(len(changes))]
    return max(in_hand)


# ---- accelerators


def test_one_process_serves_all_steps_that_want_the_device(tmp_path: Path) -> None:
    steps = {
        "device": _ONE_DEVICE,
        "same hints": _ONE_DEVICE,
        "and RAM": {**_ONE_DEVICE, "min_ram": "200MB"},
        "and a core": {**_ONE_DEVICE, "cpu_count": "1"},
        "no hints": {},
        "RAM alone": {"min_ram": "200MB"},
    }
    found = sightings(steps, tmp_path, "--cpu_workers=2", "--accelerators=1")
    with_device = pids_of(found, "device", "same hints", "and RAM", "and a core")
    assert len(with_device) == 1
    assert not with_device & pids_of(found, "no hints", "RAM alone")


def test_only_the_devices_process_sees_it(tmp_path: Path) -> None:
    found = sightings({"device": _ONE_DEVICE, "cpu": {}}, tmp_path, "--cpu_workers=2", "--accelerators=1")
    for sighting in found:
        expected_devices = 1 if sighting.step == "device" else 0
        assert len(sighting.share.devices) == expected_devices
        assert len(list(filter(None, (sighting.visible_devices or "").split(",")))) == expected_devices


def test_uniform_workers_all_have_what_any_step_asks_for(tmp_path: Path) -> None:
    steps = {"io": {"min_ram": "200MB"}, "device": _ONE_DEVICE}
    found = sightings(steps, tmp_path, "--cpu_workers=2", "--accelerators=1", "--pools=uniform")
    assert len(pids_of(found, "io", "device")) == 1
    assert {(len(s.share.devices), s.share.ram_bytes) for s in found} == {(1, 200_000_000)}


def test_fitted_workers_have_what_the_file_says(tmp_path: Path) -> None:
    hints = tmp_path / "hints.json"
    hints.write_text(json.dumps({"steps": {"io": {"min_ram": "300MB"}}}))
    steps = {"io": {"min_ram": "200MB"}, "device": _ONE_DEVICE}
    flags = ("--cpu_workers=2", "--accelerators=1", "--pools=fitted", f"--hints={hints}")
    found = sightings(steps, tmp_path, *flags)
    assert {s.share.ram_bytes for s in found if s.step == "io"} == {300_000_000}
    assert not pids_of(found, "io") & pids_of(found, "device")


def test_two_devices_have_a_process_each(tmp_path: Path) -> None:
    found = sightings({"device": _ONE_DEVICE}, tmp_path, "--cpu_workers=1", "--accelerators=2", at_once=2)
    seen = {(sighting.pid, sighting.visible_devices, sighting.share.devices) for sighting in found}
    assert len(seen) == 2  # no process ever saw another device than its own
    (first_pid, *first), (second_pid, *second) = seen
    assert first_pid != second_pid
    assert first[0] != second[0]
    assert not set(first[1]) & set(second[1])


def test_a_step_that_wants_both_devices_has_one_process_that_sees_both(tmp_path: Path) -> None:
    found = sightings({"both": _TWO_DEVICES}, tmp_path, "--cpu_workers=1", "--accelerators=2")
    (seen,) = {(sighting.pid, sighting.visible_devices, sighting.share.devices) for sighting in found}
    assert len(set(seen[1].split(","))) == 2
    assert len(set(seen[2])) == 2


def test_a_missing_accelerator_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = sightings({"wants device": _ONE_DEVICE}, tmp_path, "--cpu_workers=1", "--accelerators=0")
    warnings = [r for r in caplog.records if r.name.startswith("luminosity") and r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "wants device" in warnings[0].getMessage()
    assert "accelerator" in warnings[0].getMessage()
    assert all(sighting.share.devices == () for sighting in found)


@pytest.mark.parametrize(("hints", "accelerators"), [(_ONE_DEVICE, 0), (_TWO_DEVICES, 1)])
def test_a_missing_accelerator_is_refused_where_asked(hints: dict[str, str], accelerators: int, tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    def build(pipeline: beam.Pipeline) -> None:
        elements = pipeline | beam.Create([1]) | beam.Map(lambda _: note(ran))
        elements | "Wants device" >> beam.Map(lambda x: x).with_resource_hints(**hints)

    with pytest.raises(ResourcesExceeded, match="Wants device"):
        run(build, "--cpu_workers=1", f"--accelerators={accelerators}", "--missing_resources=fail")
    assert not ran.exists()


# ---- RAM and cores


def test_ram_bounds_the_number_of_workers(tmp_path: Path) -> None:
    found = sightings({"large": _A_THIRD_OF_RAM}, tmp_path, "--cpu_workers=8", elements=60, seconds=0.02)
    (workers,) = {sighting.share.workers for sighting in found}
    assert 1 <= workers <= 3
    assert len(pids_of(found, "large")) <= workers
    assert all(sighting.share.ram_bytes >= machine_ram_bytes() // 3 for sighting in found)


def test_pools_share_the_ram(tmp_path: Path) -> None:
    steps = {"large": _A_THIRD_OF_RAM, "large, too": {**_A_THIRD_OF_RAM, "cpu_count": "1"}}
    found = sightings(steps, tmp_path, "--cpu_workers=8", elements=60, seconds=0.02)
    shares = shares_of([sighting for sighting in found if sighting.step in steps])
    assert sum(share.workers for share in shares.values()) <= 3
    assert len(pids_of(found, *steps)) <= 3


def test_more_ram_and_cores_than_there_are_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hints = {"min_ram": f"{4 * machine_ram_bytes()}B", "cpu_count": "1000"}
    found = sightings({"too large": hints, "plain": {}}, tmp_path, "--cpu_workers=2")
    (warning,) = [r.getMessage() for r in caplog.records if r.name.startswith("luminosity")]
    assert "'too large' asks for min_ram=" in warning
    assert "'too large' asks for cpu_count=1000" in warning
    (large,) = {sighting.share for sighting in found if sighting.step == "too large"}
    assert large.workers == 1
    assert 0 < large.ram_bytes < machine_ram_bytes()
    assert sum(share.ram_bytes * share.workers for share in shares_of(found).values()) <= machine_ram_bytes()


def test_more_ram_than_there_is_is_refused_where_asked(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    too_large = f"{2 * machine_ram_bytes()}B"

    def build(pipeline: beam.Pipeline) -> None:
        elements = pipeline | beam.Create([1]) | beam.Map(lambda _: note(ran))
        elements | "Too large" >> beam.Map(lambda x: x).with_resource_hints(min_ram=too_large)

    with pytest.raises(ResourcesExceeded, match="Too large"):
        run(build, "--cpu_workers=1", "--missing_resources=fail")
    assert not ran.exists()


def test_all_pools_together_never_exceed_the_machine(tmp_path: Path) -> None:
    steps = {
        "plain": {},
        "RAM": {"min_ram": "500MB"},
        "core": {"cpu_count": "1"},
        "device": _ONE_DEVICE,
        "device and RAM": {**_ONE_DEVICE, "min_ram": "300MB"},
    }
    found = sightings(steps, tmp_path, "--cpu_workers=4", "--accelerators=2", elements=40, seconds=0.02)
    shares = shares_of(found).values()
    # Pools lend each other cores, so that the workers of one may use all of them, but not more.
    assert all(share.cores * share.workers <= (os.cpu_count() or 1) + 1e-6 for share in shares)
    assert sum(share.ram_bytes * share.workers for share in shares) <= machine_ram_bytes()
    assert all(share.cores > 0 for share in shares)
    for pool, share in shares_of(found).items():
        assert len({s.pid for s in found if s.share.pool == pool}) <= share.workers


# ---- bundles at once


def test_a_device_runs_one_bundle_at_a_time_across_steps(tmp_path: Path) -> None:
    steps = {"one": _ONE_DEVICE, "two": {**_ONE_DEVICE, "min_ram": "200MB"}}
    found = sightings(steps, tmp_path, "--cpu_workers=2", "--accelerators=1", elements=30, seconds=0.02)
    assert most_at_once(found) == 1


def test_a_step_may_ask_for_more_bundles_at_once(tmp_path: Path) -> None:
    hints = {**_ONE_DEVICE, "max_active_bundles_per_worker": "3"}
    found = sightings({"device": hints}, tmp_path, "--cpu_workers=1", "--accelerators=1", seconds=0.02, at_once=3)
    assert len(pids_of(found, "device")) == 1
    assert most_at_once(found) == 3
