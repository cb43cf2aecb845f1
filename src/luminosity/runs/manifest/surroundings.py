"""What surrounds a run: its command, commit, code, packages, seeds and machine."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from luminosity._shared.notebook import notebook_name
from luminosity.core import OPENMP_VARIABLES, machine_ram_bytes, usable_cores
from luminosity.runs.manifest.files import digest_files
from luminosity.runs.manifest.masking import is_secret_name, mask_text, mask_words

__all__ = ["Commit", "code", "command", "commit", "environment", "machine", "packages", "remember_command", "seeds"]

_GIT_TIMEOUT_S = 2.0  # `git status` takes longer in very large repositories only
_MOST_CODE = 500  # files; more are not a script with its modules
_MOST_COMMAND = 32_000  # characters
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "JAX_PLATFORMS",
    "PYTHONHASHSEED",
    "PYTHONPATH",
    "TOKENIZERS_PARALLELISM",
    *OPENMP_VARIABLES,
)
_LIBRARIES = f"{os.sep}site-packages{os.sep}"
_remembered: list[str] = []  # the command line of `lum`, which takes it off sys.argv


@dataclass(frozen=True)
class Commit:
    """The commit of the folder that holds the code."""

    id: str
    root: str  # of the repository
    is_clean: bool | None = None  # whether no tracked file differs from the commit; None if git does not say


def remember_command(words: Sequence[str]) -> None:
    """Keep the command line of ``lum`` for the manifests of this process."""
    _remembered[:] = words


def command() -> tuple[str, ...]:
    """Return the command line of this process without secrets, or nothing if it has none that can be run again.

    It begins with ``lum`` or ``python``.
    """
    if _remembered:
        words = ["lum", *_remembered]
    elif notebook_name() or "-c" in sys.orig_argv[1:2] or len(sys.orig_argv) < 2:
        return ()
    else:
        words = ["python", *sys.orig_argv[1:]]
    masked = mask_words(words)
    return tuple(masked) if sum(map(len, masked)) <= _MOST_COMMAND else ()


def commit(folder: str) -> Commit | None:
    """Return the commit that ``folder`` is at, or None if it is in no git repository. Asks git once in a process."""
    inside = os.path.abspath(folder)
    while not os.path.exists(os.path.join(inside, ".git")):
        if inside == os.path.dirname(inside):
            return None
        inside = os.path.dirname(inside)
    return _commit(inside)


@functools.lru_cache(8)
def _commit(root: str) -> Commit | None:
    words = ["git", "-C", root, "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None  # no git here, or a repository that takes too long
    lines = done.stdout.splitlines()
    found = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    return Commit(found[0], root, all(line.startswith("#") for line in lines)) if found else None


def packages() -> dict[str, str]:
    """Return the versions of all installed packages, from the names of their folders, which takes milliseconds."""
    return dict(_packages(tuple(sys.path)))


@functools.lru_cache(2)
def _packages(folders: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for folder in folders:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            stem, suffix = os.path.splitext(name)
            if suffix in (".dist-info", ".egg-info") and "-" in stem:
                package, version = stem.split("-")[:2]
                found.setdefault(package.lower().replace("_", "-"), version)
    return dict(sorted(found.items()))


def code() -> dict[str, str]:
    """Return the digests of the script and of the modules that it imported, but those of installed packages."""
    words = [*sys.argv[:1], *(_remembered[1:2] if _remembered[:1] == ["run"] else ())]
    files = {os.path.realpath(word): None for word in words if os.path.isfile(word)}
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    # Compared as texts first: asking the disk about thousands of modules would take a while.
    folders = tuple(f"{path}{os.sep}" for path in (package, sys.prefix, sys.base_prefix, os.path.dirname(os.__file__)))
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and not file.startswith(folders) and _LIBRARIES not in file:
            files[os.path.realpath(file)] = None
    real = tuple(os.path.realpath(folder) + os.sep for folder in folders)
    mine = sorted(file for file in files if not file.startswith(real) and os.path.isfile(file))[:_MOST_CODE]
    return {file: digest_files([file]).digest for file in mine}


def seeds(words: Sequence[str]) -> dict[str, str]:
    """Return the seeds that the command line names, and the one of Python's hashes.

    >>> seeds(["--seed=7", "--rows=5", "--random-state", "3"])["--random-state"]
    '3'
    >>> [name for name in seeds([]) if name.startswith("-")]
    []
    """
    found = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "random")}
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, has_value, value = word.partition("=")
        if name.startswith("-") and ("seed" in name.lower() or "random_state" in name.lower().replace("-", "_")):
            found[name] = value if has_value else following
    return found


def environment() -> dict[str, str]:
    """Return the few variables that change what is computed, without secrets."""
    names = [*_VARIABLES, *sorted(name for name in os.environ if name.startswith("LUMINOSITY_"))]
    return {n: mask_text(os.environ[n]) for n in names if n in os.environ and not is_secret_name(n)}


@functools.lru_cache(1)
def machine() -> dict[str, str]:
    """Return what identifies this kind of machine."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": str(usable_cores()),
        "memory": f"{machine_ram_bytes() / 2**30:.1f} GiB",
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()
