"""Colours and fonts of the pictures, for light and dark viewers."""

from __future__ import annotations

from collections.abc import Sequence

from luminosity.engine.resources.pools import Pool

__all__ = ["FONT", "SMALL_PX", "STEP_PX", "TITLE_PX", "pool_classes", "stylesheet"]


TITLE_PX, STEP_PX, SMALL_PX = 17, 13, 11
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"

# Fill and stroke for light viewers, then for dark ones.
_PALETTE = (
    ("#e3eefc", "#2f6fc4", "#14304f", "#6aa5ee"),  # blue: the first CPU pool
    ("#fdecd8", "#c46a12", "#46290b", "#eea35a"),  # orange: the first pool with devices
    ("#e2f3e6", "#2f8a4e", "#10361f", "#63c487"),
    ("#efe6fb", "#7a4cc2", "#2f1d4d", "#b08ef0"),
    ("#dff2f2", "#1f8585", "#0c3535", "#5cc4c4"),
    ("#fde4ea", "#c23a5e", "#471424", "#f07f9d"),
)
_RESERVED = 2  # the first two colours are for these pools only

_LIGHT = f"""\
.background {{ fill: #ffffff }}
text {{ fill: #1f2937; font-size: {STEP_PX}px }}
.title {{ font-size: {TITLE_PX}px; font-weight: 600 }}
.number {{ font-weight: 700 }}
.small {{ font-size: {SMALL_PX}px; fill: #566173 }}
.stage {{ stroke-width: 1.5 }}
.reason {{ fill: #ffffff; stroke: #8a94a6 }}
.link {{ fill: none; stroke: #6b7587; stroke-width: 1.5 }}
.head {{ fill: #6b7587 }}
.side {{ stroke-dasharray: 5 4 }}
.inner {{ stroke-dasharray: 0.5 4; stroke-linecap: round }}
"""
_DARK = """\
.background { fill: #0f141b }
text { fill: #e6edf3 }
.small { fill: #a3afbf }
.reason { fill: #1c232d; stroke: #7d8899 }
.link { stroke: #94a0b2 }
.head { fill: #94a0b2 }
"""


def stylesheet() -> str:
    """Return the CSS of a picture; the viewer's colour scheme chooses between light and dark."""
    light = "".join(f".pool{i} {{ fill: {p[0]}; stroke: {p[1]} }}\n" for i, p in enumerate(_PALETTE))
    dark = "".join(f".pool{i} {{ fill: {p[2]}; stroke: {p[3]} }}\n" for i, p in enumerate(_PALETTE))
    return f"{_LIGHT}{light}@media (prefers-color-scheme: dark) {{\n{_DARK}{dark}}}\n"


def pool_classes(pools: Sequence[Pool]) -> list[str]:
    """Return the CSS class of each pool. The first CPU pool and the first device pool look alike in every picture."""
    chosen: list[int] = []
    for pool in pools:
        usual = 1 if pool.device_groups else 0
        others = len(_PALETTE) - _RESERVED
        chosen.append(_RESERVED + len(chosen) % others if usual in chosen else usual)
    return [f"pool{index}" for index in chosen]
