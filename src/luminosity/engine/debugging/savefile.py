"""The file that ``--save_failed`` writes and ``lum replay`` reads: a zip of a manifest, protos and encoded elements.

The manifest says what a replay needs of the run's process: its Python, its import path and its modules.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
import sysconfig
import tempfile
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from apache_beam.internal import pickler

from luminosity.errors import ReplayError

__all__ = ["DESCRIPTOR", "MAIN_CLASSES", "Manifest", "Part", "Surroundings", "read", "write"]

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class Surroundings:
    """The location of a run's code, and the versions that ran it."""

    python: str  # version
    luminosity: str  # version
    script: str  # empty in a notebook or a shell
    working_directory: str
    import_path: list[str]  # without the folders of installed libraries
    modules: dict[str, str]  # files of the top-level modules that were imported, by name
    pickle_library: str

    @classmethod
    def here(cls, pickle_library: str) -> Surroundings:
        """Return the surroundings of this process."""
        script = getattr(sys.modules["__main__"], "__file__", None) or ""
        folders = [os.path.dirname(os.path.abspath(script))] if script else []
        folders += [os.getcwd(), *map(os.path.abspath, sys.path)]
        return cls(
            python=_python(),
            luminosity=importlib.metadata.version("luminosity"),
            script=os.path.abspath(script) if script else "",
            working_directory=os.getcwd(),
            import_path=[p for p in dict.fromkeys(folders) if not p.startswith(_LIBRARIES) and os.path.exists(p)],
            modules=_modules(),
            pickle_library=pickle_library,
        )

    def restore(self) -> None:
        """Make the run's modules importable in this process. Raises :class:`ReplayError` for another Python."""
        if self.python != _python():
            raise ReplayError(
                f"found a file saved by Python {self.python}, expected Python {_python()}",
                fix=f"replay it with Python {self.python}",
            )
        sys.path[:0] = [path for path in self.import_path if path not in sys.path]
        pickler.set_library(self.pickle_library)

    def explain_missing(self, error: ModuleNotFoundError) -> str:
        """Return where the run found a module that is not found here."""
        name = error.name or ""
        home = self.modules.get(name.split(".")[0])
        return f"module {name!r} is not found here; " + (
            f"the run imported {name.split('.')[0]!r} from {home}"
            if home
            else f"the run imported modules from {', '.join(self.import_path)}"
        )


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _modules() -> dict[str, str]:
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if "." not in name}
    return {
        name: os.path.abspath(file)
        for name, file in files.items()
        if file and name != "__main__" and name not in sys.stdlib_module_names
    }


_FORMAT = "luminosity replay"
_VERSION = 1
_MANIFEST = "manifest.json"
DESCRIPTOR = "descriptor"  # entry: the ProcessBundleDescriptor of the stage
MAIN_CLASSES = "main-classes"  # entry: see workers/main_classes.py


@dataclass(frozen=True)
class Part:
    """An entry of the zip, and its place in the stage."""

    entry: str
    transform_id: str = ""
    name: str = ""  # of a timer family or a side input
    coder_id: str = ""


@dataclass(frozen=True)
class Manifest:
    """The description of a saved bundle, and the list of the file's entries."""

    label: str  # of the stage
    error: str  # type and message of the exception
    exit_code: int | None  # of the worker, if it ended
    element: str  # the beginning of its repr
    count: int  # elements and timers
    surroundings: Surroundings
    safe_coders: dict[str, str]
    reads: list[Part]  # encoded elements
    timers: list[Part]  # encoded timers that were due
    side_inputs: list[Part]  # all their encoded elements
    state: list[Part]  # StateRequests that write the state back
    groups: list[Part]  # encoded values of a large group; the name is its token, in hexadecimal

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Manifest:
        """Read what ``dataclasses.asdict`` returned. Raises KeyError or TypeError for other fields."""
        for name in ("reads", "timers", "side_inputs", "state", "groups"):
            fields[name] = [Part(**part) for part in fields[name]]
        fields["surroundings"] = Surroundings(**fields["surroundings"])
        return cls(**fields)


def write(path: str, manifest: Manifest, entries: Iterable[tuple[str, Iterable[bytes]]]) -> int:
    """Write the file atomically, readable only by this user, and return its size."""
    handle, unfinished = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=os.path.dirname(path) or ".")
    try:
        with os.fdopen(handle, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                head = {"format": _FORMAT, "version": _VERSION, **asdict(manifest)}
                archive.writestr(_MANIFEST, json.dumps(head, indent=1))
                for name, chunks in entries:
                    with archive.open(name, "w", force_zip64=True) as entry:
                        for chunk in chunks:
                            entry.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        size = os.path.getsize(unfinished)
        os.replace(unfinished, path)
        return size
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise


def read(path: str) -> tuple[Manifest, dict[str, bytes]]:
    """Return the manifest and all entries. Raises :class:`ReplayError` if the file is damaged or something else."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _manifest(archive), {name: archive.read(name) for name in archive.namelist()}
    except ReplayError:
        raise
    except OSError as error:
        raise ReplayError(f"{path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise ReplayError(f"{path}: {error}; expected a complete file that --save_failed wrote") from error


def _manifest(archive: zipfile.ZipFile) -> Manifest:
    fields = json.loads(archive.read(_MANIFEST))
    if fields.pop("format") != _FORMAT:
        raise ReplayError(
            f"{archive.filename}: found a manifest of another format, expected a file that --save_failed wrote"
        )
    version = fields.pop("version")
    if version != _VERSION:
        writer = fields.get("surroundings", {}).get("luminosity", "another version")
        raise ReplayError(
            f"{archive.filename}: found version {version} of the format, expected {_VERSION}",
            fix=f"replay it with Luminosity {writer}, which wrote it",
        )
    return Manifest.from_json(fields)
