"""Python environments of steps: found, asked for their versions, and refused if a worker can't run there.

A worker of a step with the hint ``python_environment`` is started with that environment's interpreter. It imports the
user's own modules from where this process does, and libraries from its environment alone.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from luminosity.errors import UnsupportedPipeline

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = ["PythonEnvironment", "check_environments", "environment_name", "folder_of", "is_this_python", "python_of"]

_ANSWER_TIMEOUT_S = 60.0  # an interpreter on a slow network disk, on a busy machine
_US = "luminosity"
_BEAM = "apache-beam"
# Variables that would let the other interpreter take this one's libraries.
_NOT_PASSED_ON = ("PYTHONHOME", "PYTHONPATH")
_COMMON_NAMES = ("venv", ".venv", "env", ".env")  # of environments: the folder above tells more

# Runs in the other interpreter, which may be too old for this package: plain Python 3, no imports of ours.
_QUESTION = """
import json, sys
before, after, names = json.load(sys.stdin)
own = [each for each in sys.path if each]
sys.path[:] = before + own + after
found = {}
can_import = False
try:
    import importlib.metadata, importlib.util
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    can_import = importlib.util.find_spec("luminosity") is not None
except ImportError:
    pass
print(json.dumps({"python": list(sys.version_info[:2]), "prefix": sys.prefix, "path": own, "versions": found,
                  "can_import": can_import}))
"""


@dataclass(frozen=True)
class PythonEnvironment:
    """An environment in which workers can run."""

    name: str  # short, for the names of pools
    prefix: str  # its folder
    python: str  # its interpreter
    import_path: tuple[str, ...]  # of its workers: the user's modules, and the environment's own libraries

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a process with its tools first, as if the environment had been activated."""
        kept = {name: value for name, value in environment.items() if name not in _NOT_PASSED_ON}
        tools = os.path.dirname(self.python)
        return {**kept, "VIRTUAL_ENV": self.prefix, "PATH": os.pathsep.join([tools, kept.get("PATH", os.defpath)])}


def folder_of(path: str) -> str:
    """Return the folder of the virtual environment whose interpreter ``path`` is; otherwise ``path`` itself."""
    above = os.path.dirname(os.path.dirname(path))
    return above if os.path.isfile(path) and os.path.exists(os.path.join(above, "pyvenv.cfg")) else path


def python_of(path: str) -> str:
    """Return the interpreter of an environment: that of a virtual environment's folder, or ``path`` itself."""
    return os.path.join(path, "bin", "python") if os.path.isdir(path) else path


def is_this_python(path: str) -> bool:
    """Return whether ``path`` is the environment of this process, so that a step needs no other."""
    folder = path if os.path.isdir(path) else os.path.dirname(os.path.dirname(path))
    return os.path.realpath(folder) == os.path.realpath(sys.prefix)


def environment_name(path: str, others: Iterable[str] = ()) -> str:
    """Return a short name of an environment that none of the ``others`` has.

    >>> environment_name("/envs/old"), environment_name("/home/me/prices/.venv")
    ('old', 'prices/.venv')
    >>> environment_name("/a/old", ["/b/old"])
    '/a/old'
    """
    short = _short(path)
    return path if any(other != path and _short(other) == short for other in others) else short


