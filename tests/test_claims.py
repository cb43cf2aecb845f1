"""Pages of the documentation do not contradict each other, and their prose is wrapped."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_PAGES = [*sorted((_ROOT / "docs").glob("*.md")), _ROOT / "README.md"]
_LIMITS = _ROOT / "docs" / "limits.md"
# Sentences that say of a feature that it is missing. They belong to one page, so that they are removed in one place.
_DENIAL = re.compile(
    r"not there yet|not supported yet|not (yet )?implemented|does not survive its process|start again from their source"
    r"|(streams?|clusters?|checkpoints?) (are|is) not (yet )?supported",
    re.IGNORECASE,
)


def _missing_names() -> list[str]:
    """Return the names in the second column of the table of missing features."""
    table = _LIMITS.read_text().partition("## Not there yet")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row[2])]


def _denials(text: str) -> list[str]:
    """Return the lines that say that something is missing and do not link to the page of limits."""
    return [line for line in text.splitlines() if _DENIAL.search(line) and "limits.md" not in line]


def test_what_limits_calls_missing_is_described_nowhere() -> None:
    names = _missing_names()
    assert names
    described = {
        (name, page.name)
        for name in names
        for page in _PAGES
        if page != _LIMITS and re.search(rf"`[^`\n]*(?<![\w-]){re.escape(name)}(?!\w)[^`\n]*`", page.read_text())
    }
    assert described == set()


def test_what_limits_calls_missing_is_not_in_the_package() -> None:
    import luminosity
    from luminosity._shared.flags import MODEL_FLAGS, RUNNER_FLAGS

    there = {*luminosity.__all__, *(f"--{flag.name}" for flag in (*RUNNER_FLAGS, *MODEL_FLAGS))}
    assert there.isdisjoint(_missing_names())


def test_only_the_page_of_limits_says_that_something_is_missing() -> None:
    found = {page.name: lines for page in _PAGES if page != _LIMITS and (lines := _denials(page.read_text()))}
    assert found == {}


def test_denials_are_found() -> None:
    assert _denials("What is not there yet: streams.\nA run does not survive its process.\nIt runs.") == [
        "What is not there yet: streams.",
        "A run does not survive its process.",
    ]
    assert _denials("This is not there yet, see [limits](limits.md).") == []


def test_prose_is_wrapped_at_120_columns() -> None:
    pages = [
        *_ROOT.glob("*.md"),
        *_ROOT.glob("docs/*.md"),
        *_ROOT.glob("examples/*/*.md"),
        *_ROOT.glob("benchmarks/*.md"),
    ]
    long: list[str] = []  # an address can't be wrapped
    for page in pages:
        prose = re.sub(r"^ *(`{3,}).*?^ *\1$|<!--.*?-->", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        long += [
            f"{page.name}: {line}"
            for line in prose.splitlines()
            if len(re.sub(r"\(https?://\S+", "", line)) > 120 and line.lstrip()[0] not in "|!"
        ]
    assert long == []
