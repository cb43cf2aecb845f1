"""Imports optional libraries where they are used."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from luminosity._notebook import is_in_ipython
from luminosity.errors import MissingExtra

__all__ = ["check", "check_notebook", "require"]

_PANDAS_TOO_NEW = 3  # the first major version without methods that Beam's data frames name


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


def check_notebook() -> None:
    """Raise an error if this is a notebook in which Beam can't build a pipeline for lack of a pandas that it can use.

    In IPython, Beam imports its interactive classes at the first ``|``, and these need pandas.
    """
    if not is_in_ipython():
        return
    fix = "run pip install 'pandas<2.4', and restart the kernel"
    try:
        importlib.import_module("apache_beam.runners.interactive.interactive_environment")
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        raise MissingExtra("pandas is not installed, but Beam needs it in notebooks", fix=fix, name="pandas") from error
    except (AttributeError, ImportError) as error:
        from importlib import metadata

        found = metadata.version("pandas")
        if int(found.partition(".")[0]) < _PANDAS_TOO_NEW:
            raise
        why = f"found pandas {found}, expected a version below 2.4, which Beam needs in notebooks ({error})"
        raise MissingExtra(why, fix=fix, name="pandas") from error


def _missing(library: str, extra: str, name: str) -> MissingExtra:
    fix = f"install it with: pip install 'luminosity[{extra}]'"
    return MissingExtra(f"{library} is not installed", fix=fix, name=name)
