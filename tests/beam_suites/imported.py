"""Take over test classes from Beam's wheel."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import unittest
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import apache_beam
import pytest
from apache_beam.options.pipeline_options import StandardOptions
from apache_beam.testing import test_pipeline

from luminosity.engine.loop import sizing, splits
from luminosity.runner_options import LuminosityOptions
from tests.runners import IS_CLUSTER, RUNNER_NAME, ray_address


def beam_modules_containing(text: str) -> list[str]:
    """The names of the test modules in Beam's wheel whose source contains `text`."""
    root = Path(apache_beam.__file__).parent
    files = (file for file in sorted(root.rglob("*_test.py")) if text in file.read_text(encoding="utf-8"))
    return [".".join(("apache_beam", *file.relative_to(root).with_suffix("").parts)) for file in files]


def imported(name: str) -> ModuleType:
    """The module of Beam's, without the changes to logging that some make when they are imported."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    module = import_module(name)
    root.setLevel(level)
    root.handlers[:] = handlers
    return module


def taken_over(
    module: ModuleType,
    wanted: Callable[[type[unittest.TestCase], str], bool],
    left_out: Mapping[str, str],
    overrides: Mapping[str, Any] | None = None,
    slow: Collection[str] = (),
) -> dict[str, type[unittest.TestCase]]:
    """Subclasses of the test classes of `module` that hold the wanted tests alone, by name.

    Tests in `left_out` (``Class.test`` or ``Class`` to the reason) are skipped. `overrides` replaces
    attributes that a class has. Those in `slow` (``Class.test``) get that mark.
    """
    classes: dict[str, type[unittest.TestCase]] = {}
    for base in _test_classes(module):
        tests = names_of_tests(base)
        kept = [test for test in tests if wanted(base, test)]
        if not kept:
            continue
        # pytest takes no test from an attribute that can't be called.
        members: dict[str, Any] = {test: None for test in tests if test not in kept}
        members |= {name: value for name, value in (overrides or {}).items() if hasattr(base, name)}
        for test in kept:
            reason = left_out.get(f"{base.__name__}.{test}") or left_out.get(base.__name__)
            if reason:
                members[test] = unittest.skip(reason)(getattr(base, test))
            elif f"{base.__name__}.{test}" in slow:
                members[test] = pytest.mark.slow(_copied(getattr(base, test)))
        name = f"{module.__name__.rpartition('.')[2]}_{base.__name__}"
        classes[name] = type(name, (base,), members)
    return classes


def _copied(test: Callable[..., Any]) -> Callable[..., Any]:
    """A function of its own: marks stay on it, and several modules take over the same one."""

    @functools.wraps(test)
    def copy(*arguments: Any) -> Any:
        return test(*arguments)

    return copy


@contextlib.contextmanager
def beam_test_pipelines_with(options: str) -> Iterator[None]:
    """Within the context, Beam's `TestPipeline` takes these options unless told otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_pipeline.TestPipeline, "pytest_test_pipeline_options", options)
        yield


def keep_bundles_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split no bundle: where a split cuts a batch, and whether there is one, depends on the machine's pace."""
    monkeypatch.setattr(splits, "_FIRST_TAKE_S", 3600.0)
    monkeypatch.setattr(sizing, "_SHORTEST_DEADLINE_S", 3600.0)


def names_of_tests(test_class: type[unittest.TestCase]) -> list[str]:
    return list(unittest.defaultTestLoader.getTestCaseNames(test_class))


def _test_classes(module: ModuleType) -> list[type[unittest.TestCase]]:
    own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    return [value for value in own if isinstance(value, type) and issubclass(value, unittest.TestCase)]


def run_on_our_runner(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, in_debug_mode: Collection[str]
) -> None:
    """Let pipelines that tests make with options of their own, which the suite's don't reach, run here.

    Steps that append to a list of the caller need to run in its process: those of ``in_debug_mode``, parts of the names
    of classes, and those of tests that mention ``all_records``.
    """
    monkeypatch.setattr(StandardOptions, "DEFAULT_RUNNER", RUNNER_NAME)
    monkeypatch.setitem(LuminosityOptions.defaults, "progress", "off")
    monkeypatch.setitem(LuminosityOptions.defaults, "cpu_workers", "2")
    test_class = request.node.getparent(pytest.Class)
    if test_class is not None and (
        any(name in test_class.name for name in in_debug_mode)
        or "all_records" in inspect.getsource(request.node.function)
    ):
        monkeypatch.setitem(LuminosityOptions.defaults, "debug", True)
    elif IS_CLUSTER:
        monkeypatch.setitem(LuminosityOptions.defaults, "ray_address", ray_address())
