"""Imports optional libraries where they are used."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from luminosity.errors import MissingExtra

__all__ = ["check", "require"]


def require(module: str, extra: str) -> Any:
    """Import and return a module, or raise an error that says how to install it.

    >>> require("json", "torch").dumps(1)
    '1'
    """
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != library:
            raise  # The library is installed; one of its own dependencies is missing.
        raise _missing(library, extra, error.name) from None


def check(module: str, extra: str) -> None:
    """Raise an error that says how to install a module if it is not there. Import nothing.

    >>> check("json", "torch")
    """
    if importlib.util.find_spec(module) is None:
        raise _missing(module, extra, module)


def _missing(library: str, extra: str, name: str) -> MissingExtra:
    fix = f"install it with: pip install 'luminosity[{extra}]'"
    return MissingExtra(f"{library} is not installed", fix=fix, name=name)
