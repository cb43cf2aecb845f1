"""A whole page: its document, its headline, its sections and settings, and the file that it is written to."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from typing import Any

from luminosity.errors import LuminosityError
from luminosity.report_page.markup import Markup, element, joined, plain
from luminosity.report_page.style import STYLE

__all__ = ["document", "headline", "section", "settings_section", "table", "write_page"]


def document(title: str, sections: Sequence[Markup]) -> str:
    """Return a whole HTML document with these sections."""
    head = element(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", title),
        element("style", Markup(STYLE)),
    )
    body = element("body", element("main", *sections))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def headline(verdict: str, kind: str, names: str, said: str, facts: Iterable[tuple[str, str, str]]) -> Markup:
    """Return the verdict with an explanation, and boxes of facts below it: name, value and a remark for each.

    ``kind`` is the colour: ``drifted``, ``steady`` or ``unknown``.
    """
    muted = element("p", names, class_="muted")
    verdict_box = element("div", element("h1", verdict), muted, element("p", said), class_=f"verdict {kind}")
    boxes = [
        element("div", element("dt", name), element("dd", value, element("small", more)), class_="fact")
        for name, value, more in facts
    ]
    return joined([verdict_box, element("dl", *boxes, class_="facts")])


def section(title: str, said: str, *parts: Markup) -> Markup:
    """Return a section with a heading and an explanation."""
    return element("section", element("h2", title), element("p", said, class_="muted"), *parts)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[str] = ()) -> Markup:
    """Return a table that scrolls if it is too wide. The columns whose heads are in ``numbers`` are aligned right."""
    right = [name in set(numbers) for name in heads]
    kinds = ["number" if each else None for each in right]
    head = element("tr", *(element("th", name, class_=kind) for name, kind in zip(heads, kinds, strict=True)))
    body = [
        element("tr", *(element("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)))
        for row in rows
    ]
    return element("div", element("table", element("thead", head), element("tbody", *body)), class_="wide")


def settings_section(settings: Mapping[str, Any], libraries: Sequence[str], holds: str = "") -> Markup:
    """Return the section that lists settings, the versions of these libraries, and the time.

    ``holds`` says what the page shows of the data, so that its readers treat it like the data.
    """
    shown = {
        **{str(name): _setting(value) for name, value in settings.items() if value is not None},
        "versions": ", ".join(f"{name} {version(name)}" for name in libraries),
        **({"holds": f"{holds}: share this page only with those who may read the data"} if holds else {}),
        "created": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
    }
    rows = [element("tr", element("th", name), element("td", value)) for name, value in shown.items()]
    listed = element("table", element("tbody", *rows), class_="settings")
    return element("section", element("h2", "Settings"), listed)


def write_page(path: str | os.PathLike[str], text: str, error: type[LuminosityError], what: str = "the report") -> None:
    """Write the whole file or nothing: an existing file stays until the new one is complete.

    A page shows values of the data. So a new file can be read by those who can enter its folder, if the umask allows
    it, and a file that is replaced keeps its mode. If it can't be written, ``error`` is raised, which names ``what``
    was to be written.
    """
    target = os.path.realpath(path)
    is_special = os.path.exists(target) and not os.path.isfile(
        target
    )  # such as /dev/stdout, which must not be replaced
    unfinished = target if is_special else f"{target}.{os.getpid()}.unfinished"
    try:
        try:
            with open(unfinished, "w", encoding="utf-8", errors="replace", opener=_opener(target)) as file:
                file.write(text)
            if not is_special:
                os.replace(unfinished, target)
        finally:
            if not is_special and os.path.exists(unfinished):
                os.remove(unfinished)
    except OSError as cause:
        raise error(f"{path}: can't write {what} there; {cause.strerror}") from cause


def _opener(target: str) -> Callable[[str, int], int]:
    """Return a function that opens a file which takes the place of ``target``, with the mode that it should have."""

    def opened(path: str, flags: int) -> int:
        if os.path.exists(target):
            descriptor = os.open(path, flags, 0o600)
            if path != target:
                os.fchmod(descriptor, stat.S_IMODE(os.stat(target).st_mode))
            return descriptor
        folder = os.stat(os.path.dirname(target)).st_mode
        others = (0o060 if folder & stat.S_IXGRP else 0) | (0o006 if folder & stat.S_IXOTH else 0)
        return os.open(path, flags, 0o600 | others)

    return opened


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return plain(float(value), 4)
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
