"""Plans a test from the summaries of both samples, with exactly the choices that two arrays with ids get.

Samples are cut into strips, so that many workers can compare them: each pair of strips is a tile, one element. The hash
of a row decides its strip, as it decides its bin, independent of all other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.internal import pickler
from apache_beam.pvalue import TaggedOutput

from luminosity.drift.distances import SAMPLE_ROWS
from luminosity.drift.kernels import Aggregate, Kernel
from luminosity.drift.mmd.exact import any_rows_apart, centre_of, kernel_offsets
from luminosity.drift.pca import PCA, PCASums
from luminosity.drift.rows import is_whole
from luminosity.drift.sums.bins import BinCounts, hashed_bins, most_rows, plan_bins
from luminosity.drift.transforms.each_key import FAILED, Failures
from luminosity.drift.transforms.summary import HashedRows, Summary
from luminosity.errors import DriftError

__all__ = ["UNTESTED", "Cutting", "Part", "Plan", "PlanDoFn", "Planner", "Recipe", "strip_of"]


@dataclass(frozen=True)
class StripCounts:
    """The number of strips of each sample. The reference's strips come first.

    If the current sample has no strips, its rows are in the reference's only strip.
    """

    reference: int
    current: int

    @property
    def all(self) -> int:
        """The number of strips of both samples."""
        return self.reference + self.current

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Return all pairs of strips, each pair once, and each strip with itself.

        >>> list(StripCounts(1, 1).tiles())
        [(0, 0), (0, 1), (1, 1)]
        """
        return ((first, second) for first in range(self.all) for second in range(first, self.all))

    def tiles_of(self, strip: int) -> Iterator[tuple[int, int]]:
        """Return the tiles that a strip is part of.

        >>> list(StripCounts(2, 1).tiles_of(1))
        [(0, 1), (1, 1), (1, 2)]
        """
        return ((min(strip, other), max(strip, other)) for other in range(self.all))

    def numbers(self, hashes: Any, of_reference: bool) -> Any:
        """Return the strip of each row."""
        if of_reference or self.current == 0:
            return strip_of(hashes, self.reference)
        return strip_of(hashes, self.current) + self.reference


