"""Tests that fail: they raise an error, or become elements of a second output."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any, TypeAlias

from apache_beam.transforms.window import GlobalWindow

from luminosity.errors import DriftError

__all__ = ["FAILED", "Failure", "Failures"]

FAILED = "failed"  # the tag of the output for failures

Failure: TypeAlias = tuple[type[DriftError], str, list[str]]
"""What Beam's ``with_exception_handling`` gives: the exception's type, its text and its traceback."""


@dataclass(frozen=True)
class Failures:
    """Says which test failed. ``by`` is the name of keys in messages, or None if there are no keys.

    Failures are raised, unless ``are_returned`` is true.
    """

    by: str | None
    are_returned: bool

    def of(self, error: DriftError, key: Any, window: Any) -> Failure:
        """Return the failure of a key in a window, or raise it."""
        named = DriftError(f"{self._which(key, window)}{error.message}", fix=error.fix)
        if not self.are_returned:
            raise named from error
        return (
            DriftError,
            repr(named),
            traceback.format_exception(type(error), error, error.__traceback__),
        )

    def _which(self, key: Any, window: Any) -> str:
        parts = [] if self.by is None else [f"{self.by}={key!r}"]
        if not isinstance(window, GlobalWindow):
            parts.append(f"the window {window}")
        return f"{' in '.join(parts)}: " if parts else ""
