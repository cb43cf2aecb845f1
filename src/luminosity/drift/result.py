"""The contract of a test's result: what a command, a report and a watch ask of it, and what a history keeps of it."""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from math import isfinite, nan
from typing import Any, ClassVar, Literal, TypeAlias

from luminosity.report_page.document import STYLE
from luminosity.report_page.markup import Markup, element, joined, plain

__all__ = [
    "COLOURS",
    "DETECTOR",
    "MMD",
    "SAME_ROWS",
    "Details",
    "DriftResult",
    "PastTest",
    "Progress",
    "Verdict",
    "chart_image",
    "keys_html",
    "utc_text",
]

MMD = "mmd"  # the test of a row in a history that names none
DETECTOR = "detector"  # ``settings["kind"]`` of a row that comes from an alert of ``DetectDrift``

Verdict: TypeAlias = Literal["drift", "no drift", "too few rows", "gone", "new"]

Details: TypeAlias = Callable[[Sequence[int]], Sequence[Mapping[str, Any]]]
"""Returns what is known about rows of a sample, by their numbers."""

Progress: TypeAlias = Callable[[int, int], None]
"""Called with how much is done, and how much there is to do."""

SAME_ROWS = "; both samples have the same rows"
_SAID = {
    "drift": "The two samples differ by more than chance explains",
    "no drift": "The test found no difference",
    "too few rows": "There are so few rows that no p-value can be as low as the level, however different they are",
    "gone": "The current sample has no rows",
    "new": "The reference has no rows",
}
COLOURS = {"drift": "#c44500", "no drift": "#00795a"}  # those of the report; verdicts without one are grey
_OTHER = "#5d6877"
_PIXELS = 720  # of a chart in a notebook


class DriftResult(ABC):
    """The result of a test whether two samples come from the same distribution.

    ``effect`` says how far apart the samples are, in the unit ``effect_name``; ``statistic`` is what was tested. If no
    data of these sizes could give drift, ``smallest_p_value`` is above ``level``. Results can be pickled.
    """

    test: ClassVar[str]  # the name of the test, as ``lum drift --test`` and a watch take it
    effect_name: ClassVar[str]  # such as MMD²
    libraries: ClassVar[tuple[str, ...]] = ()  # whose versions a report names, beside NumPy

    p_value: float
    level: float
    statistic: float
    reference_rows: int
    current_rows: int
    smallest_p_value: float

    @property
    @abstractmethod
    def effect(self) -> float:
        """How far apart the samples are; NaN if nothing was compared."""

    @property
    @abstractmethod
    def is_compared(self) -> bool:
        """Whether samples were compared: both had rows enough for the test."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, ``drift`` and ``verdict`` among them."""

    @abstractmethod
    def figures(self) -> str:
        """Return the p-value and the effect in words: ``p = 0.31, MMD² = 0.002``."""

    @property
    def drift(self) -> bool:
        """Whether drift was detected: ``p_value <= level``. A key that only one sample has is drift."""
        return self.p_value <= self.level

    @property
    def verdict(self) -> Verdict:
        """The verdict: ``"drift"``, ``"no drift"``, ``"too few rows"``, ``"gone"`` or ``"new"``.

        ``"too few rows"`` means that no p-value of samples this small can be as low as ``level``. ``"gone"`` and
        ``"new"``, in tests by key, mean that only the reference, or only the current sample, has rows of the key.
        """
        if self.reference_rows and not self.current_rows:
            return "gone"
        if self.current_rows and not self.reference_rows:
            return "new"
        if self.drift:
            return "drift"
        return "too few rows" if self.smallest_p_value > self.level else "no drift"

    @property
    def threshold(self) -> float | None:
        """What the statistic must exceed to be called drift, if the test knows it."""
        return None

    @property
    def setup(self) -> str:
        """How the test was set up, such as its kernels: tests of another setup are another series of a history."""
        return self.test

    @property
    def strength(self) -> float:
        """How strong drift is, to order keys with equal p-values."""
        return self.effect if self.is_compared else 0.0

    def settings(self) -> dict[str, Any]:
        """Return the settings that the test ran with, for a history and a report."""
        return {"level": self.level}

    def said(self) -> str:
        """Return what a report says below the verdict."""
        return f"{_SAID[self.verdict]}: {self.figures()}."

    def facts(self) -> list[tuple[str, str, str]]:
        """Return the boxes at the top of a report: a name, a value and a remark for each."""
        return [
            ("p-value", plain(self.p_value), f"level {plain(self.level)}"),
            (self.effect_name, plain(self.effect), ""),
            ("reference", f"{self.reference_rows:,}", "rows"),
            ("current", f"{self.current_rows:,}", "rows"),
        ]

    def sections(self) -> list[Markup]:
        """Return the sections of a report that need no rows."""
        return []

    def __str__(self) -> str:
        verdict, rows = self.verdict, f"{self.reference_rows:,} against {self.current_rows:,}"
        if verdict == "gone":
            return f"gone: no rows in the current sample, {_count(self.reference_rows)} in the reference"
        if verdict == "new":
            return f"new: no rows in the reference, {_count(self.current_rows)} in the current sample"
        if not self.is_compared:
            return f"too few rows to tell: {rows}, expected at least 2 of each"
        if verdict == "too few rows":
            level = f"{self.level:.3g}"
            return f"too few rows to tell: {rows} can't give p <= {level}, whatever the rows are; {self.figures()}"
        return f"{verdict}: {self.figures()}"

    def _repr_html_(self) -> str:
        verdict, _, rest = str(self).partition(":")
        rows = f" · {self.reference_rows:,} rows against {self.current_rows:,}"
        parts = [element("b", verdict, style=f"color: {_colour(self)}"), f":{rest}", element("span", rows)]
        return element("div", joined(parts), *self.charts())

    def charts(self) -> Sequence[Markup]:
        """Return the charts of a notebook's cell."""
        return []


