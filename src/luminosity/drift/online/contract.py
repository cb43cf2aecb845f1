"""What every detector of drift in a stream does."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["OnlineDetector"]


@runtime_checkable
class OnlineDetector(Protocol):
    """Rows go in, a verdict comes out; the same rows give the same verdict, one at a time or many at once."""

    def update(self, batch: Any) -> None:
        """Take in one row, or several, in the order in which they came. If they are no rows, nothing changes."""
        ...

    @property
    def drift_detected(self) -> bool:
        """Whether there was an alarm; it stays until `reset()`."""
        ...

    def reset(self) -> None:
        """Begin again, as new."""
        ...
