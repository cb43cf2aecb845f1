"""``lum image FOLDER [PIPELINE]``: write the recipe of a container image."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from luminosity.cli.common.options import add_command
from luminosity.errors import InvalidArgument

__all__ = ["add_to", "image"]

_DESCRIPTION = """\
Write a folder from which docker builds an image with your pipeline: on Beam's
image for this Python and this Beam, with Luminosity and the versions of all
libraries that are installed here. Workers of Dataflow can start in it, and lum.
Nothing is built, and nothing is fetched.
"""
_EPILOG = """\
FOLDER then has a Dockerfile, requirements.txt with exact versions, entry.sh, the
wheel of this Luminosity, and copies of your files: pipeline/ and models/. Of a
pipeline's folder, hidden files and virtual environments are left out.

exit codes:
  0  the folder is written
  2  it exists, or something can't be put into an image; nothing was changed

examples:
  lum image image pipeline.py                    a script and what Luminosity needs
  lum image image src/ --requirements needs.txt  a folder, and more libraries
  lum image image p.py --extra transformers --model minilm  a model inside
  lum image image p.py --wheel dist/shop-1.0-py3-none-any.whl  your own package
  lum image image p.py --onto nvidia/cuda:12.8.1-cudnn-runtime-ubuntu24.04  on CUDA

  docker build --tag shop image                  build it (or: buildah build …)
  docker run shop lum run /app/pipeline/p.py     run the pipeline in it
"""


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``lum``."""
    parser = add_command(commands, "image", "write the recipe of a container image", _DESCRIPTION, _EPILOG)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the folder to write; it must not exist yet")
    parser.add_argument(
        "pipeline", metavar="PIPELINE", type=Path, nargs="?", help="a script, a YAML file, or the folder of your code"
    )
    parser.add_argument(
        "--extra", metavar="NAME", action="append", default=[], help="an extra of Luminosity, such as transformers"
    )
    parser.add_argument(
        "--requirements",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="further libraries, one a line; their versions are those installed here",
    )
    parser.add_argument(
        "--wheel",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="a package of your own, built as a wheel",
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        type=Path,
        action="append",
        default=[],
        help="a file or folder of a model, which becomes /models/NAME",
    )
    parser.add_argument("--base", metavar="IMAGE", help="the image to start from (Beam's for this Python and Beam)")
    parser.add_argument(
        "--onto",
        metavar="IMAGE",
        help="end with this image instead, such as one with CUDA: Python with all libraries and Beam's boot program "
        "are copied into it",
    )
    parser.set_defaults(command=image)


def image(parsed: argparse.Namespace) -> int:
    """Write the recipe and print what to do with it; return the exit code."""
    from luminosity.dataflow import image_pins
    from luminosity.dataflow import image_recipe as recipe

    folder: Path = parsed.folder
    recipe.check_target(folder)
    _check(parsed)
    image_pins.check_extras(parsed.extra)
    own = {wheel.name: wheel for wheel in map(image_pins.read_wheel, parsed.wheel)}
    requirements = [each for path in parsed.requirements for each in image_pins.read_requirements(path)]
    pins = image_pins.lock(parsed.extra, requirements, own)
    made = recipe.Recipe(
        base=parsed.base or recipe.default_base(),
        pins=pins,
        wheels=parsed.wheel,
        models=[path.resolve() for path in parsed.model],
        pipeline=parsed.pipeline,
        onto=parsed.onto,
    )
    recipe.write(made, folder)
    copied = "" if made.onto is None else f", copied onto {made.onto}"
    print(f"{folder}: from {made.base}, {len(pins)} libraries with exact versions{copied}")
    for pin in pins:
        if pin.note:
            print(f"  {pin.note}")
    for model in made.models:
        print(f"  {recipe.MODELS}/{model.name} in the image is {model}")
    name = parsed.pipeline.name if parsed.pipeline is not None and parsed.pipeline.is_file() else "FILE"
    print(f"Build and run it:\n  docker build --tag IMAGE {folder}")
    print(f"  docker run IMAGE lum run {recipe.APP}/pipeline/{name}")
    return 0


def _check(parsed: argparse.Namespace) -> None:
    """Raise :class:`InvalidArgument` for paths that are not there or would meet in the image, and for images."""
    from luminosity.dataflow.image_recipe import default_base

    if parsed.onto is not None and parsed.onto == (parsed.base or default_base()):
        raise InvalidArgument(f"found --onto {parsed.onto}, which is the base itself, expected another image")
    pipeline: Path | None = parsed.pipeline
    if pipeline is not None and not pipeline.exists():
        raise InvalidArgument(f"found no {pipeline}, expected a pipeline's script, YAML file or folder")
    for option in ("wheel", "model"):
        paths: list[Path] = getattr(parsed, option)
        for path in paths:
            if not path.exists():
                raise InvalidArgument(
                    f"--{option}: found no {path}, expected a file" + " or folder" * (option == "model")
                )
        for name, count in Counter(path.resolve().name for path in paths).items():
            if count > 1:
                raise InvalidArgument(f"--{option}: found {count} paths that end with {name}, expected different names")
