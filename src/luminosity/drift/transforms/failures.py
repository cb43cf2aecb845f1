"""What becomes of a test that can't be made: the end of the pipeline, or an element beside the results."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any, TypeAlias

from apache_beam.transforms.window import GlobalWindow

from luminosity.errors import DriftError

__all__ = ["FAILED", "Failure", "Failures"]

FAILED = "failed"

Failure: TypeAlias = tuple[type[DriftError], str, list[str]]
"""As Beam has them: the exception's type, its text and its traceback."""


@dataclass(frozen=True)
class Failures:
    """``by`` is what the key is called in messages; None: there are no keys. Unless they are given, they are raised."""

    by: str | None
    are_given: bool

    def of(self, error: DriftError, key: Any, window: Any) -> Failure:
        told = DriftError(f"{self._which(key, window)}{error}")
        if not self.are_given:
            raise told from error
        return DriftError, repr(told), traceback.format_exception(type(error), error, error.__traceback__)

    def _which(self, key: Any, window: Any) -> str:
        parts = [] if self.by is None else [f"{self.by}={key!r}"]
        if not isinstance(window, GlobalWindow):
            parts.append(f"the window {window}")
        return f"{' in '.join(parts)}: " if parts else ""
