"""Hooks of MkDocs: what the site needs and GitHub does not.

Pages are written for GitHub. They link to files outside ``docs``, have hidden setup code in comments, and say after a
code block's language why it does not run. The site gets copies of linked files, and pages without the rest. Where a
page runs ``lum COMMAND --help``, the site shows the output, as the program prints it now.
"""

from __future__ import annotations

import contextlib
import html
import io
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
_SETUP = re.compile(r"^<!-- setup\n.*?^-->\n", re.DOTALL | re.MULTILINE)
_FENCE = re.compile(r"^(\s*```+[a-z]+)([^\n`]*)$", re.MULTILINE)
_HELP = re.compile(r"^```console\n\$ lum (?:([a-z]+) )?--help\n```\n", re.MULTILINE)
_HELP_WIDTH = 88  # columns: what the page shows without scrolling
_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
_PIPED_CODE = re.compile(r"`([^`|]*\\\|[^`]*)`")
_OPTION = re.compile(r"<code>(--?[^<\s]{1,60})</code>")
_TITLE = re.compile(r'title="[^"]*"')


def on_files(files: Files, config: Any) -> Files:
    """Add files outside the folder of the documentation: pages of the navigation, and all that pages link to."""
    pages = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    found = {_ROOT / name: None for name in _names_in(config["nav"]) if (_ROOT / name).exists()}
    pages.extend(found)
    while pages:
        page = pages.pop()
        for _, link, _ in _LINK.findall(page.read_text()):
            target = _target_of(page, link)
            if target is None or target in found or _address_of(target) in files.src_uris:
                continue
            found[target] = None
            if target.suffix == ".md":
                pages.append(target)
    for path in found:
        files.append(File.generated(config, _address_of(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links those of the site, and drop what only the tests of the documentation read."""
    path = Path(page.file.abs_src_path)
    here = os.path.dirname(page.file.src_uri)

    def rewritten(match: re.Match[str]) -> str:
        target = _target_of(path, match[2])
        if target is None:
            return match[0]
        return f"{match[1]}{os.path.relpath(_address_of(target), here or '.')}{match[3]}"

    return for_readers(_HELP.sub(_with_output, _LINK.sub(rewritten, markdown)))


def on_page_content(html: str, **_: Any) -> str:
    """Keep options in one piece: browsers break lines after ``--``."""
    return _OPTION.sub(r'<code class="option">\1</code>', html)


def for_readers(markdown: str) -> str:
    """Return a page without hidden code, and without what stands after a block's language except for its title."""
    markdown = _FENCE.sub(lambda match: " ".join([match[1], *_TITLE.findall(match[2])]), _SETUP.sub("", markdown))
    return _ROW.sub(lambda row: _PIPED_CODE.sub(_as_html, row[0]), markdown)


def _as_html(code: re.Match[str]) -> str:
    """Return code with bars: in a table, Python-Markdown would show the backslashes that escape them."""
    return f"<code>{html.escape(code[1].replace(chr(92) + '|', '|')).replace('|', '&#124;')}</code>"


def _names_in(nav: Any) -> list[str]:
    """Return the files that the navigation names, at any depth."""
    if isinstance(nav, str):
        return [nav]
    return [name for entry in (nav.values() if isinstance(nav, dict) else nav) for name in _names_in(entry)]


def _with_output(block: re.Match[str]) -> str:
    """Return a block that asks ``lum`` for help, with what it prints."""
    from luminosity.cli.main import main

    output = io.StringIO()
    words = [word for word in (block[1], "--help") if word]
    columns = mock.patch.dict(os.environ, {"COLUMNS": str(_HELP_WIDTH)})
    with columns, contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        main(words)
    return f"{block[0].removesuffix('```' + chr(10))}{output.getvalue().rstrip()}\n```\n"


def _target_of(page: Path, link: str) -> Path | None:
    """Return the file of the repository that a link leads to, or None for anything else."""
    target = (page.parent / link).resolve()
    if target.is_dir():
        target /= "README.md"
    return target if target.is_file() and target.is_relative_to(_ROOT) else None


def _address_of(path: Path) -> str:
    """Return where the site has a file of the repository."""
    name = path.relative_to(_ROOT).as_posix()
    return {"README.md": "index.md"}.get(name, name.removeprefix("docs/"))
