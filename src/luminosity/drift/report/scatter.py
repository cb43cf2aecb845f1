"""The chart of both samples along their first two principal components; for single numbers, two histograms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from luminosity.drift.pca import PCA
from luminosity.report_page.axes import Frame, Scale, drawing, with_room
from luminosity.report_page.markup import Markup, element, joined

__all__ = ["POINTS", "scatter"]

POINTS = 2000  # rows of each sample: more would hide each other
_WIDTH, _HEIGHT = 920.0, 560.0
_FRAME = Frame(left=64, top=44, right=896, bottom=504)
_LOW_FRAME = Frame(left=64, top=44, right=896, bottom=264)
_EDGE = 0.002  # the share of points at either end that may lie beyond the axes; they are drawn at the edge
_ROUNDING = 1e-6  # of the longest axis: a shorter one shows only rounding errors
_BARS = 60  # of a histogram


def scatter(reference: Any, current: Any, marked: tuple[Sequence[int], Sequence[int]], seed: int) -> Markup:
    """Draw random rows of both samples. The ``marked`` rows of each sample get a ring."""
    random = np.random.default_rng((seed, 6))
    samples = [_sampled(rows, random) for rows in (reference, current)]
    if reference.shape[1] == 1:
        return _histograms(*(rows[:, 0] for rows in samples))
    pca = PCA.fit(np.concatenate(samples), 2)
    points = [pca.transform(rows) for rows in samples]
    both = np.concatenate(points)
    x, y = (_scale(both, axis) for axis in (0, 1))
    kinds = np.repeat(["reference", "current"], [len(each) for each in points])
    dots = [_dot(x, y, both[at], f"dot {kinds[at]}", 2.4) for at in random.permutation(len(both))]
    rings = [
        _dot(x, y, point, f"ring {kind}", 6)
        for rows, numbers, kind in zip((reference, current), marked, ("reference", "current"), strict=True)
        if len(numbers)
        for point in pca.transform(rows[list(numbers)])
    ]
    shares = pca.explained_variance_ratio
    return drawing(
        _WIDTH,
        _HEIGHT,
        "Both samples along their first two principal components",
        _FRAME.y_axis(y, f"second principal component, {shares[1]:.0%} of the variance"),
        _FRAME.x_axis(x, f"first principal component, {shares[0]:.0%} of the variance"),
        *dots,
        *rings,
        _legend(len(samples[0]), len(samples[1]), bool(rings)),
    )


def _sampled(rows: Any, random: Any) -> Any:
    return rows if len(rows) <= POINTS else rows[np.sort(random.choice(len(rows), POINTS, replace=False))]


def _scale(points: Any, axis: int) -> Scale:
    """Return the scale of an axis. If rows differ along it only by rounding, it is as long as the other axis."""
    lows, highs = np.quantile(points.astype(np.float64), [_EDGE, 1 - _EDGE], axis=0)
    spans = highs - lows
    span = float(spans[axis] if spans[axis] > _ROUNDING * spans.max() else spans.max())
    middle = float(lows[axis] + highs[axis]) / 2
    low, high = with_room(middle - 0.56 * span, middle + 0.56 * span)
    return (_FRAME.y if axis else _FRAME.x)(low, high)


def _dot(x: Scale, y: Scale, point: Any, kind: str, radius: float) -> Markup:
    across, up = (float(np.clip(value, scale.low, scale.high)) for value, scale in zip(point, (x, y), strict=True))
    return element("circle", cx=x(across), cy=y(up), r=radius, class_=kind)


def _legend(reference: int, current: int, rings: bool) -> Markup:
    entries = [("dot reference", f"reference ({reference:,} rows)"), ("dot current", f"current ({current:,} rows)")]
    parts: list[Markup] = []
    at = _FRAME.right
    for kind, text in reversed([*entries, *([("ring", "rows shown below")] if rings else [])]):
        at -= 7.2 * len(text)
        parts.append(element("text", text, x=at, y=20))
        parts.append(element("circle", cx=at - 12, cy=16, r=5 if kind == "ring" else 4, class_=f"{kind} key"))
        at -= 36
    return joined(parts)


def _histograms(reference: Any, current: Any) -> Markup:
    both = np.concatenate([reference, current]).astype(np.float64)
    low, high = with_room(float(both.min()), float(both.max()))
    edges = np.linspace(low, high, _BARS + 1)
    shares = [np.histogram(each, edges)[0] / len(each) for each in (reference, current)]
    x = _LOW_FRAME.x(low, high)
    y = _LOW_FRAME.y(0, 1.08 * float(max(each.max() for each in shares)))
    lines = [
        element("path", d=_steps(x, y, edges, each), class_=f"{kind} outline")
        for each, kind in zip(shares, ("reference", "current"), strict=True)
    ]
    return drawing(
        _WIDTH,
        320,
        "Histograms of both samples",
        _LOW_FRAME.y_axis(y, "share of rows"),
        *lines,
        _LOW_FRAME.x_axis(x, "value"),
        _legend(len(reference), len(current), rings=False),
    )


def _steps(x: Scale, y: Scale, edges: Any, shares: Any) -> str:
    along = "".join(f"V{y(share):.1f}H{x(edge):.1f}" for share, edge in zip(shares, edges[1:], strict=True))
    return f"M{x(edges[0]):.1f} {y(0):.1f}{along}V{y(0):.1f}"
