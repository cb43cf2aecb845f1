"""The file that ``--save_failed`` writes and ``lum replay`` reads: a zip of a manifest, protos and encoded elements."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from luminosity.engine.debugging.surroundings import Surroundings
from luminosity.errors import ReplayError

_FORMAT = "luminosity replay"
_VERSION = 1
_MANIFEST = "manifest.json"
DESCRIPTOR = "descriptor"  # of the stage, a ProcessBundleDescriptor
MAIN_CLASSES = "main-classes"  # see workers/main_classes.py


@dataclass(frozen=True)
class Part:
    """An entry of the zip, and what it is to the stage."""

    entry: str
    transform_id: str = ""
    name: str = ""  # of a timer family, or of a side input
    coder_id: str = ""


@dataclass(frozen=True)
class Manifest:
    label: str  # of the stage
    error: str  # what failed the run
    exit_code: int | None  # where it was a worker that ended
    element: str
    count: int  # elements and timers
    surroundings: Surroundings
    safe_coders: dict[str, str]
    reads: list[Part]  # encoded elements
    timers: list[Part]  # encoded timers that were due
    side_inputs: list[Part]  # encoded elements, all that there were
    state: list[Part]  # each a StateRequest that writes what was there
    groups: list[Part]  # encoded values of a large group; the name is its token, in hexadecimal

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Manifest:
        for name in ("reads", "timers", "side_inputs", "state", "groups"):
            fields[name] = [Part(**part) for part in fields[name]]
        fields["surroundings"] = Surroundings(**fields["surroundings"])
        return cls(**fields)


def write(path: str, manifest: Manifest, entries: Iterable[tuple[str, Iterable[bytes]]]) -> int:
    """Write it whole or not at all, readable by this user alone; its size."""
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
    """The manifest and all entries; :class:`ReplayError` where it is no such file, or a damaged one."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _manifest(archive), {name: archive.read(name) for name in archive.namelist()}
    except ReplayError:
        raise
    except OSError as error:
        raise ReplayError(f"{path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise ReplayError(f"{path}: expected a whole file that --save_failed wrote; {error}") from error


def _manifest(archive: zipfile.ZipFile) -> Manifest:
    fields = json.loads(archive.read(_MANIFEST))
    if fields.pop("format") != _FORMAT:
        raise ValueError("its manifest is another format's")
    version = fields.pop("version")
    if version != _VERSION:
        writer = fields.get("surroundings", {}).get("luminosity", "another version")
        raise ReplayError(f"the file has version {version}, expected {_VERSION}; it was written by Luminosity {writer}")
    return Manifest.from_json(fields)
