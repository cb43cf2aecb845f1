"""Savepoints: what they have, that nothing but the user changes them, and what a run that begins with one has."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from apache_beam.coders import StrUtf8Coder, VarIntCoder
from apache_beam.runners.runner import PipelineState

from luminosity import Migration
from luminosity.cli.main import main
from luminosity.engine.durable.stored_state import kept_by, steps_with_state
from luminosity.engine.durable.upkeep import saving, states
from luminosity.engine.durable.upkeep.savepoints import Savepoint, begin_from, savepoints_of
from luminosity.errors import CheckpointDamaged, CheckpointError, OptionError
from tests.durability.damages import everything_in
from tests.engine.durable.test_ends import totals, wait_for_numbers, wait_until
from tests.engine.durable.test_kept_states import number_in, opened, write
from tests.engine.durable.test_migration import InCents, InEuros, run_for_a_while
from tests.marks import notes
from tests.runners import IS_REFERENCE, finished, start

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does"),
]

META = {"generation": "1", "state": "stopped", "saved_at": "1000000000.0", "shape": "{}", "sinks": "c000000-r00"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint whose last transaction is 3, with a file."""
    path = tmp_path / "checkpoint"
    with contextlib.closing(opened(path)) as made:
        for number in range(1, 3):
            write(made, number)
        made.note(**META)
    return path


def save(folder: Path, name: str) -> Path:
    assert main(["checkpoint", "save", str(folder), name]) == 0
    return folder / "savepoints" / name


def names(folder: Path) -> list[str]:
    return [each.name for each in savepoints_of(str(folder)) if isinstance(each, Savepoint)]


