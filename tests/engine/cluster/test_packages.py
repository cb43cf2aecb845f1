"""Packages that a run brings along: which files are sent, and what is installed on a node."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from luminosity.engine.cluster import packages
from luminosity.errors import OptionError, WorkerStartFailed


def write_package(folder: Path, name: str, version: str) -> str:
    (folder / "shipped_words").mkdir(parents=True)
    (folder / "shipped_words" / "__init__.py").write_text("WORD = 'installed'\n")
    setup = folder / "setup.py"
    setup.write_text(
        "from setuptools import setup\n"
        f"setup(name={name!r}, version={version!r}, packages=['shipped_words'], install_requires=['numpy'])\n"
    )
    return str(setup)


def unpacked(files: dict[str, str], copy: Path) -> str:
    (copy / packages.PACKAGES).mkdir(parents=True)
    for name, path in files.items():
        shutil.copy(path, copy / name)
    return str(copy)


def test_requirements_are_sent_with_those_that_they_include(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "requirements.in").write_text("numpy>=1\n-r more/tests.txt\n--requirement=more/tests.txt\npandas\n")
    (tmp_path / "more" / "tests.txt").write_text("pytest  # to test\n")
    files = packages.collect(str(tmp_path / "more"), requirements_file=str(tmp_path / "requirements.in"))
    [(name, path)] = files.items()
    assert name == "packages/requirements.txt"
    assert Path(path).read_text() == "numpy>=1\npytest  # to test\npytest  # to test\npandas\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"setup_file": "none/setup.py"}, "--setup_file=none/setup.py: expected a file on this machine"),
        ({"setup_file": "pyproject.toml"}, "ends in setup.py"),
        ({"requirements_file": "loop.txt"}, "includes itself"),
        ({"requirements_file": "lost.txt"}, "gone.txt, which is missing"),
        ({"extra_packages": ["loop.txt"]}, "ends in .whl or .tar.gz"),
        ({"extra_packages": ["a/p.whl", "b/p.whl"]}, "two files of the same name"),
    ],
)
def test_a_mistake_is_found_before_anything_is_sent(
    options: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").touch()
    Path("loop.txt").write_text("-rloop.txt\n")
    Path("lost.txt").write_text("-r gone.txt\n")
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "p.whl").touch()
    with pytest.raises(OptionError, match=words):
        packages.collect(str(tmp_path), **options)  # type: ignore[arg-type]


def test_nothing_is_installed_for_a_run_without_packages(tmp_path: Path) -> None:
    assert packages.install(str(tmp_path), str(tmp_path / "new")) == ""
    assert not (tmp_path / "new").exists()


@pytest.mark.alone
def test_a_node_gets_a_package_of_the_run_and_keeps_its_own(tmp_path: Path) -> None:
    setup = write_package(tmp_path / "source", "shipped-words", "1.0")
    before = sorted(path.name for path in (tmp_path / "source").iterdir())
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    files = packages.collect(str(scratch), setup)
    assert sorted(path.name for path in (tmp_path / "source").iterdir()) == before
    folder = packages.install(unpacked(files, tmp_path / "copy"), str(tmp_path / "new"))
    assert not list(Path(folder).glob("numpy*"))  # the node has it
    question = f"import sys; sys.path.insert(0, {folder!r}); import numpy, shipped_words; print(shipped_words.WORD)"
    assert subprocess.check_output([sys.executable, "-c", question], text=True, timeout=60) == "installed\n"


def test_a_package_that_workers_have_imported_is_not_replaced(tmp_path: Path) -> None:
    for name in ("pyarrow", "shipped-words"):
        (tmp_path / f"{name}-0.0.1.dist-info").mkdir()
        (tmp_path / f"{name}-0.0.1.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 0.0.1\n")
    with pytest.raises(WorkerStartFailed, match=r"along pyarrow 0.0.1 \(the node has [\d.]+\), which"):
        packages._refuse_replaced(str(tmp_path))  # pyright: ignore[reportPrivateUsage]


@pytest.mark.alone
def test_what_pip_says_is_in_the_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken-1.0-py3-none-any.whl"
    broken.write_bytes(b"no archive")
    copy = unpacked(packages.collect(str(tmp_path), extra_packages=[str(broken)]), tmp_path / "copy")
    with pytest.raises(WorkerStartFailed, match=r"broken-1\.0"):
        packages.install(copy, str(tmp_path / "new"))
