"""Wheels for an image: Luminosity's own, made from its installed files, and the metadata of the user's wheels."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

import luminosity
from luminosity.errors import InvalidArgument

__all__ = ["OWN_NAME", "Wheel", "own_requirements", "read_wheel", "write_own_wheel"]

OWN_NAME = "luminosity"
_WHEEL = "Wheel-Version: 1.0\nGenerator: lum image\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # of all entries, so that the same files give the same wheel


@dataclass(frozen=True)
class Wheel:
    """The metadata of a wheel."""

    path: Path
    name: str  # canonical
    version: str
    requires: tuple[Requirement, ...]


def read_wheel(path: Path) -> Wheel:
    """Return the metadata of a wheel. Raises :class:`InvalidArgument` if it is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            (entry,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
            headers = HeaderParser().parsestr(archive.read(entry).decode())
        requires = tuple(Requirement(each) for each in headers.get_all("Requires-Dist") or ())
        return Wheel(path, canonicalize_name(headers["Name"]), headers["Version"], requires)
    except (OSError, zipfile.BadZipFile, ValueError, InvalidRequirement, TypeError) as error:
        raise InvalidArgument(
            f"found {path}, which can't be read as a wheel ({error}), expected a file such as pip wheel makes",
            fix="make one with: python -m pip wheel --no-deps FOLDER",
        ) from error


def own_requirements() -> list[Requirement]:
    """Return all requirements of the installed Luminosity, those of its extras included."""
    return [Requirement(each) for each in importlib.metadata.requires(OWN_NAME) or ()]


def write_own_wheel(folder: Path) -> Path:
    """Write the wheel of the Luminosity that runs here, whether it is installed, editable or on PYTHONPATH.

    It is pure Python, so its files and the metadata of its installation are all that a wheel needs. Needs no build
    tool and no network.
    """
    version = importlib.metadata.version(OWN_NAME)
    path = folder / f"{OWN_NAME}-{version}-py3-none-any.whl"
    information = f"{OWN_NAME}-{version}.dist-info"
    record: list[str] = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in _entries(information):
            entry = zipfile.ZipInfo(name, _EARLIEST)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}\n")
        archive.writestr(
            zipfile.ZipInfo(f"{information}/RECORD", _EARLIEST), "".join([*record, f"{information}/RECORD,,\n"])
        )
    return path


def _entries(information: str) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the wheel's files, but its record."""
    package = Path(luminosity.__file__).parent
    for file in sorted(package.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            yield f"{OWN_NAME}/{file.relative_to(package).as_posix()}", file.read_bytes()
    distribution = importlib.metadata.distribution(OWN_NAME)
    for name in ("METADATA", "entry_points.txt"):
        text = distribution.read_text(name)
        if text is None:
            raise InvalidArgument(
                f"found an installation of {OWN_NAME} without {name}, expected one that pip made",
                fix="install it again with pip",
            )
        yield f"{information}/{name}", text.encode()
    yield f"{information}/WHEEL", _WHEEL.encode()
