"""The extras: what messages tell to install, and the lists of them in the documentation."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from luminosity import extras
from luminosity.cli.main import main
from luminosity.errors import MissingExtra

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_ROOT = Path(__file__).parents[1]
_FOR_DEVELOPERS = {"dev", "docs", "test"}


def _declared() -> set[str]:
    declared = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return set(declared) - _FOR_DEVELOPERS


def test_the_list_of_extras_is_complete() -> None:
    started = (_ROOT / "docs/getting-started.md").read_text().partition("| extra |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in started.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == _declared()


def test_no_page_names_a_package_that_no_index_has() -> None:
    pages = [*_ROOT.glob("docs/*.md"), *_ROOT.glob("examples/*/README.md"), *_ROOT.glob("src/luminosity/**/*.py")]
    found = [
        page.name
        for page in pages
        if re.search(r"pip install '?luminosity(\[[\w,]+\])?'?(?! @)[` \n\"]", page.read_text())
    ]
    assert found == []


def test_a_missing_library_names_what_its_extra_consists_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in _declared() - {"demo"}:
        command = extras.install_command(extra)
        assert re.fullmatch(r"pip install( '[\w.-]+(\[\w+\])?([<>=]=?[\d.]+)?')+", command)
        assert "luminosity" not in command
    assert extras.install_command("ui") == (
        "pip install 'prometheus-client>=0.20' 'starlette>=0.40' 'uvicorn>=0.30'"  # of the extras metrics and serve
    )
    monkeypatch.setattr(extras, "_OURS", "no-such-package")
    with pytest.raises(MissingExtra, match=r"pip install '\.\[jax\]' in the checkout of luminosity"):
        extras.require("no_such_library", "jax")


def test_drift_without_jax_says_so_before_it_reads_or_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    history = tmp_path / "history.sqlite"
    assert main(["drift", "no-such.parquet", "no-such.parquet", "--history", str(history)]) == 1
    told = capsys.readouterr().err
    assert "lum drift: jax is not installed; install the extra jax of luminosity: pip install 'jax>=0.6'" in told
    assert not history.exists()
