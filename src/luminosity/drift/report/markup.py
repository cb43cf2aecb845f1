"""HTML and SVG from elements. Text is escaped unless it is markup already, so that no table can write into the page."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

__all__ = ["Markup", "element", "joined"]


class Markup(str):
    """What is HTML already."""


def element(tag: str, *children: str, **attributes: str | float | None) -> Markup:
    """Attributes that are called as Python's words end in ``_``; other underscores stand for hyphens.

    >>> element("td", "a < b", class_="number")
    '<td class="number">a &lt; b</td>'
    >>> element("line", x1=1.0, x2=2.25, stroke_width=2)
    '<line x1="1" x2="2.2" stroke-width="2"></line>'
    """
    told = "".join(
        f' {name.removesuffix("_").replace("_", "-")}="{escape(_value(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{told}>{joined(children)}</{tag}>")


def joined(parts: Iterable[str]) -> Markup:
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def _value(value: str | float) -> str:
    """A tenth of a pixel is fine enough, and short."""
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
