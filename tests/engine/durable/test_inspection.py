"""Tests of what is shown of a checkpoint folder, from a database as a run writes it."""

from __future__ import annotations

import json
import marshal
import os
import socket
from pathlib import Path

import pytest
from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.cli.checkpoint.checkpoint import checkpoint
from luminosity.engine.data.event_time import MAX
from luminosity.engine.durable.inspection import StoredStep, inspect
from luminosity.engine.durable.store import CheckpointFolder, StoredContent, Transaction
from luminosity.errors import CheckpointError

_SHAPE = {
    "steps": {"Stream%2FProcess": {"name": "Stream/Process"}, "Remember": {"name": "Remember"}},
    "reads": {
        "Stream%2FReshuffle|Stream%2FProcess": {"consumers": {"Stream%2FProcess": "Stream/Process"}},
        "Stream|Remember": {"consumers": {"Remember": "Remember"}},
    },
    "buffers": {},
    "stages": {"s|1": ["Stream|Remember"], "s|2": ["Stream%2FReshuffle|Stream%2FProcess"]},
}


def cell(key: bytes, state: str) -> bytes:
    found = beam_fn_api_pb2.StateKey()
    found.bag_user_state.transform_id = "Remember"
    found.bag_user_state.user_state_id = state
    found.bag_user_state.key = key
    return found.SerializeToString()


@pytest.fixture
def held(tmp_path: Path) -> CheckpointFolder:
    folder = CheckpointFolder(str(tmp_path / "checkpoint"))
    queue = [(0.0, (1, 0, 50, 7, 0, 50, b"")), (0.0, (0, b"abc", 3, 1, 0, 3, b""))]
    rows: dict[tuple[str, bytes], bytes | None] = {
        ("queue/Stream|Remember", b""): marshal.dumps(queue),
        ("state/Remember", cell(b"a", "x")): b"12345",
        ("state/Remember", cell(b"a", "y")): b"12345",
        ("state/Remember", cell(b"b", "x")): b"12345",
        ("timers/Remember/ts-flush", b"1"): b"1",
        ("stage/s|1", b""): marshal.dumps((5_000_000, 5_000_000, 0, 0)),
        ("stage/s|2", b""): marshal.dumps((MAX, 0, 0, 0)),
        ("groups", b"token"): b"1",
    }
    meta = {"state": "running", "generation": "3", "saved_at": "100.5", "shape": json.dumps(_SHAPE), "pipeline": "p.py"}
    content = StoredContent(1, None, "blocks/3/x", 0, 1000)
    folder.write(Transaction(1, rows=rows, contents=[content], meta=meta))
    return folder


def test_a_checkpoint_in_use_is_shown(held: CheckpointFolder, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect(held.path)
    assert found.holder is not None
    assert (found.holder["pid"], found.holder["host"]) == (os.getpid(), socket.gethostname())
    assert (found.state, found.generation, found.pipeline, found.saved_at) == ("running", 3, "p.py", 100.5)
    (step,) = found.steps
    cells = 3 * (len(cell(b"a", "x")) + 5)
    assert step == StoredStep("Remember", 8, 53, keys=2, cells=3, state_bytes=cells, timers=1, watermark=5.0)
    assert 1000 + cells < found.live_bytes < 3000
    assert found.folder_bytes > 4096
    assert checkpoint(held.path) == 0
    shown = capsys.readouterr().out
    assert "in use by" in shown
    assert "8 (53 B)" in shown
    checkpoint(held.path, as_json=True)
    assert json.loads(capsys.readouterr().out)["steps"][0]["keys"] == 2
    held.close()


def test_a_folder_whose_process_was_killed(held: CheckpointFolder) -> None:
    lock = Path(held.path, "lock").read_text()
    held.close()
    assert inspect(held.path).state == "killed"
    Path(held.path, "lock").write_text(json.dumps({**json.loads(lock), "pid": 2**22 + 1}))
    assert inspect(held.path).holder is None


def test_a_stopped_one(held: CheckpointFolder, capsys: pytest.CaptureFixture[str]) -> None:
    held.note(state="stopped")
    held.close()
    assert checkpoint(held.path) == 0
    assert "stopped; the next start continues" in capsys.readouterr().out


def test_a_newer_version_and_other_folders(held: CheckpointFolder, tmp_path: Path) -> None:
    held.note(version="99")
    held.close()
    with pytest.raises(CheckpointError, match="has version 99, and this release reads version 3"):
        inspect(held.path)
    with pytest.raises(CheckpointError, match="found no checkpoint in it"):
        inspect(str(tmp_path))
    with pytest.raises(CheckpointError, match="no such folder"):
        inspect(str(tmp_path / "none"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "checkpoint.sqlite").write_text("this is no database, but long enough to be read as one" * 10)
    with pytest.raises(CheckpointError, match="can't be opened"):
        inspect(str(other))
