"""The step that plans each key's test, or says why there can be none."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.window import GlobalWindow

from luminosity.drift.transforms.plan import Planner
from luminosity.drift.transforms.summary import Summary
from luminosity.errors import DriftError

__all__ = ["FAILED", "PlanDoFn"]

FAILED = "failed"


class PlanDoFn(beam.DoFn):
    """From a key and the current sample's summary to the key and a plan.

    Args:
        by: what the key is called in messages; None: there are no keys.
        is_shared: the reference has no keys, and is that of all.
        gives_failures: instead of raising.
    """

    def __init__(self, planner: Planner, by: str | None, is_shared: bool, gives_failures: bool) -> None:
        self._planner = planner
        self._by = by
        self._is_shared = is_shared
        self._gives_failures = gives_failures

    def process(  # type: ignore[override]
        self,
        element: tuple[Any, Summary],
        references: Any,
        strips: Any,
        window: Any = beam.DoFn.WindowParam,
    ) -> Iterator[Any]:
        key, current = element
        of_reference = None if self._is_shared else key
        reference = next(iter(references[of_reference]), Summary())

        def smallest_hashes() -> Iterable[Any]:
            for strip in range(self._planner.cutting.of_sample(reference)):
                yield from (block.hashes for block in strips[of_reference, strip])

        try:
            yield key, self._planner.plan(reference, current, smallest_hashes)
        except DriftError as error:
            told = DriftError(f"{self._which(key, window)}{error}")
            if not self._gives_failures:
                raise told from error
            lines = traceback.format_exception(type(error), error, error.__traceback__)
            yield TaggedOutput(FAILED, (key, (DriftError, repr(told), lines)))

    def _which(self, key: Any, window: Any) -> str:
        parts = [] if self._by is None else [f"{self._by}={key!r}"]
        if not isinstance(window, GlobalWindow):
            parts.append(f"the window {window}")
        return f"{' in '.join(parts)}: " if parts else ""