@dataclass(frozen=True)
class Cutting:
    """Decides the number of strips: few, because each row is sent to as many tiles; enough for all workers."""

    few_rows: int = 16_384  # rows of both samples: one worker compares them in about a second
    strip_rows: int = 8_192  # rows of a strip
    enough_strips: int = 32  # strips of one sample: both samples have two thousand tiles
    strip_bytes: int = 24 << 20  # bytes of a strip; wide rows may need more strips

    def of_sample(self, sample: Summary) -> int:
        """Return the number of strips of one sample."""
        by_rows = min(self.enough_strips, -(-sample.rows // self.strip_rows))
        return max(1, by_rows, -(-sample.rows * sample.bytes_per_row // self.strip_bytes))

    def of_both(self, reference: Summary, current: Summary) -> StripCounts:
        """Return the number of strips of both samples."""
        strips = self.of_sample(reference), self.of_sample(current)
        are_few = strips == (1, 1) and reference.rows + current.rows <= self.few_rows
        return StripCounts(1, 0) if are_few else StripCounts(*strips)


CUTTING = Cutting()


def strip_of(hashes: Any, strips: int) -> Any:
    """Return the strip of each hash. A strip is a range of hashes, the smallest hashes come first."""
    return ((hashes >> np.uint64(32)) * np.uint64(strips) >> np.uint64(32)).astype(np.int64)


UNTESTED = "untested"  # the tag of the output for keys that too few rows, or only one sample, have


@dataclass(frozen=True)
class Recipe:
    """The computation to do with prepared rows. Kernels are pickled by Beam, since users' functions may be lambdas."""

    bins: BinCounts
    offsets: tuple[float, ...]
    pickled: bytes

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The unpickled kernels."""
        return _kernels(self.pickled)


@lru_cache(maxsize=64)
def _kernels(pickled: bytes) -> tuple[Kernel, ...]:
    """Return the same objects each time: code compiled for a function is kept as long as the function."""
    return pickler.loads(pickled)


@dataclass(frozen=True)
class Part:
    """Prepared rows of one strip, and their bins."""

    strip: int
    bins: Any
    rows: Any


@dataclass(frozen=True)
class Plan:
    """The plan of one key and window. Rows of the reference with a hash above ``last`` are left out."""

    recipe: Recipe
    strips: StripCounts
    centre: Any
    precision: str
    pca: PCA | None
    last: int | None

    def parts(self, rows: HashedRows, of_reference: bool) -> Iterator[Part]:
        """Prepare rows of one sample, and yield those of each strip."""
        if of_reference and self.last is not None:
            rows = rows.take(rows.hashes <= np.uint64(self.last))
        if not len(rows):
            return
        bins = self.recipe.bins
        of_row = (
            hashed_bins(rows.hashes, bins.reference)
            if of_reference
            else hashed_bins(rows.hashes, bins.current) + bins.reference
        )
        values = rows.rows if self.pca is None else self.pca.transform(rows.rows, self.precision)  # type: ignore[arg-type]
        values = (values - self.centre).astype(self.precision)
        strips = self.strips.numbers(rows.hashes, of_reference)
        for strip in np.unique(strips).tolist():
            here = strips == strip
            yield Part(strip, of_row[here].astype(np.int16), values[here])


@dataclass(frozen=True)
class Planner:
    """Plans tests. ``bins`` is None if nothing is permuted: then each sample has one bin."""

    kernels: Sequence[Kernel | Aggregate]
    bins: int | None
    precision: str
    components: int | None
    cutting: Cutting = field(default_factory=lambda: CUTTING)

    def __post_init__(self) -> None:
        if self.components is not None and (not is_whole(self.components) or self.components < 1):
            raise DriftError(f"found pca={self.components!r}, expected the number of components, 1 or more")

    def plan(self, reference: Summary, current: Summary, smallest_hashes: Callable[[], Iterable[Any]]) -> Plan:
        """Return the plan for a key, or raise an error if its samples can't be compared.

        ``smallest_hashes`` returns the hashes of the reference's rows, strip by strip. It is called if the reference
        has too many rows.
        """
        reference.check("the reference")
        current.check("the current sample")
        self._same_width(reference, current)
        used, last = self._used(reference.rows, current.rows, smallest_hashes)
        pca = self._pca(reference, current)
        sample = _pooled(reference, current)
        if pca is not None:
            sample = pca.transform(sample, self.precision).astype(np.float64)  # type: ignore[arg-type]
        centre = centre_of(self.kernels, sample)
        apart = any_rows_apart(sample) if _all_equal(reference, current) else sample - centre
        kernels = tuple(each for kernel in self.kernels for each in kernel.resolved_all(apart))
        offsets = tuple(kernel_offsets(kernels, sample - centre))
        bins = BinCounts(1, 1) if self.bins is None else plan_bins(used, current.rows, self.bins)
        recipe = Recipe(bins, offsets, pickler.dumps(kernels))
        return Plan(recipe, self.cutting.of_both(reference, current), centre, self.precision, pca, last)

    def _same_width(self, reference: Summary, current: Summary) -> None:
        if reference.widths != current.widths:
            (of_reference,), (of_current,) = reference.widths, current.widths
            raise DriftError(
                f"the reference has rows of {of_reference} numbers, the current sample of {of_current}, expected one "
                "width; perhaps they come from different models"
            )

    def _used(
        self, reference: int, current: int, smallest_hashes: Callable[[], Iterable[Any]]
    ) -> tuple[int, int | None]:
        """Return how many rows of the reference are compared, and the hash of the last of them."""
        if self.bins is None:
            return reference, None
        if current > most_rows(reference):
            raise DriftError(
                f"the current sample has {current:,} rows, the reference {reference:,}, expected at most "
                f"{most_rows(reference):,} rows in the current sample",
                fix="use a larger reference, or part of the current sample",
            )
        most = most_rows(current)
        if reference <= most:
            return reference, None
        found = np.empty(0, dtype=np.uint64)
        for hashes in smallest_hashes():
            found = np.concatenate([found, hashes])
            if len(found) >= most:
                break
        return most, int(np.partition(found, most - 1)[most - 1])

    def _pca(self, reference: Summary, current: Summary) -> PCA | None:
        """Fit components to both samples together: those of the reference alone would tell the samples apart."""
        if self.components is None:
            return None
        assert reference.sums is not None
        assert current.sums is not None
        pooled = PCASums()
        pooled.merge(reference.sums)
        pooled.merge(current.sums)
        # A key with few rows has no more directions than rows; it must not fail the tests of all other keys.
        return pooled.pca(min(self.components, pooled.count))


def _all_equal(reference: Summary, current: Summary) -> bool:
    ends = (reference.low, reference.high, current.low, current.high)
    return all(np.array_equal(reference.low, each) for each in ends)


def _pooled(reference: Summary, current: Summary) -> Any:
    """Return the rows of smallest hash in both samples."""
    assert reference.sample is not None
    assert current.sample is not None
    hashes = np.concatenate([reference.sample.hashes, current.sample.hashes])
    rows = np.concatenate([reference.sample.rows, current.sample.rows])
    return rows[np.argsort(hashes, kind="stable")[:SAMPLE_ROWS]].astype(np.float64)


class PlanDoFn(beam.DoFn):
    """Turns a key and the summary of its current sample into the key and a plan, or a failure.

    ``is_shared`` means that the reference has no keys, and that all keys are compared with it. ``reports_untested``
    means that keys with fewer than two rows in a sample are no failures: the output ``UNTESTED`` gets the key and the
    numbers of rows of the reference and the current sample.
    """

    def __init__(self, planner: Planner, is_shared: bool, reports_untested: bool, failures: Failures) -> None:
        self._planner = planner
        self._is_shared = is_shared
        self._reports_untested = reports_untested
        self._failures = failures

    def process(  # type: ignore[override]
        self,
        element: tuple[Any, Summary],
        references: Any,
        strips: Any,
        window: Any = beam.DoFn.WindowParam,
    ) -> Iterator[Any]:
        """Plan the test of one key, or report a failure if its samples can't be compared."""
        key, current = element
        of_reference = None if self._is_shared else key
        reference = next(iter(references[of_reference]), Summary())
        is_comparable = bool(reference.bad or current.bad) or min(reference.rows, current.rows) >= 2
        if self._reports_untested and not is_comparable:
            yield TaggedOutput(UNTESTED, (key, (reference.rows, current.rows)))
            return

        def smallest_hashes() -> Iterable[Any]:
            for strip in range(self._planner.cutting.of_sample(reference)):
                yield from (rows.hashes for rows in strips[of_reference, strip])

        try:
            yield key, self._planner.plan(reference, current, smallest_hashes)
        except DriftError as error:
            yield TaggedOutput(FAILED, (key, self._failures.of(error, key, window)))
