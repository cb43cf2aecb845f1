"""Packages that import their public names when these are first used, so that they themselves are quick to import.

A package lists its names in two places, both of which type checkers and editors read: the imports under
``if TYPE_CHECKING:`` in its ``__init__.py``, and ``__all__``. At run time, the same imports tell where a name lives.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package; nothing is imported before a name is used.

    >>> import luminosity.drift
    >>> get, _ = lazy_names("luminosity.drift")
    >>> get("mmd2") is luminosity.drift.mmd2
    True
    >>> get("mmd3")
    Traceback (most recent call last):
    AttributeError: module 'luminosity.drift' has no attribute 'mmd3'
    """

    def get(name: str) -> Any:
        if name.startswith("__") or name not in _homes(package):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_homes(package)[name]), name)

    return get, lambda: sys.modules[package].__all__


@functools.cache
def _homes(package: str) -> Mapping[str, str]:
    """Return the modules of the names that the ``if TYPE_CHECKING:`` of a package imports."""
    import ast  # here, because some commands and processes use no public name
    import pkgutil

    body = ast.parse(pkgutil.get_data(package, "__init__.py") or b"").body
    blocks = [node.body for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    return {each.name: node.module or package for node in imports for each in node.names}
