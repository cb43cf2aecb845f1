"""What docs/stores.md shows runs, one after the other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

STORES = (Path(__file__).parents[2] / "docs" / "stores.md").read_text()


@pytest.mark.slow
def test_snippets_about_stores(tmp_path: Path) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```$", STORES, re.DOTALL | re.MULTILINE)
    (tmp_path / "snippets.py").write_text("\n".join(snippets))
    done = subprocess.run(
        [sys.executable, "snippets.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "3 rows" in done.stdout
    assert "'text': 'a fine film'" in done.stdout
    assert "'id': 1, 'vector': [0.0, 1.0]" in done.stdout


def test_every_place_that_it_names_is_there() -> None:
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.*)$", STORES, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]*)\)", STORES)) <= headings
