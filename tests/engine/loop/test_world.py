"""The loop takes time, threads and chance from what it is given, so that a simulation can give others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import luminosity.engine

_ENGINE = Path(luminosity.engine.__file__ or "").parent
_FOLDERS = ("loop", "data", "spill", "durable")
_BEFORE_A_RUN = _ENGINE / "durable" / "copies" / "fetching.py"  # reads a copy with several threads before a run begins
_SOURCE = _ENGINE / "data" / "world.py"  # the one module that may ask the machine
_FORBIDDEN = {
    "time": {"clock", "monotonic", "monotonic_ns", "perf_counter", "process_time", "sleep", "thread_time", "time"},
    "threading": {"Thread", "Timer"},
    "random": {"*"},
    "secrets": {"*"},
    "uuid": {"*"},
    "datetime": {"*"},
    "asyncio": {"*"},
    "concurrent": {"*"},
    "multiprocessing": {"*"},
}
_FORBIDDEN["time"] |= {f"{name}_ns" for name in ("time", "perf_counter", "process_time", "thread_time")}
_SEEDED = "random.Random(0)"  # the same in every run


def _asked(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield what a module uses of the modules that ask the machine, with the lines."""
    seeded = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node) == _SEEDED}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [(node.module.partition(".")[0], alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [(alias.name, alias.asname) for alias in node.names if alias.asname not in (None, alias.name)]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and id(node) not in seeded:
            names = [(node.value.id, node.attr)]
        else:
            continue
        for module, name in names:
            if {name, "*"} & _FORBIDDEN.get(module, set()):
                yield node.lineno, f"{module}.{name}"


def test_the_loop_asks_only_its_world_for_time_threads_and_chance() -> None:
    found = [
        f"{path.relative_to(_ENGINE)}:{line} {name}"
        for folder in _FOLDERS
        for path in sorted((_ENGINE / folder).rglob("*.py"))
        if path not in (_SOURCE, _BEFORE_A_RUN)
        for line, name in _asked(ast.parse(path.read_text()))
    ]
    assert not found, "take these from engine/data/world.py"


@pytest.mark.parametrize(
    "source",
    [
        "time.monotonic()",
        "now = time.time",
        "from time import sleep",
        "import random as chance",
        "random.Random()",
        "random.shuffle(queue)",
        "uuid.uuid4()",
        "threading.Thread(target=run)",
        "from concurrent.futures import ThreadPoolExecutor",
    ],
)
def test_what_asks_the_machine_is_found(source: str) -> None:
    assert list(_asked(ast.parse(source)))


def test_locks_dates_and_seeded_chance_are_no_surprises() -> None:
    assert not list(_asked(ast.parse("threading.Lock(); time.strftime('%Y'); random.Random(0).random()")))
