"""The files of the page: what a strict content security policy and hostile names demand of them."""

from __future__ import annotations

import re
from pathlib import Path

import luminosity.operate.page

STATIC = Path(luminosity.operate.page.__file__).parent / "static"
MODULES = {path.name: path.read_text() for path in sorted(STATIC.glob("*.js"))}
SHELL = (STATIC / "index.html").read_text()


def test_every_import_is_a_module_that_the_shell_preloads() -> None:
    imported = {name for text in MODULES.values() for name in re.findall(r'from "\./([a-z_]+\.js)"', text)}
    assert imported == set(MODULES) - {"main.js"}
    assert set(re.findall(r'rel="modulepreload" href="/static/([a-z_]+\.js)"', SHELL)) == imported


def test_what_a_module_imports_is_exported() -> None:
    for name, text in MODULES.items():
        for names, source in re.findall(r'import \{ ([^}]+) \} from "\./([a-z_]+\.js)"', text):
            for each in names.split(", "):
                found = re.search(rf"export (async )?(function\*?|class|const) {each}\b", MODULES[source])
                assert found, f"{name}: {source} exports no {each}"
                assert len(re.findall(rf"\b{each}\b", text)) > 1, f"{name} imports {each} and does not use it"


def test_text_never_becomes_markup_and_nothing_is_inline() -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|style:"
    for name, text in MODULES.items():
        assert not re.search(forbidden, text), name
    assert not re.search(r"<style|style=|\son[a-z]+=|<script(?! type=\"module\" src=)", SHELL)
    assert not re.search(r"https?://", SHELL)


def test_a_module_has_one_subject_and_says_which() -> None:
    for name, text in MODULES.items():
        assert text.startswith("// "), name
        assert text.count("\n") < 350, name
