"""An extension of Griffe: makes Markdown of docstrings that are written to be read in a terminal."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^( *)>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)
_LITERAL = re.compile(r"^( *)(\S.*)?::\n\n((?:\1 +.*\n|\n)+)", re.MULTILINE)
_ROLE = re.compile(r":(?:class|func|meth|mod|attr):`+([^`]+)`+")


class MarkdownDocstrings(griffe.Extension):
    """Puts doctests and literal blocks into fences, and names of Sphinx's roles into code."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of a class, function, attribute or module."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Return a docstring as Markdown.

    >>> as_markdown("Return the half.\\n\\n>>> half(2)\\n1")
    'Return the half.\\n\\n```pycon\\n>>> half(2)\\n1\\n```'
    """
    text = _LITERAL.sub(_fence_of_literal, text + "\n").removesuffix("\n")
    text = _DOCTEST.sub(lambda match: f"```pycon\n{_dedent(match[0], match[1])}\n```", text)
    return _ROLE.sub(r"`\1`", text)


def _fence_of_literal(match: re.Match[str]) -> str:
    before = f"{match[2]}:\n\n" if match[2] else ""
    lines = match[3].strip("\n").splitlines()
    indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    code = "\n".join(line[indent:] for line in lines)
    return f"{before}```text\n{code}\n```\n\n"


def _dedent(text: str, indent: str) -> str:
    return "\n".join(line.removeprefix(indent) for line in text.splitlines())
