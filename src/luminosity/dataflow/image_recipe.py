"""The recipe of a container image: a Dockerfile, and the files that it copies."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import luminosity
from luminosity.dataflow.image_pins import OWN_NAME, Pin
from luminosity.errors import InvalidArgument, WriteError

__all__ = [
    "APP",
    "MODELS",
    "Recipe",
    "check_target",
    "default_base",
    "write",
]

_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_WHEEL = "Wheel-Version: 1.0\nGenerator: lum image\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # of all entries, so that the same files give the same wheel
APP = "/app"  # where the image has the pipeline
MODELS = "/models"
_COPIED = ("/usr/local", "/opt/apache/beam")  # where Beam's images have Python, and what starts workers
_OF_PYTHON = (  # packages of Debian 12 and Ubuntu 24.04, or what provides them
    "ca-certificates",
    "libbz2-1.0",
    "libexpat1",
    "libffi8",
    "libgomp1",
    "liblzma5",
    "libncursesw6",
    "libreadline8",
    "libsqlite3-0",
    "libssl3",
    "libuuid1",
    "zlib1g",
)
_NEED_LIBRARIES = ("bz2", "ctypes", "lzma", "pyexpat", "readline", "sqlite3", "ssl", "zlib")  # modules of Python
_ENTRY = """\
#!/bin/sh
# "lum …" runs the command. Everything else goes to Beam's boot program, with which Dataflow starts workers.
if [ "$1" = lum ]; then
    exec "$@"
fi
exec /opt/apache/beam/boot "$@"
"""


@dataclass(frozen=True)
class Recipe:
    """Everything that an image gets."""

    base: str  # the image with Python and Beam
    pins: Sequence[Pin]
    wheels: Sequence[Path]
    models: Sequence[Path]
    pipeline: Path | None  # a file, or a folder
    onto: str | None = None  # another image, which gets Python and Beam's boot program from the base


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
        f"# The versions with which {OWN_NAME} {importlib.metadata.version(OWN_NAME)} ran on Python {_PYTHON},",
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
        f"FROM {recipe.base}" + " AS libraries" * (recipe.onto is not None),
        f"WORKDIR {APP}",
        f"COPY requirements.txt {APP}/requirements.txt",
        f"RUN python -m pip install --no-cache-dir --requirement {APP}/requirements.txt",
        f"COPY wheels {APP}/wheels",
        "RUN python -m pip install --no-cache-dir --no-deps --no-index "
        + " ".join(f"{APP}/wheels/{wheel}" for wheel in wheels),
    ]
    if recipe.onto is not None:
        lines += [
            f"FROM {recipe.onto}",
            f"WORKDIR {APP}",
            "# The libraries of the system that Python needs; then Python with all packages, and Beam's boot program.",
            "RUN apt-get update && apt-get install --yes --no-install-recommends "
            + " ".join(_OF_PYTHON)
            + " && rm -rf /var/lib/apt/lists/*",
            *(f"COPY --from=libraries {folder} {folder}" for folder in _COPIED),
            f'RUN ldconfig && python -c "import {", ".join(_NEED_LIBRARIES)}"',
        ]
    lines.append("RUN lum --version")
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
