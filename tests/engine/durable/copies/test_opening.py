"""Tests of who may continue from a copy, and when: leases, folders that are out of date, and interrupted restores."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from apache_beam.runners.runner import PipelineState

from luminosity.cli.main import main
from luminosity.engine.data.world import THIS_MACHINE
from luminosity.engine.durable.copies import fetching
from luminosity.engine.durable.copies.lease import Lease, read_lease
from luminosity.engine.durable.copies.places import place_at
from luminosity.engine.durable.inspection import inspect
from luminosity.errors import CheckpointError, CheckpointFailed, CopyError
from tests.engine.durable.test_ends import counting, state_in, wait_for_numbers, wait_until
from tests.marks import notes
from tests.runners import IS_REFERENCE, finished, start

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")


class Machines:
    """Machines that run the same endless stream, with a copy that all of them see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.copy = folder / "copy"

    def checkpoint(self, machine: str) -> Path:
        return self.folder / machine

    def start(self, machine: str, *options: str, restores: bool = False) -> Any:
        copy = [f"--checkpoint_copy={self.copy}", *([f"--restore_from={self.copy}"] if restores else [])]
        return start(counting(self.folder), f"--checkpoint_dir={self.checkpoint(machine)}", *copy, *options)

    def run(self, machine: str, *options: str, restores: bool = False) -> None:
        """Run until some more numbers are counted, and stop."""
        result = self.start(machine, *options, restores=restores)
        wait_for_numbers(self.folder, more_than=len(notes(self.folder / "numbers")) + 20)
        assert result.cancel() == PipelineState.STOPPED
        finished(result)

    @property
    def numbers(self) -> list[int]:
        return [int(number) for number in notes(self.folder / "numbers")]


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path)


def test_a_stopped_run_continues_on_another_machine(machines: Machines, caplog: pytest.LogCaptureFixture) -> None:
    machines.run("one", restores=True)
    assert "there is no copy" in caplog.text
    machines.run("two", restores=True)
    assert "restored " in caplog.text
    assert machines.numbers == list(range(len(machines.numbers)))
    with pytest.raises(CheckpointError, match=r"the run has gone on elsewhere: process .* has taken over the copy"):
        machines.start("one", restores=True)
    shutil.rmtree(machines.checkpoint("one"))
    machines.run("one", restores=True)
    machines.run("one", restores=True)  # the folder is the newest now
    machines.run("one")
    assert machines.numbers == list(range(len(machines.numbers)))
    assert caplog.text.count("restored ") == 2


def test_a_run_that_is_drained_elsewhere_has_all_windows(machines: Machines) -> None:
    machines.run("one")
    result = machines.start("two", restores=True)
    wait_for_numbers(machines.folder, more_than=len(machines.numbers))
    result.drain()
    assert finished(result).state == PipelineState.DRAINED
    (group,) = notes(machines.folder / "groups")
    assert json.loads(group) == list(range(len(machines.numbers))) == machines.numbers
    assert (
        start(
            counting(machines.folder),
            f"--checkpoint_dir={machines.checkpoint('three')}",
            f"--restore_from={machines.copy}",
        ).state
        == PipelineState.DONE
    )


def test_places_of_others_are_refused(machines: Machines, tmp_path: Path) -> None:
    machines.run("one")
    with pytest.raises(CheckpointError, match=r"found the copy of another run .*, expected an empty place"):
        machines.start("two")
    (machines.copy / "lease.json").unlink()
    with pytest.raises(CheckpointError, match="found the copy of another run"):
        machines.start("two")
    with pytest.raises(CheckpointError, match="found no copy of a checkpoint there"):
        start(counting(tmp_path), f"--checkpoint_dir={tmp_path / 'x'}", f"--restore_from={tmp_path / 'typo'}")
    with pytest.raises(CheckpointError, match="found a checkpoint of something else"):
        start(counting(tmp_path), f"--checkpoint_dir={machines.checkpoint('one')}", f"--restore_from={tmp_path / 'y'}")
    machines.run("two", "--restart")
    assert inspect(str(machines.checkpoint("two"))).generation == 1


def test_a_run_that_lives_is_not_taken_over(machines: Machines) -> None:
    result = machines.start("one")
    try:
        wait_for_numbers(machines.folder)
        with pytest.raises(CheckpointError, match=r"is in use by process \d+ on .*try again in \d+ s"):
            machines.start("two", restores=True)
        with pytest.raises(CheckpointError, match="is in use by process"):
            machines.start("two", "--restart")
    finally:
        result.cancel()
    finished(result)


def test_a_run_whose_copy_was_taken_ends(machines: Machines) -> None:
    result = machines.start("one", "--copy_lease=6s")  # it is renewed four times as often, and a busy machine is slow
    wait_for_numbers(machines.folder)
    place = place_at(str(machines.copy))
    lease = Lease(place, "another folder", 60.0, THIS_MACHINE)
    try:
        with pytest.raises(CheckpointFailed, match=r"has lost its copy in .*: process \d+ on .* has taken it"):
            finished(result)
        found = read_lease(place)
        assert found is not None
        assert found.writer == lease.writer
    finally:
        lease.close()


def test_a_run_that_cannot_renew_its_lease_ends(machines: Machines) -> None:
    result = machines.start("one", "--copy_lease=1s")
    wait_for_numbers(machines.folder)
    wait_until(lambda: any(machines.copy.glob("segment-*")))
    machines.copy.rename(machines.folder / "away")
    machines.copy.write_text("no folder")
    with pytest.raises(CheckpointFailed, match="could not be renewed for 1 s, and another machine may go on"):
        finished(result)
    assert state_in(machines.checkpoint("one")) == "failed"


def test_a_place_that_cannot_be_reached_is_told_at_the_start(machines: Machines) -> None:
    machines.copy.write_text("no folder")
    with pytest.raises(CopyError, match="can't be reached: NotADirectoryError"):
        machines.start("one")


def test_an_interrupted_restore_begins_again(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machines.run("one")

    with monkeypatch.context() as broken:
        broken.setattr(fetching, "_read", interrupt_after(1, fetching._read))  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(KeyboardInterrupt):
            machines.start("two", restores=True)
    with pytest.raises(CheckpointError, match=r"the restore of .* was interrupted, and the folder is not complete"):
        start(counting(tmp_path), f"--checkpoint_dir={machines.checkpoint('two')}")
    with pytest.raises(CheckpointError, match="was interrupted"):
        machines.start("two")
    machines.run("two", restores=True)
    assert machines.numbers == list(range(len(machines.numbers)))


def interrupt_after(calls: int, real: Any) -> Any:
    left = calls + 2  # the manifest is read when the pipeline is built, and again when the run starts

    def read(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return real(*arguments)

    return read


def test_the_lag_is_shown(
    machines: Machines, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.WARNING)
    machines.run("one", f"--run_dir={tmp_path / 'runs'}")
    assert main(["checkpoint", str(machines.checkpoint("one"))]) == 0
    assert f"copy        {machines.copy}: complete" in capsys.readouterr().out.replace("\n", "")
    assert main(["show", "last", f"--run_dir={tmp_path / 'runs'}"]) == 0
    assert "copy" in capsys.readouterr().out
