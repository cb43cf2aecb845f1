"""Sends the user's code and files to the nodes of a cluster, and checks what is installed there.

The driver packs a copy of the working folder, of the user's own modules and of packages to install into one archive,
which Ray unpacks once on each node. Luminosity and Beam are not sent: the nodes have them installed.

The copy has this layout. Nothing in it can be imported before :func:`shipped` is called, so that a file of the user's
with the name of a library does not disturb Ray itself:

    work/           the working folder
    modules/N/      modules that the driver has imported from elsewhere
    packages/       packages and requirements to install: see ``packages.py``
    luminosity-shipped.json    where workers look for modules
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import socket
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from luminosity.engine.cluster import packages
from luminosity.engine.cluster.working_folder import WORK, choose
from luminosity.model_sizes import SENT_FOLDER_VARIABLE

__all__ = ["Shipped", "check_versions", "runtime_env", "shipped", "versions"]

_LOGGER = logging.getLogger(__name__)

_ARCHIVE = "shipped.zip"
_CONTENTS = "luminosity-shipped.json"
_LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the same files make the same archive, which a node that has it does not fetch again
_SAME_EVERYWHERE = ("luminosity", "apache-beam")


def runtime_env(
    scratch: str,
    *,
    working_folder: str | None = None,
    setup_file: str | None = None,
    requirements_file: str | None = None,
    extra_packages: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the argument ``runtime_env`` of ``ray.init``, with which each node gets the code and files of this run.

    Args:
        scratch: a folder for the archive; remove it when ``ray.init`` has returned.
        working_folder: the folder to send; None for the current one.
        setup_file: Beam's ``--setup_file``.
        requirements_file: Beam's ``--requirements_file``.
        extra_packages: Beam's ``--extra_package``.
    """
    choice = choose(working_folder or os.getcwd())
    for warning in choice.warnings:
        _LOGGER.warning("%s", warning)
    files = choice.files | packages.collect(scratch, setup_file, requirements_file, extra_packages)
    archive = os.path.join(scratch, _ARCHIVE)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, path in sorted(files.items()):
            _add(file, name, path)
        contents = {"import_path": choice.import_path, "working_folder": os.path.abspath(working_folder or os.getcwd())}
        file.writestr(zipfile.ZipInfo(_CONTENTS, _LONG_AGO), json.dumps(contents))
    return {"working_dir": archive, "env_vars": _variables()}


def _add(file: zipfile.ZipFile, name: str, path: str) -> None:
    entry = zipfile.ZipInfo(name, _LONG_AGO)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = (os.stat(path).st_mode & 0o777) << 16
    with open(path, "rb") as source:
        file.writestr(entry, source.read())


def _variables() -> dict[str, str]:
    """Return the variables for Ray's processes: the import path, for nodes that see the same disk as this machine."""
    path = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, path.split(os.pathsep))))} if path else {}


@dataclass(frozen=True)
class Shipped:
    """The sent copy on this node, for a worker."""

    working_folder: str
    import_path: list[str]  # the whole ``sys.path``


def shipped(installed: Sequence[str] = ()) -> Shipped:
    """Return where the sent copy is on this node. Call it in an actor before anything changes its working folder.

    ``installed`` are folders of packages that the node agent has installed. If nothing was sent, the worker stays where
    it is. Sets the variable in the environment that leads models to the copy.
    """
    root = os.getcwd()
    try:
        with open(os.path.join(root, _CONTENTS)) as file:
            contents: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return Shipped(root, list(dict.fromkeys([*installed, *sys.path])))
    work = os.path.join(root, WORK)
    os.makedirs(work, exist_ok=True)  # It is not in the archive if it is empty.
    os.environ[SENT_FOLDER_VARIABLE] = json.dumps([contents["working_folder"], work])
    folders = [os.path.join(root, each) for each in contents["import_path"]]
    return Shipped(work, list(dict.fromkeys([*folders, *installed, *sys.path])))


def versions() -> dict[str, str]:
    """Return the versions of this process that all nodes must have."""
    found = {name: importlib.metadata.version(name) for name in _SAME_EVERYWHERE}
    return {"Python": ".".join(platform.python_version_tuple()[:2]), **found}


def check_versions(expected: Mapping[str, str]) -> str:
    """Return how this process differs from the driver, whose :func:`versions` are given. Empty if it does not."""
    found = versions()
    wrong = [
        f"{name} {found.get(name, 'missing')} (expected {version})"
        for name, version in expected.items()
        if found.get(name) != version
    ]
    if not wrong:
        return ""
    return f"node {socket.gethostname()} has {', '.join(wrong)}; install the driver's versions on all nodes"
