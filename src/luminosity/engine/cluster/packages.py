"""Packages that a run brings along: ``--setup_file``, ``--requirements_file`` and ``--extra_package``.

The driver collects them, and the node agent installs them once per node. They go into a folder of the run: a virtual
environment that also sees what the node has, so that pip installs only what is missing there and changes nothing else.
Ray's own way copies the whole environment of the node instead if that is a virtual environment.
"""

from __future__ import annotations

import glob
import importlib.metadata
import os
import re
import socket
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from luminosity.errors import OptionError, WorkerStartFailed

__all__ = ["INSTALL_TIMEOUT_S", "PACKAGES", "collect", "install"]

PACKAGES = "packages"  # the folder of the sent copy
_REQUIREMENTS = "requirements.txt"
_BUILD_TIMEOUT_S = 600.0  # a package with compiled parts takes minutes
INSTALL_TIMEOUT_S = 1800.0  # large libraries over a slow network
_LAST_LINES = 20  # of pip's output in an error
_ARCHIVES = (".whl", ".tar.gz", ".zip", ".tar")
_INCLUDED = re.compile(r"(?:-r|--requirement)(?:\s+|=|(?<=-r))(?P<path>\S+)")
_NOT_REPLACED = ("luminosity", "apache-beam", "ray")


def collect(
    scratch: str,
    setup_file: str | None = None,
    requirements_file: str | None = None,
    extra_packages: Sequence[str] = (),
) -> dict[str, str]:
    """Return the files to send, by their path in the sent copy; builds the package of ``setup_file`` in ``scratch``.

    Raises :class:`OptionError` if a file is missing, and if the package can't be built.
    """
    files = [_checked("--extra_package", path, _ARCHIVES) for path in extra_packages]
    if setup_file is not None:
        files.append(_build(_checked("--setup_file", setup_file, ("setup.py",)), scratch))
    found = {f"{PACKAGES}/{os.path.basename(path)}": path for path in files}
    if len(found) < len(files):
        names = ", ".join(map(os.path.basename, files))
        raise OptionError(f"--extra_package: found two files of the same name, expected different ones: {names}")
    if requirements_file is not None:
        path = os.path.join(scratch, _REQUIREMENTS)
        with open(path, "w") as file:
            file.writelines(f"{line}\n" for line in _lines(_checked("--requirements_file", requirements_file), ()))
        found[f"{PACKAGES}/{_REQUIREMENTS}"] = path
    return found


