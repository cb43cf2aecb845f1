"""The folders of a run on a node are gone, whichever process is killed."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from luminosity.engine import folders
from luminosity.engine.cluster.agent import folder_cleaner, node_folder
from luminosity.engine.cluster.agent.node_folder import NodeFolder
from luminosity.errors import InvalidArgument

_PATIENCE_S = 60
_LATE_FILES = 1000  # written while the cleaner removes their folder
_AGENT = """
import json, sys
from luminosity.engine.cluster.agent.node_folder import NodeFolder
folder = NodeFolder.open("run", {}, "node")
print(json.dumps([folder.path, folder.memory]), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """A disk and a shared memory of this test alone."""
    roots = [tmp_path / "disk", tmp_path / "memory"]
    for root in roots:
        root.mkdir()
    monkeypatch.setattr(node_folder, "_roots", lambda: list(map(str, roots)))
    yield roots
    until_ended(*cleaners(tmp_path))


def cleaners(folder: Path | str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        line: Any = process.info["cmdline"] or []
        if folder_cleaner.__file__ in line and any(str(folder) in each for each in line):
            found.append(process)
    return found


def until_ended(*processes: psutil.Process) -> None:
    assert not psutil.wait_procs(processes, timeout=_PATIENCE_S)[1]


def test_each_run_has_private_folders_on_each_node_with_its_files(own_roots: list[Path]) -> None:
    first = NodeFolder.open("0123456789abcdef", {"main-classes": b"classes"}, "node-one-of-two")
    second = NodeFolder.open("0123456789abcdef", {}, "node-two-of-two")
    paths = [first.path, first.memory, second.path, second.memory]
    assert len(set(paths)) == 4
    assert all(stat.S_IMODE(os.stat(path).st_mode) == 0o700 for path in paths)
    assert os.path.basename(first.path).startswith("luminosity-0123456789ab-node-one-")
    assert Path(first.path, "main-classes").read_bytes() == b"classes"
    assert stat.S_IMODE(os.stat(Path(first.path, "main-classes")).st_mode) == 0o600
    [cleaner] = cleaners(first.path)
    assert os.getpid() not in [each.pid for each in cleaner.parents()]
    assert cleaner.memory_info().rss < 15_000_000
    folders.remove_abandoned(str(own_roots[0]))
    assert os.path.exists(first.path)
    for each in (first, second, first):
        each.remove()
    until_ended(cleaner)
    assert [list(root.iterdir()) for root in own_roots] == [[], []]


@pytest.mark.parametrize("name", ["../up", "", "a/b", "-x"])
def test_names_stay_inside_the_folder(name: str, own_roots: list[Path]) -> None:
    with pytest.raises(InvalidArgument, match="expected up to 100 letters"):
        NodeFolder.open("run", {name: b""}, "node")
    assert [list(root.iterdir()) for root in own_roots] == [[], []]


@pytest.mark.alone
@pytest.mark.parametrize("cleaner_too", [False, True])
def test_folders_are_removed_if_the_agent_is_killed_and_by_the_next_run_if_the_cleaner_is(
    cleaner_too: bool, tmp_path: Path
) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path / "disk")}
    agent = subprocess.Popen(
        [sys.executable, "-c", _AGENT], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    paths = json.loads(agent.stdout.readline())
    Path(paths[0], "nested", "deep").mkdir(parents=True)
    Path(paths[0], "nested", "deep", "file").write_text("a worker's")
    Path(paths[0], "nested", "link").symlink_to(tmp_path)
    [cleaner] = cleaners(paths[0])
    cleaner.terminate()  # as a service manager does; the cleaner waits for the agent
    if cleaner_too:
        cleaner.kill()
        until_ended(cleaner)
    agent.send_signal(signal.SIGKILL)
    agent.communicate(timeout=_PATIENCE_S)
    if cleaner_too:
        assert all(map(os.path.exists, paths))
        for root in map(os.path.dirname, paths):
            folders.remove_abandoned(root)
    else:
        until_ended(cleaner)
    assert not any(map(os.path.exists, paths))
    assert tmp_path.exists()


def test_the_cleaner_tries_again_while_files_are_written(tmp_path: Path) -> None:
    folder = NodeFolder.open("run", {}, "node")
    [cleaner] = cleaners(folder.path)
    os.close(folder._lifeline)  # pyright: ignore[reportPrivateUsage]
    folder._lifeline = -1  # pyright: ignore[reportPrivateUsage]
    for number in range(_LATE_FILES):
        try:
            Path(folder.path, str(number)).write_bytes(b"late")
        except FileNotFoundError:
            break
    until_ended(cleaner)
    assert not os.path.exists(folder.path)
    folder.remove()
