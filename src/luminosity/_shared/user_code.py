"""Tells the user's code from that of Luminosity, Beam, the standard library and installed packages.

With it, tracebacks are shortened to what the user has written and called.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import sysconfig
from functools import cache
from types import FrameType, TracebackType

__all__ = ["calling_line", "fold", "from_user_code", "is_installed", "is_runners", "is_users", "is_users_file"]

_OUR_DIRECTORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # of the whole package
_STANDARD_LIBRARY = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
# May lie inside the standard library's folder.
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
_HEADING = re.compile(r"^\s*(\| )?(\+ )?(Exception Group )?Traceback \(most recent call last\)")
_ENTRY = re.compile(r'^(?P<indent>[\s|]*)File "(?P<path>[^"\n]+)", line \d+')
_COMMAND = os.sep + "lum"  # in the folder of scripts
# transforms/core.py has wrappers around functions.
_RUNS_STEPS = re.compile(r"(^|/)apache_beam/(runners/(common\.py|worker/)|transforms/core\.py)|/luminosity/engine/")


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


def from_user_code(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first frame of the user's code on; the whole one if it has no such frame."""
    found = trace
    while found is not None and not is_users(found.tb_frame):
        found = found.tb_next
    return found or trace


def fold(text: str) -> str:
    """Return a traceback, as text, without the frames of Luminosity and Beam.

    What comes before the first frame of the user's code is left out as well. Of an exception that was raised without
    user code, the frames of installed packages stay, below those of Beam; if Beam itself raised it, those of the step.
    Messages stay as they are.

    >>> beam = 'File "apache_beam/runners/common.py", line 1, in process'
    >>> print(fold(f"Traceback (most recent call last):\\n  {beam}\\n"
    ...     '  File "/me/shop.py", line 2, in parse\\n    return float(text)\\nValueError: no number'))
    Traceback (most recent call last):
      File "/me/shop.py", line 2, in parse
        return float(text)
    ValueError: no number
    >>> print(fold(f"Traceback (most recent call last):\\n  {beam}\\n"
    ...     '  File "apache_beam/transforms/util.py", line 3, in pick\\n    return found[0]\\nIndexError: empty'))
    Traceback (most recent call last):
      File "apache_beam/transforms/util.py", line 3, in pick
        return found[0]
    IndexError: empty
    """
    lines = text.splitlines()
    shown: list[str] = []
    at = 0
    while at < len(lines):
        shown.append(lines[at])
        at += 1
        if not _HEADING.match(shown[-1]):
            continue
        frames: list[tuple[str, list[str]]] = []  # of this exception: the file, and its lines
        while at < len(lines) and (lines[at].startswith((" ", "|")) or not lines[at]):
            found = _ENTRY.match(lines[at])
            if found is not None:
                frames.append((found["path"], []))
            elif not frames or _HEADING.match(lines[at]) or not lines[at].strip():
                break
            frames[-1][1].append(lines[at])
            at += 1
        kept = _kept([path for path, _ in frames])
        shown += [line for index in kept for line in frames[index][1]]
        if frames and not kept:
            del shown[-1]  # the heading
    return "\n".join(shown)


def _kept(paths: list[str]) -> list[int]:
    """Return which frames of an exception say something about the user's code, given the file of each."""
    users = [index for index, path in enumerate(paths) if is_users_file(path)]
    first = users[0] if users else max((i + 1 for i, path in enumerate(paths) if is_runners(path)), default=0)
    kept = [index for index in range(first, len(paths)) if not is_runners(paths[index])]
    if kept or not paths or not _is_beams(paths[-1]):
        return kept
    # A step of Beam's own raised: what follows the code that runs steps says where.
    return [*range(max((i + 1 for i, path in enumerate(paths) if _RUNS_STEPS.search(path)), default=0), len(paths))]


def _is_beams(path: str) -> bool:
    return path.startswith((_beam_directory(), "apache_beam/"))
