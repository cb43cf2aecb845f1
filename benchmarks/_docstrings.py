"""Real text that is on every machine: the docstrings of Python's standard library."""

from __future__ import annotations

import ast
import random
import sysconfig
from pathlib import Path

__all__ = ["docstrings"]


def docstrings(count: int) -> list[str]:
    """The first paragraphs of this many docstrings, in an order that mixes modules; always the same."""
    folder = Path(sysconfig.get_path("stdlib"))
    found: set[str] = set()
    for file in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        if "site-packages" in file.parts or "test" in file.parts:
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue  # Some files of 2to3's and lib2to3's are not Python 3.
        found.update(_first_paragraphs(tree))
    texts = sorted(found)
    random.Random(0).shuffle(texts)
    if len(texts) < count:
        raise SystemExit(f"The standard library here has {len(texts)} docstrings; {count} are wanted.")
    return texts[:count]


def _first_paragraphs(tree: ast.Module) -> list[str]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    whole = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
    return [" ".join(text.split("\n\n")[0].split()) for text in whole if text]
