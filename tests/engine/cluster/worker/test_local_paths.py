"""Local paths in a worker that runs in a copy of the working folder, on another machine than the driver."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from apache_beam.io.filesystems import FileSystems
from apache_beam.io.localfilesystem import LocalFileSystem

from luminosity.engine.cluster.worker import local_paths
from luminosity.engine.cluster.worker.local_paths import LocalPaths
from luminosity.errors import PathNotShared

_GUARDED = ("create", "mkdirs", "copy", "rename", "open", "size", "metadata", "last_updated", "checksum", "match")


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The copy, in which this process runs; Beam's file system is as before afterwards."""
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "here.txt").write_text("one\n")
    monkeypatch.chdir(folder)
    for name in _GUARDED:
        monkeypatch.setattr(LocalFileSystem, name, getattr(LocalFileSystem, name))
    return folder


def _guard(copy: Path, *, is_apart: bool = True, shared: Path | None = None) -> None:
    local_paths.guard(LocalPaths("/home/me/project", is_apart, [str(shared)] if shared else [], copy=str(copy)))


def test_what_is_in_the_copy_is_read(copy: Path) -> None:
    _guard(copy)
    assert [each.path for each in FileSystems.match(["./*.txt"])[0].metadata_list] == ["./here.txt"]
    with FileSystems.open("here.txt") as file:
        assert file.read() == b"one\n"


@pytest.mark.parametrize("pattern", ["../data/in*.txt", ".hidden/a.txt", "none-*"])
def test_what_is_not_in_the_copy_is_refused(copy: Path, pattern: str) -> None:
    _guard(copy, is_apart=False)
    with pytest.raises(PathNotShared, match="copy of the driver's working folder /home/me/project"):
        FileSystems.match([pattern])
    with pytest.raises(PathNotShared):
        FileSystems.open(pattern)


def test_nothing_is_written_into_the_copy(copy: Path, tmp_path: Path) -> None:
    _guard(copy, is_apart=False)
    inside = FileSystems.join(FileSystems.split("out/x")[0], "temporary")  # as Beam's sinks name it
    for write in (
        lambda: FileSystems.create("out/x"),
        lambda: FileSystems.create("../x"),
        lambda: FileSystems.mkdirs(inside),
        lambda: FileSystems.rename(["here.txt"], ["there.txt"]),
    ):
        with pytest.raises(PathNotShared, match="a relative path"):
            write()
    FileSystems.create(str(tmp_path / "out" / "x")).close()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["copy", "here.txt", "out", "x"]


def test_folders_of_one_node_are_named(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"21 1 8:1 / / rw - ext4 /dev/sda1 rw\n22 1 0:40 / {tmp_path}/mounted rw - nfs4 server:/export rw\n"
    )
    monkeypatch.setattr(local_paths, "_MOUNTS", str(mounts))
    _guard(copy, shared=tmp_path / "shared")
    caplog.set_level(logging.WARNING)
    for name in ("mounted/x", "shared/x"):
        FileSystems.create(str(tmp_path / name)).close()
    assert FileSystems.match([str(tmp_path / "mounted" / "gone" / "*")])[0].metadata_list == []
    assert [record.getMessage().split(" on node")[0] for record in caplog.records] == [
        f"found no file that matches {tmp_path}/mounted/gone/*"
    ]
    caplog.clear()
    for name in ("own/x", "own/y", "other/x"):
        FileSystems.create(str(tmp_path / name)).close()
    [record] = caplog.records
    assert f"a step writes to {tmp_path}/own on a disk of node" in record.getMessage()
    with pytest.raises(PathNotShared, match="found no folder"):
        FileSystems.match([str(tmp_path / "gone" / "*.txt")])
