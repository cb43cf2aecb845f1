"""Imports optional libraries where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from luminosity.errors import MissingExtra

__all__ = ["require"]


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
        raise MissingExtra(
            f"{library} is not installed", fix=f"install it with: pip install 'luminosity[{extra}]'", name=error.name
        ) from None
