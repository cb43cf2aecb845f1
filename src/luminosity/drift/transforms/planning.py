"""The step that plans each key's test, or says why there can be none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import TaggedOutput

from luminosity.drift.transforms.failures import FAILED, Failures
from luminosity.drift.transforms.plan import Planner
from luminosity.drift.transforms.summary import Summary
from luminosity.errors import DriftError

__all__ = ["PlanDoFn"]


class PlanDoFn(beam.DoFn):
    """From a key and the current sample's summary to the key and a plan.

    Args:
        is_shared: the reference has no keys, and is that of all.
    """

    def __init__(self, planner: Planner, is_shared: bool, failures: Failures) -> None:
        self._planner = planner
        self._is_shared = is_shared
        self._failures = failures

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
            yield TaggedOutput(FAILED, (key, self._failures.of(error, key, window)))
