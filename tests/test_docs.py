"""The documentation runs as it stands, and its links lead somewhere.

``tests/docs_pages.py`` says how to write a page.
"""

from __future__ import annotations

import doctest
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from luminosity.cli.main import main
from tests.docs_pages import REPOSITORY, Page, find_pages, prepare_folder
from tests.warm import add_command, run_module

PAGES = {page.name: page for page in find_pages()}
RUNNING = [name for name, page in PAGES.items() if any(block.runs for block in page.blocks)]

# Pages that take longer than 10 seconds on two cores.
SLOW = {
    "docs/api-events.md",
    "docs/api.md",
    "docs/bench.md",
    "docs/debugging.md",
    "docs/describe.md",
    "docs/drift.md",
    "docs/enrich.md",
    "docs/errors.md",
    "docs/evaluate.md",
    "docs/getting-started.md",
    "docs/index.md",
    "docs/inference.md",
    "docs/lum-drift.md",
    "docs/lum-enrich.md",
    "docs/memory.md",
    "docs/models.md",
    "docs/moving-over.md",
    "docs/options.md",
    "docs/plan.md",
    "docs/progress.md",
    "docs/prompts.md",
    "docs/remote.md",
    "docs/reproduce.md",
    "docs/serving.md",
    "docs/stores.md",
    "docs/streaming.md",
    "docs/tables.md",
    "docs/tutorial-drift.md",
    "docs/tutorial-tables.md",
    "docs/yaml.md",
    "examples/drift/README.md",
    "examples/reviews/README.md",
    "examples/talks/README.md",
    "README.md",
}