@dataclass(frozen=True)
class PastTest:
    """One test in a history.

    Tests with the same ``reference``, ``columns``, ``kernel`` and ``key`` can be compared. ``time`` is UTC in ISO 8601.
    ``threshold`` is what the statistic must exceed to be called drift, if the result has that quantile. ``key`` is what
    was tested of the columns, such as ``language=de``, or empty. ``statistic`` and ``mmd2`` are NaN if a key is gone or
    new. ``verdict`` is that of the result.

    These fields are for tests that are repeated, and None where they are unknown: the time interval of the window
    (UTC, ISO 8601), the ``bandwidth`` that ``mmd2`` was computed with, ``floor_mmd2`` (the MMD² of the reference and a
    held-out sample), the path of a ``report``, and ``recorded_at``, the time at which the row was written. Rows with
    the same ``reference``, ``columns``, ``kernel``, ``key`` and ``once`` replace each other.

    ``test`` is the name of the test. Tests other than ``"mmd"`` have their size of effect in ``effect``, in the unit
    ``effect_name``, and NaN for ``mmd2``; ``size`` and ``size_name`` are those of any test.
    """

    time: str
    reference: str
    current: str
    columns: str
    kernel: str
    statistic: float
    threshold: float | None
    mmd2: float
    p_value: float
    level: float
    drift: bool
    reference_rows: int
    current_rows: int
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    key: str = ""
    verdict: str = ""
    window_start: str | None = None
    window_end: str | None = None
    bandwidth: float | None = None
    floor_mmd2: float | None = None
    report: str | None = None
    recorded_at: str | None = None
    once: str | None = None
    test: str = MMD
    effect: float | None = None
    effect_name: str | None = None

    def __post_init__(self) -> None:
        if not self.verdict:
            object.__setattr__(self, "verdict", "drift" if self.drift else "no drift")

    @classmethod
    def of(
        cls,
        result: DriftResult,
        *,
        reference: str,
        current: str,
        columns: str = "",
        kernel: str | None = None,
        settings: Mapping[str, Any] | None = None,
        time: datetime | None = None,
        key: str = "",
    ) -> PastTest:
        """Return the entry for a result.

        ``kernel`` is the test's setup as you requested it, such as a kernel: a bandwidth chosen from the data differs
        between tests.
        """
        return cls(
            time=utc_text(time or datetime.now(timezone.utc)),
            reference=reference,
            current=current,
            columns=columns,
            kernel=kernel if kernel is not None else result.setup,
            statistic=result.statistic,
            threshold=result.threshold,
            mmd2=result.effect if result.test == MMD else nan,
            p_value=result.p_value,
            level=result.level,
            drift=result.drift,
            reference_rows=result.reference_rows,
            current_rows=result.current_rows,
            settings=settings or {},
            key=key,
            verdict=result.verdict,
            test=result.test,
            effect=None if result.test == MMD or not isfinite(result.effect) else result.effect,
            effect_name=None if result.test == MMD else result.effect_name,
        )

    @property
    def size(self) -> float:
        """How far apart the samples are, whatever the test: MMD², or ``effect``. NaN if nothing was compared."""
        return self.mmd2 if self.test == MMD else nan if self.effect is None else self.effect

    @property
    def size_name(self) -> str:
        """What ``size`` is called."""
        return "MMD²" if self.test == MMD else self.effect_name or "effect"

    @property
    def by_detector(self) -> bool:
        """Whether the row is an alert of ``DetectDrift``, which has a threshold and no p-value."""
        return self.settings.get("kind") == DETECTOR

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary."""
        return asdict(self)


def utc_text(time: datetime) -> str:
    """Return a time as histories hold it: UTC in ISO 8601, with milliseconds.

    >>> utc_text(datetime(2030, 1, 2, tzinfo=timezone.utc))
    '2030-01-02T00:00:00.000+00:00'
    """
    return time.astimezone(timezone.utc).isoformat(timespec="milliseconds")


def keys_html(results: Mapping[str, DriftResult], by: str) -> str:
    """Return a table with the verdict of each key, for a notebook."""
    name = next((each.effect_name for each in results.values()), "effect")
    heads = (by, "verdict", "p-value", name, "reference rows", "current rows")
    rows = [
        element(
            "tr",
            element("td", key),
            element("td", result.verdict, style=f"color: {_colour(result)}; font-weight: 600"),
            element("td", plain(result.p_value) if result.is_compared else ""),
            element("td", plain(result.effect)),
            element("td", f"{result.reference_rows:,}"),
            element("td", f"{result.current_rows:,}"),
        )
        for key, result in results.items()
    ]
    head = element("thead", element("tr", *(element("th", name) for name in heads)))
    return element("table", head, element("tbody", *rows))


def chart_image(drawn: Markup, label: str) -> Markup:
    """Return a chart as an image: its style sheet must not apply to the notebook.

    It is always light: a notebook's theme need not be that of the system, and an image can't see it.
    """
    light = STYLE[STYLE.index(":root") : STYLE.index("@media (prefers-color-scheme")].replace("light dark", "light")
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    start = drawn.index(">") + 1
    picture = f"{drawn[:start]}<style>{STYLE}{light}</style>{ground}{drawn[start:]}"
    data = base64.b64encode(picture.encode()).decode()
    return element(
        "img", alt=label, src=f"data:image/svg+xml;base64,{data}", style=f"width: {_PIXELS}px; max-width: 100%"
    )


def _colour(result: DriftResult) -> str:
    return COLOURS["drift"] if result.drift else COLOURS.get(result.verdict, _OTHER)


def _count(rows: int) -> str:
    return "one row" if rows == 1 else f"{rows:,} rows"
