"""Tests of files that are replaced in one move."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from luminosity._shared.shared_files import replace_file


def test_a_file_is_replaced_and_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    replace_file(path, "old, and longer")
    replace_file(path, b"new", is_synced=True, has_writers=True)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_private_file_is_for_this_user_alone(tmp_path: Path) -> None:
    replace_file(tmp_path / "token", "secret", is_private=True)
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    replace_file(path, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_file(path, "\udc80")
    assert path.read_text() == "old"


def test_no_link_is_followed(tmp_path: Path) -> None:
    """Another user who can write to the folder must not choose the file that is overwritten."""
    (tmp_path / "theirs").write_text("kept")
    (tmp_path / "state.json.unfinished").symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match="symbolic links"):
        replace_file(tmp_path / "state.json", "new")
    assert (tmp_path / "theirs").read_text() == "kept"
