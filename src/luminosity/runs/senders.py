"""What sends the events of a run to other systems, by the value of ``--telemetry``.

The parts that send stand above the runner. So the package names them here when it is imported, each with a function
that imports its part; that happens when a run first uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from luminosity.events import Event

__all__ = ["SENDERS", "TRACEPARENT_OPTION", "MakeSender", "Sender", "sender", "trace_headers"]

TRACEPARENT_OPTION = "luminosity_traceparent"
"""The pipeline option by which code in workers knows the run's span."""


class Sender(Protocol):
    """A subscriber that sends what it gets."""

    @property
    def traceparent(self) -> str:
        """The run's span as a W3C ``traceparent``; empty if the run has no trace."""
        ...

    def __call__(self, event: Event, /) -> None:
        """Take an event, on the thread of its subscription."""
        ...


MakeSender = Callable[["str | None"], "Sender | None"]
"""Gets ``--run_dir``. Returns None if the environment says that nothing is to be sent."""

SENDERS: Final[dict[str, Callable[[], MakeSender]]] = {}
"""What loads the maker of a sender, by the value of ``--telemetry``."""


def sender(kind: str, run_dir: str | None) -> Sender | None:
    """Return the sender of a new run, or None for ``off``.

    Raises :class:`OptionError` if its settings can't be used, and :class:`MissingExtra` if its library is missing.
    """
    return None if kind == "off" else SENDERS[kind]()(run_dir)


def trace_headers() -> dict[str, str]:
    """Return the headers by which a server knows that a request of this worker belongs to the run's trace.

    >>> trace_headers()
    {}
    """
    from apache_beam.options.value_provider import RuntimeValueProvider

    found: str = RuntimeValueProvider.get_value(TRACEPARENT_OPTION, str, "")
    return {"traceparent": found} if found else {}