def install(copy: str, into: str) -> str:
    """Install the packages of the sent copy in a new folder ``into``, and return the folder to import them from.

    Returns an empty string if there are none. Raises :class:`WorkerStartFailed` if pip fails, and if a package would
    replace one that the worker itself needs.
    """
    requirements = os.path.join(copy, PACKAGES, _REQUIREMENTS)
    archives = [path for path in sorted(glob.glob(os.path.join(copy, PACKAGES, "*"))) if path.endswith(_ARCHIVES)]
    wanted = [*archives, *(["-r", requirements] if os.path.exists(requirements) else [])]
    if not wanted:
        return ""
    venv.create(into, with_pip=False, symlinks=True)
    folder = sysconfig.get_path("purelib", "venv", {"base": into, "platbase": into})
    with open(os.path.join(folder, "node.pth"), "w") as file:  # Python runs its lines when it starts
        libraries = [each for each in sys.path if os.path.basename(each) in ("site-packages", "dist-packages")]
        file.write("import site; " + "; ".join(f"site.addsitedir({each!r})" for each in libraries) + "\n")
    pip = [os.path.join(into, "bin", "python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    # The node may have an older package of the same version, which would satisfy pip.
    if known := [path for path in archives if _may_be_installed(path)]:
        _run_pip([*pip, "--force-reinstall", "--no-deps", *known])
    _run_pip([*pip, *wanted])
    _refuse_replaced(folder)
    return folder


def _checked(option: str, path: str, endings: tuple[str, ...] = ()) -> str:
    if not os.path.isfile(path):
        raise OptionError(f"{option}={path}: expected a file on this machine, found none")
    if endings and not path.endswith(endings):
        raise OptionError(f"{option}={path}: expected a file whose name ends in {' or '.join(endings)}")
    return os.path.abspath(path)


def _build(setup_file: str, scratch: str) -> str:
    """Build a wheel, which needs no tools on the nodes. Nothing is written into the package's folder."""
    built = os.path.join(scratch, "built")
    os.mkdir(built)
    command = [sys.executable, setup_file, "-q", "build", f"--build-base={scratch}/build"]
    command += ["egg_info", f"--egg-base={built}", "bdist_wheel", f"--bdist-dir={scratch}/wheel", f"--dist-dir={built}"]
    try:
        done = _run(command, _BUILD_TIMEOUT_S, cwd=os.path.dirname(setup_file))
    except subprocess.TimeoutExpired as error:
        raise OptionError(f"--setup_file={setup_file}: no package after {_BUILD_TIMEOUT_S:.0f} s") from error
    wheels = glob.glob(os.path.join(built, "*.whl"))
    if done.returncode or len(wheels) != 1:
        raise OptionError(
            f"--setup_file={setup_file}: found no package that can be built:\n{_last(done.stdout)}",
            fix="see if `python setup.py bdist_wheel` works there; it needs setuptools 70.1 or newer",
        )
    return wheels[0]


def _lines(path: str, above: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of a requirements file and, in their place, of those that it includes."""
    if path in above:
        raise OptionError(f"--requirements_file={above[0]}: {path} includes itself")
    with open(path) as file:
        for line in file.read().splitlines():
            if (included := _INCLUDED.match(line.strip())) is None:
                yield line
                continue
            inner = os.path.join(os.path.dirname(path), included["path"])
            if not os.path.isfile(inner):
                raise OptionError(f"--requirements_file={path}: it includes {inner}, which is missing")
            yield from _lines(os.path.abspath(inner), (*above, path))


def _run(command: list[str], seconds: float, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command, with what it prints in one text. Raises ``TimeoutExpired`` if it takes too long."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=seconds,
        **more,
    )


def _run_pip(command: list[str]) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = _run(command, INSTALL_TIMEOUT_S, env=variables)
    except subprocess.TimeoutExpired as error:
        raise WorkerStartFailed(f"pip on {socket.gethostname()} took over {INSTALL_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise WorkerStartFailed(
            f"the packages of this run can't be installed on {socket.gethostname()}:\n{_last(done.stdout)}",
            fix="check --requirements_file, --setup_file and --extra_package, and that the node reaches the package "
            "index; or install the packages on the nodes, and leave the options out",
        )


def _may_be_installed(archive: str) -> bool:
    try:
        importlib.metadata.distribution(parse_wheel_filename(os.path.basename(archive))[0])
    except importlib.metadata.PackageNotFoundError:
        return False
    except InvalidWheelFilename:
        return True  # a source archive; its name says little
    return True


def _refuse_replaced(folder: str) -> None:
    """Refuse other versions of packages that this worker has imported already."""
    found = importlib.metadata.distributions(path=[folder])
    new = {str(canonicalize_name(each.name)): each.version for each in found}
    kept = {name: version for name, version in _needed(_NOT_REPLACED) if new.get(name, version) != version}
    if kept:
        changes = ", ".join(f"{name} {new[name]} (the node has {version})" for name, version in kept.items())
        raise WorkerStartFailed(
            f"the packages of this run bring along {changes}, which workers on {socket.gethostname()} have imported "
            "before",
            fix="install these versions on the nodes, or allow those that the nodes have",
        )


def _needed(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield installed packages and what they need, each with its version."""
    waiting, seen = list(names), set[str]()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        yield name, found.version
        for line in found.requires or ():
            try:
                requirement = Requirement(line)
            except InvalidRequirement:
                continue
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)


def _last(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-_LAST_LINES:])
