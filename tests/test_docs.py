"""What the documentation shows runs, as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = {
    name: (Path(__file__).parent.parent / "docs" / f"{name}.md").read_text()
    for name in ("drift", "enrich", "models", "tables")
}
SNIPPETS = {
    f"{page} {number}": snippet
    for page, text in PAGES.items()
    for number, snippet in enumerate(re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SNIPPETS)
def test_snippets(name: str, tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(SNIPPETS[name])
    done = subprocess.run(
        [sys.executable, "snippet.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_every_place_that_a_page_names_is_there(page: str) -> None:
    """Links lead to sections of the same page."""
    headings = re.findall(r"^##+ (.*)$", PAGES[page], re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]*)\)", PAGES[page])) <= anchors
