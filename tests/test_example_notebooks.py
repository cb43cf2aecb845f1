"""The notebooks of examples/notebooks run from top to bottom, offline, and find what their texts say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.processes import files_of_runs, wait_for
from tests.runners import IS_REFERENCE

NOTEBOOKS = Path(__file__).parent.parent / "examples" / "notebooks"

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(IS_REFERENCE, reason="the notebooks name their runner"),
]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def run(name: str, folder: Path, *variables: str) -> tuple[str, dict[str, Any]]:
    """Run a notebook in an empty folder; return what it prints and, from one more cell, the values of variables."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    asked = ", ".join(f"{variable!r}: {variable}" for variable in variables)
    notebook.cells.append(nbformat.v4.new_code_cell(f"import json\nprint(json.dumps({{{asked}}}, default=str))"))
    limits: Any = {"timeout": 200, "iopub_timeout": 120}
    before = files_of_runs()
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, kernel_name="python3", resources=resources, **limits).execute()
    assert wait_for(lambda: files_of_runs() <= before, timeout_s=60)
    assert not list(folder.iterdir()), "a notebook writes to a temporary folder, and removes it"
    printed = [
        "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stdout")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    return "".join(printed[:-1]), json.loads(printed[-1])


def test_a_large_model_is_loaded_once(tmp_path: Path) -> None:
    names = ("copies", "shared", "bytes_of_copy", "refusal", "rows")
    printed, found = run("large_models.ipynb", tmp_path, *names)
    assert 1 <= found["copies"] <= 2, "as many as workers that got reviews"
    assert found["shared"] == 1
    assert 90_000_000 < found["bytes_of_copy"] < 92_000_000
    assert "ModelTooLarge" in found["refusal"]
    assert "may take 60 MB together" in found["refusal"]
    assert found["rows"] == [200, 200]
    assert "90 MB each" in printed


def test_models_of_keys_share_memory(tmp_path: Path) -> None:
    names = ("list(accuracy.values())", "runs", "answered", "dead_letters", "len(keys)")
    printed, found = run("models_per_key.ipynb", tmp_path, *names)
    imdb, imdb_elsewhere, tomatoes_elsewhere, tomatoes = found["list(accuracy.values())"]
    assert imdb > tomatoes_elsewhere
    assert tomatoes > imdb_elsewhere
    assert {right for *_, right in found["runs"].values()} == {found["len(keys)"]} == {600}
    all_fit, three_fit, three_at_most = found["runs"].values()
    assert all_fit[:2] == [12, 12]
    for loads, most, _ in (three_fit, three_at_most):
        assert loads >= 12, "each model was loaded at least once"
        assert most == 3
    assert found["answered"] == ["imdb", "rotten_tomatoes"]
    (letter,) = found["dead_letters"]
    assert letter.startswith("imbd: ")
    assert "no model has the key 'imbd'; the KeyedModelHandler maps 'imdb'" in letter
    assert len(re.findall(r"% right$", printed, re.MULTILINE)) == 4


def test_notebooks_are_stored_without_outputs() -> None:
    for path in NOTEBOOKS.glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs"), f"{path.name}: clear all outputs before you commit"
            assert cell.get("execution_count") is None


def test_the_page_and_the_folder_list_every_notebook() -> None:
    there = {path.name for path in NOTEBOOKS.glob("*.ipynb")}
    assert len(there) == 2
    for page in (NOTEBOOKS / "README.md", NOTEBOOKS.parents[1] / "docs" / "notebooks.md"):
        assert set(re.findall(r"([a-z_]+\.ipynb)\)", page.read_text())) == there
