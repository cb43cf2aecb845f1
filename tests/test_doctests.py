"""The examples in docstrings say what is true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import luminosity

MODULES = [
    "luminosity",
    *(module.name for module in pkgutil.walk_packages(luminosity.__path__, "luminosity.")),
]


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_doctests(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)

    assert results.failed == 0
