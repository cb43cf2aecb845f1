"""What the documentation shows runs, as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

MODELS = (Path(__file__).parent.parent / "docs" / "models.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", MODELS, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippets_about_models(number: int, tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(SNIPPETS[number])
    done = subprocess.run(
        [sys.executable, "snippet.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_every_place_that_models_names_is_there() -> None:
    """The table at the top leads to sections of the page."""
    headings = re.findall(r"^## (.*)$", MODELS, re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]*)\)", MODELS)) <= anchors