# Languages of blocks that hold data or output: nothing to run.
_DATA = {"css", "csv", "dot", "html", "ini", "json", "sql", "text", "toml", "xml", "yaml"}
_ATTRIBUTES = {"exit", "no-run", "output", "title"}
_PAGE_TIMEOUT_S = 280  # less than pytest's limit for a test, so that the page's output is shown


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RUNNING])
def test_page_runs(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    page = PAGES[name]
    script = prepare_folder(tmp_path, page)
    commands = tmp_path_factory.mktemp("commands")
    add_command(commands, "lum", "luminosity.cli.main")
    path = os.pathsep.join([str(commands), os.path.dirname(sys.executable), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"}
    done = run_module(script.name, cwd=tmp_path, env=environment, timeout=_PAGE_TIMEOUT_S)
    if done.returncode:
        pytest.fail(f"{place_of_failure(page, script.name, done.stderr)}\n{done.stderr[-6000:]}", pytrace=False)
    for block in page.blocks:
        if block.attributes.get("output") == "exact":
            for line in block.code.splitlines():
                assert line in done.stdout, f"{name}:{block.line}: the page does not print {line!r}"
    if any("print" in block.code for block in page.blocks if block.runs):
        assert done.stdout


def place_of_failure(page: Page, script: str, stderr: str) -> str:
    """Say which line and which block of a page failed."""
    lines = re.findall(rf'File "(?:[^"]*/)?{re.escape(script)}", line (\d+)', stderr)
    if not lines:
        return f"{page.name} failed"
    line = int(lines[-1])
    block = max((block.line for block in page.blocks if block.runs and block.line <= line), default=1)
    return f"{page.name}:{line} failed, in the block that begins at line {block}"


@pytest.mark.parametrize("name", PAGES)
def test_every_block_runs_or_says_why_not(name: str) -> None:
    for block in PAGES[name].blocks:
        place = f"{name}:{block.line}"
        assert block.language, f"{place}: found a block without a language; use a fence with python, console or text"
        assert block.is_runnable or block.language in _DATA, f"{place}: unknown language {block.language!r}"
        assert set(block.attributes) <= _ATTRIBUTES, f"{place}: unknown words after the language: {block.info}"
        plain = re.sub(r'[a-z-]+="[^"]*"', "", block.info).split()
        assert plain == [block.language], f"{place}: unknown words after the language: {block.info}"
        if "no-run" in block.attributes:
            assert len(block.attributes["no-run"]) > 10, f"{place}: say why the block can't run"
        elif block.language == "console":
            assert list(block.commands()), f"{place}: found no line that begins with '$ '; use text for output"


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    page = PAGES[name]
    for link in page.links:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        assert target.exists(), f"{name}: {link}: there is no {target}"
        assert target.is_relative_to(REPOSITORY), f"{name}: {link} leads out of the repository"
        if anchor and target.suffix == ".md":
            anchors = PAGES[str(target.relative_to(REPOSITORY))].anchors
            assert anchor in anchors, f"{name}: {link}: there is no such heading, only {sorted(anchors)}"


def test_code_points_to_pages_that_exist() -> None:
    """Messages and docstrings name pages: ``docs/limits.md``."""
    for path in sorted((REPOSITORY / "src").rglob("*.py")):
        for page, anchor in re.findall(r"\bdocs/([a-z-]+\.md)(?:#([\w-]+))?", path.read_text()):
            assert (REPOSITORY / "docs" / page).exists(), f"{path}: docs/{page}"
            assert not anchor or anchor in PAGES[f"docs/{page}"].anchors, f"{path}: docs/{page}#{anchor}"


def test_a_failure_names_the_page_and_the_block(tmp_path: Path) -> None:
    text = "# Title\n\n```python\nx = 1\n```\n\n<!-- setup\ny = 0\n-->\n\n```python\nx += 1\nx / y\n```\n"
    page = Page(REPOSITORY / "docs" / "not-there.md", text)
    (tmp_path / "page.py").write_text(page.script().replace("import _page; ", ""))
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, check=False)

    place = place_of_failure(page, "page.py", done.stderr)
    assert place == "docs/not-there.md:13 failed, in the block that begins at line 12"


def load_asset(name: str) -> ModuleType:
    """Import a Python file that the site's configuration names."""
    specification = importlib.util.spec_from_file_location(name, REPOSITORY / "docs" / "assets" / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", PAGES)
def test_the_site_shows_code_and_titles_but_no_notes_for_the_tests(name: str) -> None:
    from markdown import Markdown

    page = PAGES[name]
    markdown = Markdown(extensions=["pymdownx.highlight", "pymdownx.superfences", "tables"])
    shown = markdown.convert(load_asset("hooks").for_readers(page.text))
    visible = [block for block in page.blocks if block.language != "setup"]
    assert shown.count('<div class="highlight">') == len(visible)
    assert "```" not in shown
    for word in ("no-run=", "&lt;!-- setup", "<!-- setup"):
        assert word not in shown
    for block in visible:
        assert block.attributes.get("title", "") in shown


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_fetches_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=_PAGE_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for path in (tmp_path / "site").rglob("*.html"):
        fetched = re.findall(r'<(?:script|img|iframe)[^>]* src="?(https?://[^" >]+)', path.read_text())
        fetched += re.findall(r'<link[^>]* href="?(https?://[^" >]+)', path.read_text())
        assert not fetched, f"{path} fetches {fetched}"


def test_bars_in_code_of_tables_have_no_backslash_in_the_site() -> None:
    shown = load_asset("hooks").for_readers("| option |\n|---|\n| `--a=x\\|y` or `z` |\n")
    assert shown.splitlines()[2] == "| <code>--a=x&#124;y</code> or `z` |"


def test_docstrings_become_markdown() -> None:
    """The site's reference shows doctests and literal blocks as code."""
    docstrings = load_asset("docstrings")
    assert doctest.testmod(docstrings).failed == 0
    assert docstrings.as_markdown("Before::\n\n    a  b\n\nAfter :class:`X`.") == (
        "Before:\n\n```text\na  b\n```\n\nAfter `X`."
    )


def test_every_command_has_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = re.search(r"^  COMMAND\n((?:    .*\n)+)", capsys.readouterr().out, re.MULTILINE)
    assert listed is not None
    commands = re.findall(r"^    ([a-z]+(?: [a-z]+)?)(?:  |$)", listed[1], re.MULTILINE)
    sections = PAGES["docs/commands.md"].anchors - {"commands"}
    assert {f"lum-{command.replace(' ', '-')}" for command in commands} == sections
