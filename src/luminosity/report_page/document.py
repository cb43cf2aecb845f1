"""A whole page: its document and style sheet, its headline, sections and settings, and the file it is written to.

The colours are light or dark. Colour-blind readers can tell them apart (Okabe and Ito 2008).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from luminosity.errors import LuminosityError
from luminosity.report_page.markup import Markup, element, joined, plain

__all__ = ["STYLE", "document", "headline", "section", "settings_section", "table", "write_page"]

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --panel: #f6f7f9; --ink: #1c2430; --muted: #5d6877;
  --rule: #dde2e8; --reference: #0072b2; --current: #d55e00; --drifted: #c44500; --steady: #00795a; --bar: #9fb0c3;
  --tail: #d9a25c; }
@media (prefers-color-scheme: dark) { :root { --ground: #12161c; --panel: #1a2028; --ink: #e6eaf0; --muted: #98a4b3;
  --rule: #2c3540; --reference: #56b4e9; --current: #f0883e; --drifted: #ff8a4c; --steady: #3fc79a; --bar: #5c6f85;
  --tail: #c58a3c; } }
* { box-sizing: border-box; }

body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 40px 24px 80px; }
h1 { font-size: 34px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 20px; margin: 52px 0 4px; }
h3 { font-size: 15px; margin: 24px 0 8px; }
p { margin: 6px 0 14px; max-width: 72ch; }
.muted { color: var(--muted); fill: var(--muted); }
p.muted { font-size: 14px; }
.verdict { border-left: 6px solid; padding: 6px 0 6px 20px; margin-bottom: 28px; }
.verdict.drifted { border-color: var(--drifted); } .verdict.steady { border-color: var(--steady); }
.verdict.drifted h1 { color: var(--drifted); } .verdict.steady h1 { color: var(--steady); }
.verdict.unknown { border-color: var(--muted); }
td.drifted { color: var(--drifted); font-weight: 600; } td.steady { color: var(--steady); }
td.unknown { color: var(--muted); }
summary { cursor: pointer; margin-top: 52px; } summary h2 { display: inline; } a { color: inherit; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 12px; margin: 20px 0 0; }
.fact { background: var(--panel); border-radius: 8px; padding: 12px 16px; }
.fact dt { color: var(--muted); font-size: 13px; } .fact dd { margin: 2px 0 0; font-size: 21px; font-weight: 600; }
.fact dd small { display: block; font-size: 13px; font-weight: 400; color: var(--muted); }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--muted); font-size: 13px; white-space: nowrap; }
th, td { padding: 7px 14px 7px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
td { overflow-wrap: break-word; } .number { text-align: right; padding-right: 24px; white-space: nowrap; }
.wide { overflow-x: auto; } .wide td:first-child { white-space: nowrap; } .wide td { max-width: 560px; }
.wide td:last-child:not(.number):not(:first-child) { min-width: 280px; }
table.settings th { width: 220px; font-size: 14px; font-weight: 400; vertical-align: top; }
svg { display: block; width: 100%; height: auto;
  font: 12.5px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
svg text { fill: var(--ink); font-variant-numeric: tabular-nums; }
svg text.muted, svg text.title { fill: var(--muted); }
svg.small { display: inline-block; width: auto; vertical-align: -4px; }
svg text.muted { paint-order: stroke; stroke: var(--ground); stroke-width: 5px; stroke-linejoin: round; }
svg .strong { font-weight: 600; font-size: 14px; }
.axis { stroke: var(--muted); stroke-width: 1; } .grid { stroke: var(--rule); stroke-width: 1; }
.bar { fill: var(--bar); } .bar.tail { fill: var(--tail); }
.threshold { stroke: var(--muted); stroke-width: 1.2; stroke-dasharray: 5 4; fill: none; }
.line { fill: none; stroke-width: 2.5; stroke-linecap: round; stroke-linejoin: round; }
.drifted.line { stroke: var(--drifted); } .steady.line { stroke: var(--steady); }
svg text.drifted, .drifted.fill, .drifted.mark { fill: var(--drifted); } svg text.steady { fill: var(--steady); }
.steady.mark { fill: var(--ground); stroke: var(--steady); stroke-width: 2.2; }
.course { fill: none; stroke: var(--bar); stroke-width: 1.6; }
.dot { fill-opacity: 0.5; } .dot.key { fill-opacity: 1; } .reference { fill: var(--reference); }
.current { fill: var(--current); }
.ring { fill: none; stroke: var(--ink); stroke-width: 1.4; }
.outline { fill: none; stroke-width: 2; } .outline.reference { stroke: var(--reference); }
.outline.current { stroke: var(--current); stroke-dasharray: 6 3; }
span.key { display: inline-block; width: 11px; height: 11px; border-radius: 50%; margin-right: 8px; }
span.key.current { background: var(--current); } span.key.reference { background: var(--reference); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 12px 24px; }
.interval { stroke: var(--reference); stroke-width: 2.5; }
.cell { fill: var(--panel); } td small { color: var(--muted); }
@media print { main { max-width: none; } h2 { break-after: avoid; } svg { break-inside: avoid; } }
"""


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
    from importlib.metadata import version

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
