"""Counts lines of Python and their complexity, as the program scc does.

A line is blank, a comment (docstrings are comments) or code. Complexity is the number of keywords that branch: a rough
measure of how much there is to understand and to test, useful to compare two programs that do the same.
"""

from __future__ import annotations

import io
import tokenize
from dataclasses import dataclass
from pathlib import Path

BRANCHES = frozenset({"for", "while", "if", "elif", "else", "match", "try", "except", "finally", "with", "and", "or"})
_LAYOUT = (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING)


@dataclass(frozen=True)
class Count:
    lines: int
    code: int
    comments: int
    blanks: int
    complexity: int


def count(source: str) -> Count:
    """Count the lines of a program.

    >>> count('x = 1  # one\\n\\n# two\\nif x:\\n    print("if")\\n')
    Count(lines=5, code=3, comments=1, blanks=1, complexity=1)
    """
    lines = source.splitlines()
    code: set[int] = set()
    complexity = 0
    starts_a_statement = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and starts_a_statement and token.string.endswith(('"""', "'''"))
        if token.type not in (*_LAYOUT, tokenize.COMMENT) and not is_docstring:
            code.update(range(token.start[0], token.end[0] + 1))
            complexity += token.type == tokenize.NAME and token.string in BRANCHES
        starts_a_statement = token.type in _LAYOUT
    blanks = sum(not line.strip() for number, line in enumerate(lines, start=1) if number not in code)
    return Count(len(lines), len(code), len(lines) - len(code) - blanks, blanks, complexity)


def count_file(path: Path) -> Count:
    return count(path.read_text())