def _short(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(os.path.basename(folder), name) if name in _COMMON_NAMES else name


def check_environments(wanted: Iterable[tuple[str, str]]) -> dict[str, PythonEnvironment]:
    """Return the environments by their paths, given pairs of a step's name and a path; an empty path is no wish.

    Asks each interpreter for its versions, which takes some tenths of a second. Raises :class:`UnsupportedPipeline` if
    workers can't run in one of them.
    """
    steps: dict[str, str] = {}
    for step, path in wanted:
        if path:
            steps.setdefault(path, step)
    found: dict[str, PythonEnvironment] = {}
    problems: list[str] = []
    fixes: list[str] = []
    before, after = _paths_of_user()
    for path, step in steps.items():
        try:
            answer = _ask(path, before, after)
            if differences := list(_differences(answer)):
                fixes.append(_remedy(path, answer))
                raise UnsupportedPipeline("; ".join(differences))
        except UnsupportedPipeline as error:
            problems.append(f"step {step!r} can't run in the Python environment {path}: {error.message}")
            continue
        import_path = (*before, *answer["path"], *after)
        found[path] = PythonEnvironment(
            environment_name(path, steps), str(answer["prefix"]), python_of(path), import_path
        )
    if problems:
        raise UnsupportedPipeline("\n".join(problems), fix="; ".join(fixes) or None)
    return found


def _ask(path: str, before: list[str], after: list[str]) -> dict[str, Any]:
    """Return the versions and the import path of an interpreter."""
    python = python_of(path)
    expected = "expected the folder of a virtual environment, or a Python executable"
    if not os.path.exists(python):
        what = f"found no {python}" if os.path.isdir(path) else "found nothing there"
        raise UnsupportedPipeline(f"{what}, {expected}")
    variables = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    names = [_US, _BEAM, *(each.name for each in _requirements())]
    question = json.dumps([[each for each in before if each], after, names])
    try:
        done = subprocess.run(
            [python, "-c", _QUESTION],
            input=question,
            capture_output=True,
            text=True,
            timeout=_ANSWER_TIMEOUT_S,
            env=variables,
        )
    except OSError as error:
        raise UnsupportedPipeline(f"{python} does not start: {error.strerror or error}; {expected}") from error
    except subprocess.TimeoutExpired as error:
        raise UnsupportedPipeline(f"{python} did not answer within {_ANSWER_TIMEOUT_S:g} s") from error
    lines = done.stdout.strip().splitlines()
    try:
        return json.loads(lines[-1])  # a site module may print before it
    except (IndexError, ValueError) as error:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise UnsupportedPipeline(f"{python} says: {last}; {expected}") from error


def _differences(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield what keeps workers from running there: found and expected."""
    found = ".".join(map(str, answer["python"]))
    if answer["python"] != list(sys.version_info[:2]):
        yield f"found Python {found}, expected {_python()}, since functions are sent as byte code"
    versions: dict[str, str] = answer["versions"]
    beam = versions.get(_BEAM)
    if beam is None or _minor(beam) != _minor(importlib.metadata.version(_BEAM)):
        yield f"found {_named(_BEAM, beam)}, expected {_minor(importlib.metadata.version(_BEAM))}.*"
    ours = versions.get(_US) if answer["can_import"] else None
    if ours != importlib.metadata.version(_US):
        yield f"found {_named(_US, ours)}, expected {importlib.metadata.version(_US)}"
        return
    for each in _requirements():
        version = versions.get(each.name)
        if each.name != _BEAM and (version is None or not each.specifier.contains(version, prereleases=True)):
            yield f"found {_named(each.name, version)}, expected {each.name}{each.specifier}"


def _remedy(path: str, answer: Mapping[str, Any]) -> str:
    if answer["python"] != list(sys.version_info[:2]):
        return f"make {path} anew with Python {_python()}"
    beam = _minor(importlib.metadata.version(_BEAM))
    return f"{python_of(path)} -m pip install 'apache-beam=={beam}.*' {_install_us()}"


def _install_us() -> str:
    """Return what pip installs this version of ours from: its source folder, or the package index."""
    distribution = importlib.metadata.distribution(_US)
    origin = json.loads(distribution.read_text("direct_url.json") or "{}").get("url", "")
    return origin.removeprefix("file://") if origin.startswith("file://") else f"'{_US}=={distribution.version}'"


def _requirements() -> list[Requirement]:
    """Return what Luminosity itself requires, without its extras."""
    from packaging.requirements import Requirement  # here, because few pipelines have other environments

    parsed = [Requirement(each) for each in importlib.metadata.requires(_US) or ()]
    return [each for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]


def _named(name: str, version: str | None) -> str:
    return f"{name} {version}" if version else f"no {name}"


def _minor(version: str) -> str:
    from packaging.version import Version

    parsed = Version(version)
    return f"{parsed.major}.{parsed.minor}"


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _paths_of_user() -> tuple[list[str], list[str]]:
    """Return the entries of the import path that are not folders of libraries: those before these, and those after.

    A script's folder and PYTHONPATH come before the libraries and hide them; what an editable installation adds comes
    after, so that a library of the environment wins.
    """
    first = next((i for i, entry in enumerate(sys.path) if _is_of_libraries(entry)), len(sys.path))
    own = [(i, entry) for i, entry in enumerate(sys.path) if not _is_of_libraries(entry)]
    return [entry for i, entry in own if i < first], [entry for i, entry in own if i > first and entry]


def _is_of_libraries(entry: str) -> bool:
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    return os.path.basename(entry) == zipped or any(
        entry == folder or entry.startswith(folder + os.sep) for folder in _folders_of_libraries()
    )


@cache
def _folders_of_libraries() -> frozenset[str]:
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return frozenset({*folders, *site.getsitepackages(), site.getusersitepackages()})