def test_a_savepoint_has_everything_and_its_files_are_links(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    savepoint = save(folder, "first")
    assert f"start from it with --checkpoint_dir=NEW --savepoint={savepoint}" in capsys.readouterr().out
    file = folder / "blocks" / "1" / "2"
    assert file.stat().st_nlink == 2
    assert os.path.samefile(file, savepoint / "blocks" / "1" / "2")
    assert sorted(os.listdir(savepoint)) == ["blocks", "checkpoint.sqlite", "savepoint.json"]
    with contextlib.closing(opened(folder)) as made:
        write(made, 3)
        file.unlink()  # as a run does once it needs the file no more
    assert main(["checkpoint", str(savepoint), "--check"]) == 0
    assert main(["checkpoint", str(folder), "--check"]) == 0
    assert "0 earlier states and 1 savepoints are what was written" in capsys.readouterr().out


def test_savepoints_are_listed_shown_and_removed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", str(folder)]) == 0
    assert "no savepoints" in capsys.readouterr().out
    save(folder, "first")
    capsys.readouterr()
    assert main(["checkpoint", "save", str(folder), "second", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "second"
    assert main(["checkpoint", "list", str(folder)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["name", "second", "first"]
    assert main(["checkpoint", "list", str(folder), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in listed] == ["second", "first"]
    assert listed[0]["bytes"] - listed[0]["own_bytes"] == len("file 2")
    assert main(["checkpoint", "show", str(folder), "first"]) == 0
    assert "a savepoint: a run begins with it in a new --checkpoint_dir" in capsys.readouterr().out
    assert main(["checkpoint", str(folder)]) == 0
    assert f"2: `lum checkpoint list {folder}`" in " ".join(capsys.readouterr().out.split())
    assert main(["checkpoint", "remove", str(folder), "first"]) == 0
    assert names(folder) == ["second"]
    assert main(["checkpoint", "show", str(folder), "secnd"]) == 2
    assert "did you mean 'second'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["save", "{folder}"], "expected `lum checkpoint save DIR NAME`"),
        (["list", "{folder}", "first"], "expected `lum checkpoint list DIR`"),
        (["list", "{folder}/checkpoint.sqlite"], "found a file"),
        (["save", "{folder}/checkpoint.sqlite", "first"], "found a file"),
        (["{folder}", "first"], "expected one DIR"),
        (["save", "{folder}", "first", "--check"], "found --check with save"),
        (["remove", "{folder}", "first", "--json"], "found --json with remove"),
        (["save", "{folder}", "last"], "found the name 'last'"),
        (["save", "{folder}", "{folder}/mine"], "found a place in the checkpoint folder"),
        (["save", "{folder}", "{folder}-2/mine"], "there is no folder"),
        (["save", "{folder}/..", "first"], "found no checkpoint in it"),
        (["show", "{folder}", "first"], "found no savepoint in"),
        (["{folder}", "--restore", "first"], "found no savepoint in"),
    ],
)
def test_wrong_commands_change_nothing(
    folder: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything_in(folder)
    assert main(["checkpoint", *(word.format(folder=folder) for word in words)]) == 2
    assert said in capsys.readouterr().err
    assert everything_in(folder) == before
    assert names(folder) == []


@pytest.mark.parametrize("verb", ["save", "remove"])
def test_folders_of_the_user_stay(folder: Path, tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither what has the name of a savepoint that is not complete, nor what lies in a folder named as ours are."""
    place = tmp_path / "savepoints"
    mine = place / ("photos.unfinished" if verb == "save" else "photos")
    mine.mkdir(parents=True)
    (mine / "photo").touch()
    assert main(["checkpoint", verb, str(folder), str(place / "photos")]) == 2
    assert "found 'photo' in" in capsys.readouterr().err
    assert list(mine.iterdir()) == [mine / "photo"]


def test_the_remedy_fits_what_the_disk_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(saving, "sync_files", refuse)
    assert main(["checkpoint", "save", str(folder), "first"]) == 1
    said = capsys.readouterr().err
    assert "the right to write there" in said
    assert "make room" not in said


def test_a_name_is_used_once_and_a_savepoint_is_no_checkpoint_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    savepoint = save(folder, "first")
    assert main(["checkpoint", "save", str(folder), "first"]) == 2
    assert "is there already" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"found a savepoint in .*--savepoint="):
        everything_in(savepoint)
    assert main(["checkpoint", "save", str(savepoint), "of-a-savepoint"]) == 2


@pytest.mark.parametrize("state", ["finished", "drained"])
def test_nothing_is_saved_of_a_run_that_is_over_or_has_saved_nothing(
    folder: Path, state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(opened(folder)) as made:
        made.note(state=state)
    assert main(["checkpoint", "save", str(folder), "late"]) == 2
    assert f"has {state}" in capsys.readouterr().err
    opened(tmp_path / "empty").close()
    assert main(["checkpoint", "save", str(tmp_path / "empty"), "early"]) == 2
    assert "nothing was saved" in capsys.readouterr().err


def test_nothing_is_saved_of_a_run_that_ends_meanwhile_or_that_is_half_restored(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = saving.sweep

    def finish(path: str) -> None:
        real(path)
        with contextlib.closing(opened(folder)) as made:
            made.note(state="finished")

    with monkeypatch.context() as patch:
        patch.setattr(saving, "sweep", finish)
        assert main(["checkpoint", "save", str(folder), "late"]) == 2
    assert "has finished" in capsys.readouterr().err
    with contextlib.closing(opened(folder)) as made:
        made.note(state="stopped")
    (folder / "copy.json").write_text(json.dumps({"is_restoring": True}))
    assert main(["checkpoint", "save", str(folder), "half"]) == 2
    assert "did not get all of the copy" in capsys.readouterr().err
    assert not (folder / "savepoints").exists()


def test_files_that_the_run_removes_meanwhile_are_looked_for_in_its_next_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = opened(folder)
    real, tries = states.link, 0

    def link(source: str, target: str) -> None:
        nonlocal tries
        tries += 1
        if tries <= 3:  # The run is quicker three times.
            write(made, 2 + tries)  # which drops the one before
            Path(source).unlink()
        real(source, target)

    monkeypatch.setattr(saving, "link", link)
    saved = saving.save(str(folder), "busy")
    made.close()
    assert saved.tries == 4
    assert number_in_savepoint(folder / "savepoints" / "busy") == 5
    assert [path.name for path in (folder / "savepoints" / "busy" / "blocks" / "1").iterdir()] == ["5"]


def number_in_savepoint(path: Path) -> int:
    target = path.parent / "looked-into"
    assert main(["checkpoint", "--restore", str(path), str(opened_folder(target))]) == 0
    try:
        return number_in(target)
    finally:
        shutil.rmtree(target)


def opened_folder(path: Path) -> Path:
    opened(path).close()
    return path


def test_a_file_that_is_missing_is_damage_and_nothing_is_saved(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "blocks" / "1" / "2").unlink()
    assert main(["checkpoint", "save", str(folder), "first"]) == 2
    assert f"the checkpoint is damaged: {folder}/blocks/1/2 is missing" in capsys.readouterr().err
    assert not (folder / "savepoints").exists()


def test_damage_of_the_checkpoint_does_not_get_into_a_savepoint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "blocks" / "1" / "2").write_text("file X")
    (folder / "kept").mkdir()
    assert main(["checkpoint", "save", str(folder), "first"]) == 2
    said = capsys.readouterr().err
    assert f"{folder}/blocks/1/2 has other bytes than were written" in said
    assert f"`lum checkpoint {folder} --restore last`" in said
    assert not (folder / "savepoints").exists()


@pytest.mark.parametrize("damage", ["database", "file", "note", "no note", "other database", "no database"])
def test_damage_of_a_savepoint_is_found_and_nothing_begins_with_it(
    folder: Path, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    savepoint, other = save(folder, "first"), save(folder, "other")
    match damage:
        case "database":
            data = bytearray((savepoint / "checkpoint.sqlite").read_bytes())
            data[-200:] = bytes(200)
            (savepoint / "checkpoint.sqlite").write_bytes(data)
        case "file":
            shutil.copy(savepoint / "blocks" / "1" / "2", tmp_path / "copy")  # not the checkpoint's own
            (savepoint / "blocks" / "1" / "2").unlink()
            (savepoint / "blocks" / "1" / "2").write_text("file X")
        case "note":
            note = savepoint / "savepoint.json"
            note.write_text(note.read_text().replace('"number": 3', '"number": 2'))
        case "no note":
            (savepoint / "savepoint.json").unlink()
        case "other database":
            shutil.copy(other / "checkpoint.sqlite", savepoint / "checkpoint.sqlite")
        case _:
            (savepoint / "checkpoint.sqlite").unlink()
    assert main(["checkpoint", str(folder), "--check"]) == 1
    assert str(savepoint) in capsys.readouterr().out
    if damage != "no note":
        assert main(["checkpoint", str(savepoint), "--check"]) == 1
    assert main(["checkpoint", "list", str(folder)]) == (1 if "note" in damage else 0)
    before = everything_in(folder)
    assert main(["checkpoint", str(folder), "--restore", "first"]) == 2
    assert ("is damaged" if damage != "no note" else "expected a savepoint") in capsys.readouterr().err
    assert everything_in(folder) == before
    remedy = "save one" if damage == "no note" else "take another savepoint"
    with pytest.raises(CheckpointError, match=remedy):
        start(totals(tmp_path, "Total"), f"--checkpoint_dir={tmp_path / 'new'}", f"--savepoint={savepoint}")
    assert main(["checkpoint", "remove", str(folder), "first"]) == 0
    assert main(["checkpoint", str(folder), "--check"]) == 0


def test_a_folder_goes_back_to_a_savepoint_which_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(folder, "first")
    with contextlib.closing(opened(folder)) as made:
        write(made, 5)
        made.keep_state()
        assert main(["checkpoint", str(folder), "--restore", "first"]) == 2
        assert "is in use by process" in capsys.readouterr().err
    assert main(["checkpoint", str(folder), "--restore", "first"]) == 0
    assert "went back to the savepoint first of 2001-09-09" in capsys.readouterr().out
    assert number_in(folder) == 2
    assert not (folder / "kept").exists()  # They came after it.
    with contextlib.closing(opened(folder)) as made:
        write(made, 6)
    assert main(["checkpoint", str(folder), "--check"]) == 0
    assert main(["checkpoint", str(folder), "--restore", "first"]) == 0
    assert number_in(folder) == 2
    shutil.rmtree(folder / "blocks")
    (folder / "checkpoint.sqlite").unlink()
    with pytest.raises(CheckpointDamaged, match=f"go back to a savepoint: `lum checkpoint list {folder}`"):
        everything_in(folder)
    assert main(["checkpoint", str(folder), "--restore", "first"]) == 0
    assert number_in(folder) == 2


def test_the_disk_must_have_room_for_the_run_as_well(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", ["total", "used", "free"])
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage(1 << 30, (1 << 30) - 10_000, 10_000))
        assert main(["checkpoint", "save", str(folder), "first"]) == 1
    assert "no savepoint is saved: 10 kB are free" in capsys.readouterr().err
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(saving, "sync_files", full)
        assert main(["checkpoint", "save", str(folder), "first"]) == 1
    assert "can't be saved; the run continues from where it is: [Errno 28] No space" in capsys.readouterr().err
    assert not (folder / "savepoints").exists()
    save(folder, "first")


class Killed(BaseException):
    pass


def kill(*_: object) -> None:
    raise Killed


def test_a_start_that_is_killed_while_it_takes_a_savepoint_is_refused_until_it_is_repeated(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    savepoint, new = save(folder, "first"), tmp_path / "new"
    for point in ("reset_mark", "sync_files"):
        with monkeypatch.context() as patch:
            patch.setattr(states, point, kill)
            with pytest.raises(Killed):
                begin(new, savepoint)
        with pytest.raises(CheckpointError, match="did not get all that a savepoint has"):
            everything_in(new)
    begin(new, savepoint)
    assert number_in(new) == 2
    begin(new, savepoint)  # Later starts leave it alone.
    save(folder, "second")
    with pytest.raises(CheckpointError, match=r"found a checkpoint in .* that did not begin with it"):
        begin(new, folder / "savepoints" / "second")


def begin(new: Path, savepoint: Path) -> None:
    begin_from(str(new), str(savepoint))


def test_two_runs_begin_with_one_savepoint_of_a_run_that_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = tmp_path / "first"
    checkpoint, elsewhere = first / "checkpoint", tmp_path / "elsewhere" / "mine"
    for folder in (first, elsewhere.parent):
        folder.mkdir()
    result: Any = start(totals(first, "Total"), "--cpu_workers=1", f"--checkpoint_dir={checkpoint}")
    try:
        wait_until(lambda: checkpoint.exists() and "Total" in steps_with_state(str(checkpoint)))
        assert main(["checkpoint", "save", str(checkpoint), str(elsewhere)]) == 0
        (total,) = kept_by(str(elsewhere), "Total")
        saved = total.value
        wait_for_numbers(first, more_than=saved + 5)  # It goes on.
        begin_with(elsewhere, tmp_path / "second", saved)
        assert f"the run in {checkpoint} goes on: both runs write to the places" in caplog.text
    finally:
        assert result.cancel() == PipelineState.STOPPED
        finished(result)
    shutil.rmtree(checkpoint)  # The savepoint elsewhere has all that it needs.
    begin_with(elsewhere, tmp_path / "third", saved)
    assert "beginning with the savepoint mine of the run in" in caplog.text
    assert main(["checkpoint", str(elsewhere), "--check"]) == 0


def begin_with(savepoint: Path, folder: Path, saved: int) -> None:
    """Run a stream that has counted ``saved`` elements at the savepoint, twice for a while."""
    folder.mkdir()
    options = f"--checkpoint_dir={folder / 'checkpoint'}", f"--savepoint={savepoint}"
    with pytest.raises(OptionError, match="--savepoint and --restart"):
        start(totals(folder, "Total"), *options, "--restart")
    for _ in range(2):  # The option may stay in the command.
        before = len(notes(folder / "numbers"))
        again: Any = start(totals(folder, "Total"), "--cpu_workers=1", *options)
        try:
            wait_for_numbers(folder, more_than=before + 5)
        finally:
            assert again.cancel() == PipelineState.STOPPED
            finished(again)
    counted = [int(line) for line in notes(folder / "numbers")]
    assert sorted(set(counted)) == list(range(saved + 1, max(counted) + 1))


def test_state_is_migrated_in_the_run_and_not_in_the_savepoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def to_cents(migration: Migration) -> None:
        migration.convert("Total", "euros", lambda euros: round(100 * euros), coder=VarIntCoder())
        migration.rename("Total", "euros", "cents")
        migration.convert("Total", "seen", str, coder=StrUtf8Coder())

    module = ModuleType("savepoint_migrations")
    module.to_cents = to_cents  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "savepoint_migrations", module)
    checkpoint, path = tmp_path / "checkpoint", tmp_path / "notes"
    count = len(set(run_for_a_while(InEuros(path), path, f"--checkpoint_dir={checkpoint}")))
    savepoint = save(checkpoint, "euros")
    for version in ("a", "b"):
        new = f"--checkpoint_dir={tmp_path / version}", f"--savepoint={savepoint}"
        lines = run_for_a_while(
            InCents(tmp_path / f"{version}-notes"),
            tmp_path / f"{version}-notes",
            *new,
            "--migrate=savepoint_migrations:to_cents",
        )
        number, cents, *_ = map(str, lines[0].split())
        assert (int(number), int(cents)) == (count, 50 * (count + 1))
    capsys.readouterr()
    assert main(["state", str(savepoint), "Total"]) == 0
    assert "euros" in capsys.readouterr().out
