"""Heavy libraries, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from luminosity.errors import MissingExtra

__all__ = ["require"]


def require(module: str, extra: str) -> Any:
    """The module, or an error that says how to install it.

    >>> require("json", "torch").dumps(1)
    '1'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # It is there, and something that it needs is not.
        raise MissingExtra(
            f"{module.partition('.')[0]} is not installed. Install it with: pip install 'luminosity[{extra}]'",
            name=error.name,
        ) from None
