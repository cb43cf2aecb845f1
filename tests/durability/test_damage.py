"""Damaged checkpoint folders: refused, or what was written; never another result, and never an error of SQLite."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from luminosity.cli.main import main
from luminosity.engine.durable.store import CheckpointFolder
from luminosity.errors import CheckpointDamaged
from tests.durability import damages

_EACH = 60  # damages of a killed and of a closed folder; benchmarks/damaged_checkpoints.py has many more


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    damages.make(tmp_path / "checkpoint", random.Random(1), is_killed=True)
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("is_killed", [True, False])
def test_damage_is_never_silent(tmp_path: Path, is_killed: bool) -> None:
    chance = random.Random(int(is_killed))
    damages.make(tmp_path / "good", chance, is_killed=is_killed)
    expected = damages.everything_in(shutil.copytree(tmp_path / "good", tmp_path / "read"))
    refused = 0
    for number in range(_EACH):
        copy = shutil.copytree(tmp_path / "good", tmp_path / f"{number}")
        what = damages.damage(copy, chance)
        try:
            found = damages.everything_in(copy)
        except CheckpointDamaged as error:
            refused += f"{copy}" in str(error) and "it held" in str(error)
        else:
            assert found == expected, what
        shutil.rmtree(copy)
    assert refused > _EACH / 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("checkpoint.sqlite", r"checkpoint.sqlite is missing, though the folder has 'checkpoint.sqlite-wal' and 'syn"),
        ("checkpoint.sqlite-wal", r"sqlite and its log end with transaction 10, and transaction 30 was written"),
        ("synced", r"synced is missing; it held up to where the log"),
        ("blocks/1/w1.7", r"w1.7 is missing; it held data of blocks"),
    ],
)
def test_a_missing_file_is_named(folder: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointDamaged, match=message):
        damages.everything_in(folder)
    assert main(["checkpoint", str(folder), "--check"]) == 1
    assert "damaged" in capsys.readouterr().out


def test_all_damage_is_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", str(folder), "--check"]) == 0
    assert "30 blocks and 30 files" in capsys.readouterr().out
    for number in (3, 4):
        (folder / "blocks" / "1" / f"w1.{number}").write_bytes(b"other")
    (folder / "checkpoint.sqlite-wal").unlink()
    (folder / "checkpoint.sqlite-wal").write_bytes(b"")
    assert main(["checkpoint", str(folder), "--check"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("damaged: ")[2].split()[0].rpartition("/")[2] for line in lines] == [
        "checkpoint.sqlite",
        "w1.3",
        "w1.4",
    ]


def test_a_restart_begins_again_in_a_damaged_folder(folder: Path) -> None:
    (folder / "checkpoint.sqlite").unlink()
    CheckpointFolder(str(folder), restart=True).close()
    assert damages.everything_in(folder)[1] == {}


def test_a_start_that_was_killed_before_its_first_checkpoint_begins(folder: Path, tmp_path: Path) -> None:
    new = CheckpointFolder(str(tmp_path / "new"))
    mark_only = tmp_path / "mark only"
    mark_only.mkdir()
    shutil.copy(tmp_path / "new" / "synced", mark_only)
    new.close()
    CheckpointFolder(str(mark_only)).close()
