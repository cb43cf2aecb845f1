"""Lines of a notebook's cells, named as the notebook names them."""

from __future__ import annotations

import re
import sys
from typing import Any

_LINE = re.compile(r'File "([^"\n]+)", line (\d+)')


def with_cells_named(text: str) -> str:
    """``text`` with each ``File "…", line 2`` that is in a cell written as ``Cell In[3], line 2``."""
    return _LINE.sub(lambda found: _cell_line(found[1], found[2]) or found[0], text)


def place(location: str) -> str:
    """``location``, which is a file and a line, as a person knows it."""
    path, _, line = location.rpartition(":")
    return _cell_line(path, line) or location


def _cell_line(path: str, line: str) -> str:
    ipython: Any = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    label = shell and shell.compile.format_code_name(path)  # None where it is not a cell's
    return f"{' '.join(label)}, line {line}" if label else ""
