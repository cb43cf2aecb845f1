"""Imports optional libraries where they are used."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from luminosity._shared.notebook import is_in_ipython
from luminosity.errors import MissingExtra

__all__ = ["check", "check_notebook", "install_command", "require"]

_OURS = "luminosity"

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
    fix = f"install the extra {extra} of luminosity: {install_command(extra)}"
    return MissingExtra(f"{library} is not installed", fix=fix, name=name)


def install_command(extra: str) -> str:
    """Return the command that installs an extra, however luminosity itself was installed: from a checkout or a wheel.

    It names what the extra consists of: luminosity itself need not be on a package index.

    >>> install_command("kafka")
    "pip install 'confluent-kafka>=2.6'"
    """
    found = list(dict.fromkeys(_requirements(extra)))
    if not found:  # its metadata are not there, as in a copy of the source folder
        return f"pip install '.[{extra}]' in the checkout of luminosity"
    return f"pip install {' '.join(repr(each) for each in found)}"


def _requirements(extra: str) -> list[str]:
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        declared = [Requirement(text) for text in metadata.requires(_OURS) or ()]
    except metadata.PackageNotFoundError:
        return []
    found: list[str] = []
    for each in declared:
        if each.marker is None or not each.marker.evaluate({"extra": extra}) or each.marker.evaluate({"extra": ""}):
            continue  # not of this extra, or of every installation
        if each.name == _OURS:
            found += [text for inner in sorted(each.extras) for text in _requirements(inner)]
        else:
            inner = f"[{','.join(sorted(each.extras))}]" if each.extras else ""
            found.append(f"{each.name}{inner}{each.specifier}")
    return found
