"""Checks of what steps need and workers of Dataflow may not have: libraries, modules, files, servers."""

from __future__ import annotations

import functools
import glob
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import apache_beam
from apache_beam.options.pipeline_options import PipelineOptions, SetupOptions
from apache_beam.portability import common_urns

from luminosity._shared.text import list_some
from luminosity.dataflow.job import default_image
from luminosity.dataflow.steps import Finding, Step, error, warning
from luminosity.runs.manifest.files import is_local
from luminosity.runs.manifest.places import Effects

__all__ = ["check_needs"]

_BEAM_IMAGE = re.compile(
    r"(?:apache|gcr\.io/cloud-dataflow/v1beta3)/beam_python(?P<python>\d+\.\d+)_sdk(?::(?P<beam>\S+))?"
)
_PYTHON_IN_NAME = re.compile(r"(?:python|py)-?(?P<python>3\.?\d{1,2})(?!\d)")
_HERE = re.compile(r"(?:^|[/@,=\s])(?P<host>localhost|127(?:\.\d{1,3}){3}|0\.0\.0\.0|\[::1\])(?::\d+|[/,\s]|$)")
_OUTSIDE = ("/dev/", "/proc/", "/sys/", "/etc/")  # folders that are on every machine
_MOST_SHOWN = 3
_BUCKET = "use a bucket, such as gs://BUCKET/FOLDER"
_REMEDIES = {"qdrant": "use the address of a server of the store", "lance": "use a disk that all workers share"}
_IN_IMAGE = "copy it into the image (lum image --model PATH makes it /models/NAME), or use a bucket"
_ONTO = " (with --onto IMAGE if its libraries need the CUDA of an image)"
_HINTS: Any = common_urns.StandardResourceHints.Enum
_ACCELERATOR = _HINTS.ACCELERATOR.urn
_INSTALLED_BY = ("requirements_file", "setup_file", "extra_packages")


def check_needs(steps: Sequence[Step], places: Effects, options: PipelineOptions) -> Iterator[Finding]:
    """Yield what steps need that the containers of their workers may not have."""
    yield from _check_containers(steps)
    yield from _check_libraries(steps, options)
    yield from _check_places(places, not any(_BEAM_IMAGE.fullmatch(step.image) for step in steps))
    yield from _check_files(steps, places)
    yield from _check_servers(steps)


def _check_containers(steps: Sequence[Step]) -> Iterator[Finding]:
    """Check that each step is in a container, with this version of Python and of Beam."""
    outside = [step for step in steps if not step.image]
    if outside:
        yield error(
            "Dataflow runs steps in containers, and these have another environment",
            f"use a transform whose environment is {common_urns.environments.DOCKER.urn}",
            outside,
        )
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    for image in sorted({step.image for step in steps if step.image}):
        some = [step for step in steps if step.image == image]
        of_beam = _BEAM_IMAGE.fullmatch(image)
        named = of_beam or _PYTHON_IN_NAME.search(image)
        found = _with_dot(named["python"]) if named else python
        if found != python:
            yield error(
                f"the name of the image {image} says Python {found}, and this is Python {python}: workers can't read "
                "functions that another Python has pickled",
                f"build the image with Python {python} (lum image does), or run this with Python {found}",
                some,
            )
        beam = of_beam["beam"] if of_beam else None
        if beam and beam != apache_beam.__version__:
            yield error(
                f"the image {image} has Beam {beam}, and this is Beam {apache_beam.__version__}",
                f"use the image {default_image()}, or your own of lum image",
                some,
            )


def _with_dot(version: str) -> str:
    """Return a version as Python writes it.

    >>> _with_dot("3.11"), _with_dot("311")
    ('3.11', '3.11')
    """
    return version if "." in version else f"{version[0]}.{version[1:]}"


def _check_libraries(steps: Sequence[Step], options: PipelineOptions) -> Iterator[Finding]:
    """Check steps in Beam's own image, which has Beam and little else."""
    setup = options.view_as(SetupOptions)
    if any(getattr(setup, name) for name in _INSTALLED_BY):
        return  # a warning about these is enough
    plain = [step for step in steps if _BEAM_IMAGE.fullmatch(step.image)]
    ours = [step for step in plain if any(name.split(".")[0] == "luminosity" for name in step.modules)]
    if ours:
        # torch and JAX bring their own CUDA; TensorRT and others need that of the image
        onto = any(_ACCELERATOR in step.hints for step in ours)
        yield error(
            "these steps need Luminosity, and Beam's own image does not have it",
            f"write the recipe of an image with lum image{_ONTO if onto else ''}, build and push it, and add "
            "--sdk_container_image=IMAGE",
            ours,
        )
    own = {step.name: names for step in plain if (names := {name for name in step.modules if _is_of_user(name)})}
    if own:
        modules = sorted(set().union(*own.values()))
        yield error(
            f"these steps import {list_some(modules, _MOST_SHOWN)} from this machine, and workers don't have it",
            "put your folder into an image (lum image FOLDER SOURCES), or pass --setup_file",
            [step for step in plain if step.name in own],
        )


