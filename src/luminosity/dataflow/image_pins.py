"""What an image installs: the versions of libraries that are installed here, and wheels of the user."""

from __future__ import annotations

import importlib.metadata
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from luminosity.errors import InvalidArgument

__all__ = ["OWN_NAME", "Pin", "Wheel", "check_extras", "lock", "read_requirements", "read_wheel"]

OWN_NAME = "luminosity"


@dataclass(frozen=True)
class Pin:
    """A library and its version."""

    name: str  # canonical
    line: str  # of requirements.txt
    note: str = ""  # what the user should know about it


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


def check_extras(extras: Iterable[str]) -> None:
    """Raise :class:`InvalidArgument` for an extra that Luminosity does not have."""
    known = {canonicalize_name(each) for each in importlib.metadata.metadata(OWN_NAME).get_all("Provides-Extra") or ()}
    for extra in extras:
        if canonicalize_name(extra) not in known:
            raise InvalidArgument(f"found --extra {extra}, expected one of {', '.join(sorted(known))}")


def read_requirements(path: Path) -> list[Requirement]:
    """Return the requirements of a file, one a line. Raises :class:`InvalidArgument` for anything else."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        message = f"found {path}, which can't be read ({error}), expected a file of requirements"
        raise InvalidArgument(message) from error
    found: list[Requirement] = []
    for number, line in enumerate(lines, start=1):
        text = line.split(" #")[0].strip()
        if not text or text.startswith("#"):
            continue
        try:
            found.append(Requirement(text))
        except InvalidRequirement as error:
            raise InvalidArgument(
                f"{path}, line {number}: found {text!r}, expected a requirement such as numpy>=1.26",
                fix="leave options and paths out; pass local packages with --wheel FILE",
            ) from error
    return found


def lock(extras: Iterable[str], requirements: Iterable[Requirement], wheels: Mapping[str, Wheel]) -> list[Pin]:
    """Return the version of everything that Luminosity with these extras and the requirements need, by name.

    Versions are those installed here. Luminosity itself and ``wheels`` (by canonical name) are not among them, only
    what they need.

    Raises :class:`InvalidArgument` if something is not installed, has another version than is asked for, or can't be
    installed elsewhere.
    """
    waiting = [(Requirement(f"{OWN_NAME}[{','.join(extras)}]"), "the command")]
    waiting += [(each, "--requirements") for each in requirements]
    waiting += [(Requirement(each.name), f"--wheel {each.path.name}") for each in wheels.values()]
    seen: set[tuple[str, str]] = set()  # a library and one of its extras
    pins: dict[str, Pin] = {}
    while waiting:
        requirement, asked_by = waiting.pop()
        name = canonicalize_name(requirement.name)
        new = [extra for extra in ("", *requirement.extras) if (name, extra) not in seen]
        wheel = wheels.get(name)
        if wheel is not None:
            version, needed = wheel.version, wheel.requires
        elif name == OWN_NAME:
            version = importlib.metadata.version(OWN_NAME)
            needed = tuple(map(Requirement, importlib.metadata.requires(OWN_NAME) or ()))
        else:
            version, needed = _installed(requirement, asked_by)
            pins[name] = pins.get(name) or _pin(importlib.metadata.distribution(name))
        if not requirement.specifier.contains(version, prereleases=True):
            raise InvalidArgument(
                f"found {name} {version}, expected {requirement} ({asked_by} asks for it)",
                fix=f"python -m pip install '{requirement}'",
            )
        seen |= {(name, extra) for extra in new}
        waiting += [(each, name) for extra in new for each in _of_extra(needed, extra)]
    return [pins[name] for name in sorted(pins)]


def _of_extra(requirements: Iterable[Requirement], extra: str) -> Iterator[Requirement]:
    """Yield the requirements of an extra, or for an empty one those without any extra."""
    for each in requirements:
        if each.marker is None:
            if not extra:
                yield each
        elif each.marker.evaluate({"extra": extra}) and (not extra or not each.marker.evaluate({"extra": ""})):
            yield each


def _installed(requirement: Requirement, asked_by: str) -> tuple[str, list[Requirement]]:
    try:
        distribution = importlib.metadata.distribution(requirement.name)
    except importlib.metadata.PackageNotFoundError as error:
        raise InvalidArgument(
            f"found no {requirement.name} in this environment, expected {requirement} ({asked_by} asks for it), since "
            "the image gets the versions that are installed here",
            fix=f"python -m pip install '{requirement}'",
        ) from error
    return distribution.version, [Requirement(each) for each in distribution.requires or ()]


def _pin(distribution: importlib.metadata.Distribution) -> Pin:
    """Return the line that installs the same version elsewhere."""
    name, version = canonicalize_name(distribution.metadata["Name"]), distribution.version
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    url = str(origin.get("url", ""))
    if url.startswith("file:"):
        raise InvalidArgument(
            f"found {name} {version}, installed from {url}, expected a library that an image can install",
            fix=f"make a wheel: python -m pip wheel --no-deps {url.removeprefix('file://')}; then add --wheel FILE",
        )
    if source := origin.get("vcs_info"):
        return Pin(name, f"{name} @ {source['vcs']}+{url}@{source['commit_id']}")
    if url:
        return Pin(name, f"{name} @ {url}")
    public = Version(version).public
    if public != version:
        note = f"{name} {version} is a build of another index; the image installs {public} of its own index"
        return Pin(name, f"{name}=={public}", note)
    return Pin(name, f"{name}=={version}")
