"""The recipe of a container image: a Dockerfile, the versions installed here, and the files that it copies."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import luminosity
from luminosity.errors import InvalidArgument, WriteError

__all__ = [
    "APP",
    "MODELS",
    "Recipe",
    "check_extras",
    "check_target",
    "default_base",
    "lock",
    "read_requirements",
    "read_wheel",
    "write",
]

_OWN_NAME = "luminosity"
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_WHEEL = "Wheel-Version: 1.0\nGenerator: lum image\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # of all entries, so that the same files give the same wheel
APP = "/app"  # where the image has the pipeline
MODELS = "/models"
_ENTRY = """\
#!/bin/sh
# "lum …" runs the command. Everything else goes to Beam's boot program, with which Dataflow starts workers.
if [ "$1" = lum ]; then
    exec "$@"
fi
exec /opt/apache/beam/boot "$@"
"""


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
    known = {canonicalize_name(each) for each in importlib.metadata.metadata(_OWN_NAME).get_all("Provides-Extra") or ()}
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
    waiting = [(Requirement(f"{_OWN_NAME}[{','.join(extras)}]"), "the command")]
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
        elif name == _OWN_NAME:
            version = importlib.metadata.version(_OWN_NAME)
            needed = tuple(map(Requirement, importlib.metadata.requires(_OWN_NAME) or ()))
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


@dataclass(frozen=True)
class Recipe:
    """Everything that an image gets."""

    base: str  # image
    pins: Sequence[Pin]
    wheels: Sequence[Path]
    models: Sequence[Path]
    pipeline: Path | None  # a file, or a folder


def default_base() -> str:
    """Return Beam's image for this version of Python and the Beam that is installed here."""
    return f"apache/beam_python{_PYTHON}_sdk:{importlib.metadata.version('apache-beam')}"


def check_target(folder: Path) -> None:
    """Raise :class:`WriteError` if something is there, or if the folder can't be made."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WriteError(
            f"found {folder}, which exists, expected a new or empty folder; nothing was changed",
            fix="choose another folder, or remove this one",
        )
    if not folder.absolute().parent.is_dir():
        raise WriteError(f"found no folder {folder.absolute().parent}, expected one in which {folder.name} can be made")


def write(recipe: Recipe, folder: Path) -> None:
    """Write the recipe whole or not at all: to a hidden folder beside, which is renamed at the end.

    Raises :class:`WriteError`.
    """
    check_target(folder)
    folder = folder.absolute()
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _fill(recipe, unfinished)
        unfinished.chmod(0o755)
        os.rename(unfinished, folder)  # fails if the folder has got files meanwhile
    except OSError as error:
        raise WriteError(
            f"can't write {folder}: {error}", fix="nothing is left of it; mend the cause and try again"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _fill(recipe: Recipe, folder: Path) -> None:
    (folder / "wheels").mkdir()
    own = _write_own_wheel(folder / "wheels")
    for wheel in recipe.wheels:
        _copy(wheel, folder / "wheels" / wheel.name)
    for model in recipe.models:
        _copy(model, folder / "models" / model.name)
    if recipe.pipeline is not None:
        place = folder / "pipeline"
        _copy(recipe.pipeline, place if recipe.pipeline.is_dir() else place / recipe.pipeline.name, _not_copied)
    (folder / "requirements.txt").write_text(_requirements(recipe))
    (folder / "entry.sh").write_text(_ENTRY)
    (folder / "entry.sh").chmod(0o755)
    (folder / "Dockerfile").write_text(_dockerfile(recipe, own.name))


def _copy(source: Path, target: Path, ignore: Callable[[str, list[str]], list[str]] | None = None) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=ignore)  # follows links, as in a cache of models
    else:
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, target)


def _not_copied(folder: str, names: list[str]) -> list[str]:
    """Return what an image should not have: hidden files, which may hold secrets, caches and virtual environments."""
    return [
        name
        for name in names
        if name.startswith(".") or name == "__pycache__" or os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
    ]


def _requirements(recipe: Recipe) -> str:
    lines = [
        f"# The versions with which {_OWN_NAME} {importlib.metadata.version(_OWN_NAME)} ran on Python {_PYTHON},",
        f"# {platform.system()} {platform.machine()}. Written by lum image.",
        *(pin.line for pin in recipe.pins),
    ]
    return "\n".join(lines) + "\n"


def _dockerfile(recipe: Recipe, own_wheel: str) -> str:
    name = "NAME" if recipe.pipeline is None or recipe.pipeline.is_dir() else recipe.pipeline.name
    wheels = [own_wheel, *(wheel.name for wheel in recipe.wheels)]
    lines = [
        "# An image with the libraries, models and files of a pipeline. Written by lum image.",
        "#",
        "#   docker build --tag IMAGE .",
        f"#   docker run IMAGE lum run {APP}/pipeline/{name}         run the pipeline in a container",
        "#   docker run -it --entrypoint bash IMAGE                  look around in it",
        "#",
        "# On Dataflow, workers start in it with these options of the pipeline:",
        "#",
        "#   --runner=DataflowRunner --sdk_container_image=REGISTRY/IMAGE --sdk_location=container",
        f"FROM {recipe.base}",
        f"WORKDIR {APP}",
        f"COPY requirements.txt {APP}/requirements.txt",
        f"RUN python -m pip install --no-cache-dir --requirement {APP}/requirements.txt",
        f"COPY wheels {APP}/wheels",
        "RUN python -m pip install --no-cache-dir --no-deps --no-index "
        + " ".join(f"{APP}/wheels/{wheel}" for wheel in wheels),
        "RUN lum --version",
    ]
    if recipe.models:
        lines.append(f"COPY models {MODELS}")
    if recipe.pipeline is not None:
        lines += [f"COPY pipeline {APP}/pipeline", f"ENV PYTHONPATH={APP}/pipeline"]
    lines += [
        f"COPY entry.sh {APP}/entry.sh",
        "# Starts Beam's boot program, or lum if that is the first word.",
        f'ENTRYPOINT ["{APP}/entry.sh"]',
    ]
    return "\n".join(lines) + "\n"


def _write_own_wheel(folder: Path) -> Path:
    """Write the wheel of the Luminosity that runs here, whether it is installed, editable or on PYTHONPATH.

    It is pure Python, so its files and the metadata of its installation are all that a wheel needs. Needs no build
    tool and no network.
    """
    version = importlib.metadata.version(_OWN_NAME)
    path = folder / f"{_OWN_NAME}-{version}-py3-none-any.whl"
    information = f"{_OWN_NAME}-{version}.dist-info"
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
            yield f"{_OWN_NAME}/{file.relative_to(package).as_posix()}", file.read_bytes()
    distribution = importlib.metadata.distribution(_OWN_NAME)
    for name in ("METADATA", "entry_points.txt"):
        text = distribution.read_text(name)
        if text is None:
            raise InvalidArgument(
                f"found an installation of {_OWN_NAME} without {name}, expected one that pip made",
                fix="install it again with pip",
            )
        yield f"{information}/{name}", text.encode()
    yield f"{information}/WHEEL", _WHEEL.encode()
