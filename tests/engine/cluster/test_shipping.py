"""Which files of the working folder and which modules a run sends to the nodes of a cluster."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from luminosity._shared.model_sizes import SENT_FOLDER_VARIABLE
from luminosity.engine.cluster import shipping
from luminosity.engine.cluster.shipping import choose
from luminosity.inference.files.local import local_copy


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a script in a folder of its own, as the current folder."""
    folder = tmp_path / "project"
    write(folder, "scripts/run.py", "scripts/shipped_helper.py", "models/encoder.bin", "pyproject.toml")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder / "scripts"), *sys.path])
    return folder


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")


def test_the_working_folder_is_sent_without_what_can_be_made_again_or_is_private(project: Path) -> None:
    sent = {f"work/{path.relative_to(project)}" for path in project.rglob("*") if path.is_file()}
    write(project, ".env", ".git/config", "scripts/__pycache__/run.pyc", "node_modules/a/b.js", "build/lib/run.py")
    write(project, "env3/pyvenv.cfg", "env3/lib/x.py", "project.egg-info/PKG-INFO", "scripts/old.pyc")
    choice = choose(str(project))
    assert {each for each in choice.files if each.startswith("work/")} == sent
    assert not choice.warnings
    assert choice.import_path[0] == "work/scripts"


def test_a_folder_named_build_is_sent_if_it_is_no_output(tmp_path: Path) -> None:
    write(tmp_path, "build/houses.csv")
    assert "work/build/houses.csv" in choose(str(tmp_path)).files


def test_large_files_and_linked_folders_are_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "_LARGEST_FILE", 1000)
    (project / "data.csv").write_bytes(b"x" * 1001)
    (project / "shared").symlink_to(project.parent)
    choice = choose(str(project))
    assert not {"work/data.csv", "work/shared"} & set(choice.files)
    [warning] = choice.warnings
    assert "data.csv (1 kB)" in warning
    assert "shared (a link to a folder)" in warning


def test_of_a_folder_that_is_too_large_only_imported_modules_are_sent(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "_MOST_BYTES", 1000)
    (project / "data.csv").write_bytes(b"x" * 1001)
    importlib.import_module("shipped_helper")
    try:
        choice = choose(str(project))
    finally:
        del sys.modules["shipped_helper"]
    assert [each for each in choice.files if each.startswith(("work", "modules/0"))] == ["modules/0/shipped_helper.py"]
    assert choice.import_path[0] == "modules/0"
    [warning] = choice.warnings
    assert "only the modules that this script has imported are sent to the nodes. Largest: data.csv (1 kB)" in warning


def test_of_a_home_folder_only_imported_modules_are_sent(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(project))
    choice = choose(str(project))
    assert not [each for each in choice.files if each.startswith("work/")]
    assert "more than one project" in choice.warnings[0]


def test_modules_from_elsewhere_are_sent_too_but_not_those_that_nodes_have(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "elsewhere", "shipped_package/__init__.py", "shipped_package/inner/part.py", "not_imported.py")
    write(tmp_path / "elsewhere", "shipped_package/table.csv")
    write(tmp_path / "home" / "site-packages", "shipped_library.py")
    folders = [str(tmp_path / "elsewhere"), str(tmp_path / "home" / "site-packages")]
    monkeypatch.setattr(sys, "path", [*folders, *sys.path])
    for name in ("shipped_package", "shipped_library"):
        importlib.import_module(name)
    try:
        choice = choose(str(project))
    finally:
        del sys.modules["shipped_package"], sys.modules["shipped_library"]
    assert not [each for each in choice.files if each.endswith("shipped_library.py")]
    found = {each for each in choice.files if each.startswith("modules/0/")}
    assert found == {"modules/0/shipped_package/__init__.py", "modules/0/shipped_package/inner/part.py"}
    assert not [each for each in choice.files if "/luminosity/" in each or "/apache_beam/" in each]


def test_a_worker_finds_what_the_driver_has_packed(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    os.chmod(project / "scripts" / "run.py", 0o755)
    packed = shipping.pack()
    os.utime(project / "pyproject.toml", (0, 0))
    assert packed == shipping.pack()
    assert packed.folder == str(project)
    assert "scripts/run.py" in packed.files
    sent = replace(shipping.unpack(packed.archive, str(copy)), installed=str(tmp_path / "installed"))
    assert sent.working_folder == str(copy / "work")
    assert sent.import_path[0] == str(copy / "work" / "scripts")
    assert sent.import_path[-1] == str(tmp_path / "installed")
    assert os.access(copy / "work" / "scripts" / "run.py", os.X_OK)
    monkeypatch.setenv(SENT_FOLDER_VARIABLE, sent.variables[SENT_FOLDER_VARIABLE])

    model = project / "models" / "encoder.bin"
    assert local_copy(str(model)) == str(model)  # this node sees the driver's disk
    project.rename(tmp_path / "another machine")
    assert local_copy(str(model)) == local_copy(f"file://{model}") == str(copy / "work" / "models" / "encoder.bin")
    assert local_copy(str(tmp_path / "other.bin")) == str(tmp_path / "other.bin")
    assert local_copy("models/encoder.bin") == "models/encoder.bin"


def test_what_steps_write_into_the_copy_is_named(project: Path, tmp_path: Path) -> None:
    sent = shipping.unpack(shipping.pack().archive, str(tmp_path / "copy"))
    assert sent.written() == []
    later = sent.unpacked_at + 1
    write(Path(sent.working_folder), "out/part.txt", "scripts/__pycache__/run.pyc")
    for name in ("out/part.txt", "scripts/run.py"):
        os.utime(Path(sent.working_folder, name), (later, later))
    assert sent.written() == ["out/part.txt", "scripts/run.py"]


def test_where_the_node_sees_the_folder_itself_no_copy_is_made(project: Path, tmp_path: Path) -> None:
    sent = shipping.unpack(shipping.pack().archive, str(tmp_path / "copy"), in_place=True)
    assert sent.working_folder == str(project)
    assert sent.import_path[0] == str(project / "scripts")
    assert not (tmp_path / "copy" / "work").exists()
    write(project, "out/part.txt")
    assert sent.written() == []


def test_a_node_with_other_versions_is_named() -> None:
    own = shipping.versions()
    assert not shipping.check_versions(own)
    wrong = shipping.check_versions({**own, "luminosity": "99", "missing": "1"})
    assert f"luminosity {own['luminosity']} (expected 99)" in wrong
    assert "missing missing (expected 1)" in wrong
    assert "apache-beam" not in wrong