def _is_of_user(name: str) -> bool:
    """Return whether a module is a file of the user's, neither of Python nor of an installed package."""
    module: ModuleType | None = sys.modules.get(name)
    path = getattr(module, "__file__", None)
    if not path or name == "__main__" or name.split(".")[0] == "luminosity":
        return False
    return not _is_installed(os.path.abspath(path))


def _is_installed(path: str) -> bool:
    return path.startswith(_folders_of_packages())


@functools.cache
def _folders_of_packages() -> tuple[str, ...]:
    known = [*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values(), sys.base_prefix]
    return tuple(f"{folder}{os.sep}" for folder in dict.fromkeys(known) if folder)


def _check_places(places: Effects, has_own_image: bool) -> Iterator[Finding]:
    """Check what transforms say they read, write and load."""
    for place in filter(lambda place: is_local(place.path), places.reads):
        message = f"reads {place.path}, which is on this machine; workers don't have it"
        yield error(message, _REMEDIES.get(place.kind, _BUCKET), [_applied(place.step)])
    for place in filter(lambda place: is_local(place.path), places.writes):
        message = f"writes to {place.path}; what a worker writes there is lost with the worker"
        yield error(message, _REMEDIES.get(place.kind, _BUCKET), [_applied(place.step)])
    for place in filter(lambda place: is_local(place.path) and os.path.exists(place.path), places.models):
        message = f"loads the model {place.path}, which is on this machine"
        if has_own_image:
            yield warning(f"{message}; workers have it if the image has the same", _IN_IMAGE, [place.step])
        else:
            yield error(f"{message}; workers don't have it", _IN_IMAGE, [place.step])


def _applied(step: str) -> str:
    """Return the transform that the user applied: Beam's sources and sinks show their files in a step of their own.

    >>> _applied("Lines/Write/WriteImpl/WriteBundles"), _applied("Shop/Lines")
    ('Lines', 'Shop/Lines')
    """
    return re.sub(r"(?<=.)/(Read|Write)/.*", "", step)


def _check_files(steps: Sequence[Step], places: Effects) -> Iterator[Finding]:
    """Check for other paths of this machine in the values of steps."""
    known = {place.path for place in (*places.reads, *places.writes, *places.models)}
    by_path: dict[str, list[Step]] = {}
    for step in steps:
        for text in step.texts:
            if _is_local_path(text) and not _is_one_of(os.path.abspath(text), known):
                by_path.setdefault(text, []).append(step)
    for path, some in sorted(by_path.items()):
        yield warning(
            f"found the path {path}, which is on this machine; workers have it if the image has the same",
            "use a path of the image, or a bucket",
            some,
        )


def _is_one_of(path: str, known: Iterable[str]) -> bool:
    """Return whether a path is that of a known place: its folder, a file in it, or its name without a suffix."""
    return any(each.startswith(path) or path.startswith(f"{each}{os.sep}") for each in known)


def _is_local_path(text: str) -> bool:
    """Return whether a text is the path of something on this machine, or of something in a folder that is here."""
    if not 1 < len(text) < 4096 or "\n" in text or "\0" in text or "://" in text:
        return False
    if text.endswith((".py", ".pyc")) or text.startswith("<") or text.startswith(_OUTSIDE):
        return False  # the files of code that is sent along
    if _is_installed(text) or os.sep not in text:
        return os.sep not in text and "." in text.strip(".") and os.path.isfile(text)
    if os.path.exists(text):
        return text.rstrip(os.sep) not in ("", os.curdir)
    folder = os.path.dirname(text.rstrip(os.sep))
    if glob.has_magic(text):
        return bool(folder) and bool(next(glob.iglob(text), None))
    return folder not in ("", os.sep) and os.path.isdir(folder)


def _check_servers(steps: Sequence[Step]) -> Iterator[Finding]:
    """Check for addresses of this machine in the values of steps."""
    by_text = {step.name: [text for text in step.texts if _HERE.search(text)] for step in steps}
    some = [step for step in steps if by_text[step.name]]
    if some:
        hosts = sorted(
            {match["host"] for texts in by_text.values() for each in texts for match in _HERE.finditer(each)}
        )
        yield error(
            f"these steps connect to a server on this machine ({', '.join(hosts)}); on a worker, that is the worker",
            "give them an address that workers of Dataflow reach",
            some,
        )
