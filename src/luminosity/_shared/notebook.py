"""Notebooks and terminals: which of them this process has, what a notebook is called, and how it shows errors.

IPython is never imported here: in a kernel it is loaded already.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from luminosity._shared.user_code import is_users_file

__all__ = [
    "cell_line",
    "is_in_ipython",
    "is_terminal",
    "kernel_shell",
    "name_cells",
    "notebook_name",
    "notebook_path",
    "render_error",
    "shorten_error",
]

_TRACEBACK_LINE = re.compile(r'File "([^"\n]+)", line (\d+)')
_ENTRY = re.compile(r'^  (?:File "(?P<path>[^"\n]+)"|Cell In)')
_CELL = re.compile(r"^  Cell In\[(\d+)\], line (\d+)")
_RED, _PLAIN = "\x1b[31m", "\x1b[0m"  # IPython's own tracebacks are coloured in the same way


def is_in_ipython() -> bool:
    """Return whether this process runs cells: a notebook's kernel, or IPython in a terminal."""
    return _shell() is not None


def kernel_shell() -> Any | None:
    """Return IPython's shell if this process is the kernel of a notebook, otherwise None."""
    shell = _shell()
    return shell if getattr(shell, "kernel", None) is not None else None


def notebook_name() -> str:
    """Return the file name of the notebook: ``notebook`` if it is not known, empty outside of notebooks."""
    return os.path.basename(notebook_path())


def notebook_path() -> str:
    """Return the path of the notebook, ``notebook`` if it is not known, or an empty string outside of notebooks.

    VS Code tells the name in a variable, Jupyter and papermill in the environment.
    """
    shell = kernel_shell()
    if shell is None:
        return ""
    told = (
        shell.user_ns.get("__vsc_ipynb_file__"),
        os.environ.get("JPY_SESSION_NAME"),
        os.environ.get("PAPERMILL_INPUT_PATH"),
    )
    return next((path for path in told if path and path.endswith(".ipynb")), "notebook")


def name_cells(text: str) -> str:
    """Return ``text`` with each ``File "…", line 2`` of a notebook's cell written as ``Cell In[3], line 2``."""
    return _TRACEBACK_LINE.sub(lambda found: cell_line(found[1], found[2]) or found[0], text)


def cell_line(path: str, line: str) -> str:
    """Return a line as the user knows it, ``Cell In[3], line 2``, or an empty string if ``path`` is not a cell."""
    shell = _shell()
    label = shell and shell.compile.format_code_name(path)  # None for a file that is not a cell
    return f"{' '.join(label)}, line {line}" if label else ""


def render_error(error: BaseException, ending: str, trace: str = "") -> list[str]:
    """Return what a notebook shows for an error: the frames of the user's code, then ``ending``.

    ``trace`` is the traceback of another process; by default, the frames are those of the error itself.
    """
    if not trace:
        frames = traceback.extract_tb(error.__traceback__)
        trace = name_cells("".join(traceback.format_list(frames)))
    heading = f"{_RED}{type(error).__name__}{_PLAIN}"
    return [heading, *_users_entries(trace.splitlines()), ending]


def shorten_error(error: BaseException, ending: str) -> None:
    """Let a notebook show an error that is not ours, such as that of its stop button, as :func:`render_error` does."""
    if kernel_shell() is not None:
        error.__dict__["_render_traceback_"] = lambda: render_error(error, ending)  # IPython calls it


def _users_entries(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a traceback's entries that belong to the user's code.

    A worker does not know the text of cells; it is added here.
    """
    is_users = False
    for line, following in zip(lines, [*lines, ""][1:], strict=True):
        found = _ENTRY.match(line)
        if found is not None:
            path = found["path"]
            is_users = path is None or is_users_file(path)
        elif not line.startswith("    "):
            is_users = False  # a heading, or the exception itself
        if is_users:
            yield line
            if not following.startswith("    ") and (text := _text_of_cell(line)):
                yield f"    {text}"


def _text_of_cell(entry: str) -> str:
    """Return the line of the cell that an entry of a traceback names, or an empty string."""
    found, shell = _CELL.match(entry), _shell()
    if found is None or shell is None:
        return ""
    cells: Sequence[str] = shell.user_ns.get("In", ())
    lines = cells[int(found[1])].splitlines() if int(found[1]) < len(cells) else []
    return lines[int(found[2]) - 1].strip() if int(found[2]) <= len(lines) else ""


def _shell() -> Any | None:
    # While another thread imports IPython, the module is there without its names: then this is no notebook.
    get_ipython: Any = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython and get_ipython()


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether ``stream`` is a terminal. Also works if the program closed its standard streams or has none."""
    return stream is not None and not stream.closed and stream.isatty()
