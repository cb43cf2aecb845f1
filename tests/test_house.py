"""Tests of the layout of the source: the map names every folder, and imports are seen by the contracts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import luminosity
from luminosity.drift.online.detect_drift import Stream
from luminosity.drift.online.detector import OnlineMMD
from luminosity.engine.durable.tables import VERSION
from luminosity.io.kafka.progress import PartitionGroup, Span

_SOURCE = Path(luminosity.__file__).parent
_ROOT = Path(__file__).parent.parent
_MAP_LINE = re.compile(r"(?P<indent> +)(?P<folder>[\w/]+)/ +(?P<words>.*)")
_BY_STRING = {"import_module", "__import__"}
_EXCEPTED = {
    "cli/main.py": "a command is imported when it is asked for, by its name",
    "engine/workers/forkserver.py": "imports ahead what steps in workers will import, and uses nothing of it",
    "inference/model_names.py": "finds the handler that a command line names",
}


def _folders() -> list[str]:
    """Return all packages, as paths below ``luminosity``."""
    found = sorted(each.parent.relative_to(_SOURCE).as_posix() for each in _SOURCE.rglob("__init__.py"))
    return [each for each in found if each != "."]


def _mapped() -> set[str]:
    """Return the folders of the map: those with a line, and those that the words of a line name with a slash."""
    text = (_ROOT / "docs" / "architecture.md").read_text()
    block = text.partition("```text\nluminosity/\n")[2].partition("```")[0]
    found: set[str] = set()
    path: list[str] = []
    for line in block.splitlines():
        match = _MAP_LINE.fullmatch(line)
        if match is not None:
            path[len(match["indent"]) // 2 - 1 :] = [match["folder"]]
            here = "/".join(path)
            found |= {here, *(f"{here}/{name}" for name in re.findall(r"([\w/]+)/(?=\W|$)", match["words"]))}
    return found


def test_the_map_names_every_folder() -> None:
    folders = {each for each in _folders() if not each.startswith("cli/")}  # each of those is the command of its name
    assert folders - _mapped() == set(), "add these folders to the map in docs/architecture.md"


def test_the_map_names_only_folders() -> None:
    assert {each for each in _mapped() if not (_SOURCE / each).is_dir()} == set()


def _imports_by_string(path: Path) -> Iterator[str]:
    """Yield our modules that a file names in strings, if it imports by string at all."""
    tree = ast.parse(path.read_text())
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    if not _BY_STRING & {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in called}:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = re.match(r"luminosity(\.\w+)+\.?", node.value)
            if name is not None:
                yield name[0]


def test_modules_of_ours_are_not_imported_by_string() -> None:
    """No contract sees such an import. Only the lazy faces of packages, their ``__init__.py``, need it."""
    files = [path for path in sorted(_SOURCE.rglob("*.py")) if path.name != "__init__.py"]
    found = {path.relative_to(_SOURCE).as_posix(): list(_imports_by_string(path)) for path in files}
    assert {path: names for path, names in found.items() if names and path not in _EXCEPTED} == {}


def test_classes_in_checkpoints_stay_where_they_are() -> None:
    """Checkpoints hold pickles of these. Moving one needs a new ``VERSION`` in ``engine/durable/tables.py``."""
    assert VERSION == 3
    for kept in (Span, PartitionGroup):
        assert kept.__module__ == "luminosity.io.kafka.progress"
    assert Stream.__module__ == "luminosity.drift.online.detect_drift"
    assert OnlineMMD.__module__ == "luminosity.drift.online.detector"
