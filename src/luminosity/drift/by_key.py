"""Compares two samples key by key: one test for each language, customer or product."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from luminosity.drift.contract import Comparison, DriftTest
from luminosity.drift.kernels import Aggregate, Kernel
from luminosity.drift.mmd_drift import MMDDrift
from luminosity.drift.report.page import Contents, key_page
from luminosity.drift.result import Details, DriftResult, PastTest, Progress, Verdict, keys_html
from luminosity.drift.samples import SampledRows, sample_rows
from luminosity.errors import DriftError, InvalidType
from luminosity.report_page.document import write_page

__all__ = ["KeyedComparison", "compare_keys", "compare_keys_with", "key_text"]

_DETAILED = 10  # keys that drifted whose charts and rows a report shows: more would be a page without end
_FEWEST_ROWS = 2  # of a key in each sample, to be tested: the unbiased statistic needs pairs
_ORDER: tuple[Verdict, ...] = ("gone", "new", "drift", "too few rows", "no drift")


@dataclass(frozen=True, eq=False, repr=False)
class KeyedComparison:
    """The results of one test for each key.

    ``results`` has every key of either sample, those that drifted first. ``comparisons`` has the keys that were tested:
    a key that is gone or new, or has a single row in a sample, is not. ``level`` is the false-alarm rate of the whole
    comparison; the level of each result is that rate divided by the number of tested keys (Bonferroni's correction).
    """

    by: str
    results: Mapping[Any, DriftResult]
    comparisons: Mapping[Any, Comparison[Any]]
    level: float

    @property
    def drift(self) -> bool:
        """Whether any key has drifted, is gone or is new."""
        return any(result.drift for result in self.results.values())

    @property
    def verdict(self) -> Verdict:
        """The verdict on all keys: ``"drift"``, ``"no drift"``, or ``"too few rows"`` if no key has enough rows."""
        if self.drift:
            return "drift"
        is_unknown = all(result.verdict == "too few rows" for result in self.results.values())
        return "too few rows" if is_unknown else "no drift"

    def as_past_tests(
        self,
        *,
        reference: str,
        current: str,
        columns: str = "",
        kernel: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> dict[Any, PastTest]:
        """Return the results as rows for a ``DriftHistory``. The arguments are those of ``PastTest.of``."""
        return {
            key: PastTest.of(
                result,
                reference=reference,
                current=current,
                columns=columns,
                kernel=kernel,
                settings=settings,
                key=self.name_of(key),
            )
            for key, result in self.results.items()
        }

    def __str__(self) -> str:
        drifted = sum(result.drift for result in self.results.values())
        first = f"{self.verdict}: {drifted:,} of {len(self.results):,} values of {self.by} drifted"
        width = max(len(key_text(key)) for key in self.results)
        rows = (f"  {key_text(key):<{width}}  {result}" for key, result in self.results.items())
        return "\n".join([first, *rows])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return keys_html({key_text(key): result for key, result in self.results.items()}, self.by)

    def name_of(self, key: Any) -> str:
        """Return the key's name in a history, such as ``language=de``."""
        return f"{self.by}={key_text(key)}"

    def write_report(
        self,
        path: str | os.PathLike[str],
        *,
        names: tuple[str, str] = ("reference", "current"),
        details: tuple[Details, Details] | None = None,
        history: Mapping[Any, Sequence[PastTest]] | None = None,
        settings: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Write an HTML report: a table of all keys, then charts and rows of the first ten keys that drifted.

        The arguments are those of ``SampleComparison.write_report``; ``history`` has the past tests of each key.
        """
        drifted = [key for key in self.comparisons if self.results[key].drift][:_DETAILED]
        detailed: dict[str, Contents] = {}
        for done, key in enumerate(drifted):
            past = (history or {}).get(key, ())
            detailed[key_text(key)] = self.comparisons[key].report_contents(names, details, past, {})
            if progress is not None:
                progress(done + 1, len(drifted))
        shown = {key_text(key): result for key, result in self.results.items()}
        first = next(iter(shown.values()))
        whole = Contents(first, names, settings={"level": self.level, **(settings or {})}, holds="rows of the data")
        write_page(path, key_page(self.by, self.verdict, shown, detailed, whole), DriftError)


def key_text(key: Any) -> str:
    """Return a key as people read it; a row without a key belongs to ``(none)``.

    >>> key_text("de"), key_text(7), key_text(None)
    ('de', '7', '(none)')
    """
    return "(none)" if key is None else str(key)


def compare_keys(
    reference: Mapping[Any, Any],
    current: Mapping[Any, Any],
    kernel: Kernel | Aggregate | Sequence[Kernel | Aggregate] | None = None,
    *,
    by: str = "key",
    rows: int | None = None,
    skip_missing: bool = False,
    scale: bool = False,
    components: int | None = None,
    permutations: int = 1000,
    level: float = 0.05,
    seed: int = 0,
    progress: Progress | None = None,
) -> KeyedComparison:
    """Prepare and test the rows of each key, with the defaults and the results of ``lum drift --by``.

    Args:
      reference: the rows of each key: a matrix, or ``SampledRows``.
      current: likewise. A key that only one sample has is drift.
      kernel: as for ``mmd_test``.
      by: what keys are, for reports: the name of a column.
      rows: compare only this many random rows of each key and sample.
      skip_missing: leave out rows with NaN or infinity. By default they are an error.
      scale: put columns on one scale, for each key.
      components: as for ``compare_samples``, for each key.
      permutations: the permutations of each test; there are more if many keys need them to reach their level.
      level: the false-alarm rate of all tests together: each has this level divided by their number.
      seed: the seed of everything that is random.
      progress: called with the number of keys done and of all keys.

    >>> import numpy as np
    >>> random = np.random.default_rng(0)
    >>> january = {"de": random.normal(size=(200, 3)), "en": random.normal(size=(200, 3)), "fr": np.zeros((90, 3))}
    >>> february = {"de": random.normal(size=(200, 3)), "en": random.normal(1, 1, size=(200, 3))}
    >>> found = compare_keys(january, february, by="language")
    >>> {key: result.verdict for key, result in found.results.items()}
    {'fr': 'gone', 'en': 'drift', 'de': 'no drift'}
    """
    if skip_missing:
        _keys_of(reference, current)
        reference = {key: _usable(each, rows, 2 * seed) for key, each in reference.items()}
        current = {key: _usable(each, rows, 2 * seed + 1) for key, each in current.items()}
    test = MMDDrift(kernel, rows, scale, components, permutations)
    return compare_keys_with(test, reference, current, by=by, level=level, seed=seed, progress=progress)


def compare_keys_with(
    test: DriftTest,
    reference: Mapping[Any, Any],
    current: Mapping[Any, Any],
    *,
    by: str = "key",
    level: float = 0.05,
    seed: int = 0,
    progress: Progress | None = None,
) -> KeyedComparison:
    """Make a test of any kind for each key. Samples are what the test reads; the rest is as for ``compare_keys``."""
    keys = _keys_of(reference, current)
    counts = {
        key: (
            test.rows_of(reference[key]) if key in reference else 0,
            test.rows_of(current[key]) if key in current else 0,
        )
        for key in keys
    }
    tested = [key for key in keys if min(counts[key]) >= _FEWEST_ROWS]
    level_of_each = level / max(1, len(tested))
    test = test.for_level(level_of_each)
    comparisons: dict[Any, Comparison[Any]] = {}
    for done, key in enumerate(tested):
        names = (f"the reference of {by}={key_text(key)}", f"the current sample of {by}={key_text(key)}")
        comparisons[key] = test.compare(reference[key], current[key], level=level_of_each, seed=seed, names=names)
        if progress is not None:
            progress(done + 1, len(tested))
    results: dict[Any, DriftResult] = {
        key: comparisons[key].result
        if key in comparisons
        else test.untested(*counts[key], level=level_of_each, seed=seed)
        for key in keys
    }
    ordered = sorted(results, key=lambda key: (_rank(results[key]), key_text(key)))
    compared = {key: comparisons[key] for key in ordered if key in comparisons}
    return KeyedComparison(by, {key: results[key] for key in ordered}, compared, level)


def _keys_of(reference: Mapping[Any, Any], current: Mapping[Any, Any]) -> list[Any]:
    """Return the keys of both samples. Raises if there are none, or if a sample has no keys."""
    for name, sample in (("reference", reference), ("current", current)):
        if not isinstance(sample, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidType(
                f"found {name} of type {type(sample).__name__}, expected a dict from each key to its rows",
                fix="use compare_samples for samples without keys",
            )
    keys = list(dict.fromkeys([*reference, *current]))
    if not keys:
        raise DriftError("found no rows in either sample, expected at least 2 in each")
    return keys


def _rank(result: DriftResult) -> tuple[int, float, float]:
    return _ORDER.index(result.verdict), result.p_value, -result.strength


def _usable(rows: Any, most: int | None, seed: int) -> SampledRows:
    return rows if isinstance(rows, SampledRows) else sample_rows(rows, most, seed=seed, skip_missing=True)
