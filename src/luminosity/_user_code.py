"""Tells the user's code from that of Luminosity, Beam, the standard library and installed packages."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from functools import cache
from types import FrameType

__all__ = ["calling_line", "is_installed", "is_runners", "is_users", "is_users_file"]

_OUR_DIRECTORY = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STANDARD_LIBRARY = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
# May lie inside the standard library's folder.
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
_COMMAND = os.sep + "lum"  # in the folder of scripts


@cache
def _beam_directory() -> str:
    """Return the folder of Beam, without importing it; compiled modules name their source relative to its parent."""
    found = importlib.util.find_spec("apache_beam")
    return os.path.dirname(found.origin) + os.sep if found is not None and found.origin else "apache_beam/"


def is_runners(path: str) -> bool:
    """Return whether a file is Luminosity's, Beam's or the interpreter's own."""
    if path.endswith(_COMMAND):
        return os.path.realpath(path) == os.path.realpath(sysconfig.get_path("scripts") + _COMMAND)
    return path.startswith((_OUR_DIRECTORY, _beam_directory(), "<frozen", "apache_beam/"))


def is_installed(path: str) -> bool:
    """Return whether a file belongs to an installed package that is neither Luminosity nor Beam."""
    return path.startswith(_INSTALLED) and not is_runners(path)


def is_users_file(path: str) -> bool:
    """Return whether a file is the user's own: a script, a module beside it, or a notebook's cell."""
    return not is_runners(path) and not path.startswith((*_STANDARD_LIBRARY, *_INSTALLED))


def is_users(frame: FrameType) -> bool:
    """Return whether a frame runs the user's code."""
    path = frame.f_code.co_filename
    # multiprocessing makes the methods of its proxies with exec, in a namespace without a name.
    is_generated = path == "<string>" and "__name__" not in frame.f_globals
    # A compiled module names its source as it lay when it was compiled: pyarrow/error.pxi.
    home = path if os.path.isabs(path) else str(frame.f_globals.get("__file__") or path)
    return not is_generated and is_users_file(path) and is_users_file(home)


def calling_line() -> str:
    """Return the line of the user's code that called the code that calls this, as ``file:line``; or an empty string."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
