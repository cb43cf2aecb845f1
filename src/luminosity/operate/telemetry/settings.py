"""The settings of OpenTelemetry that a sender follows: the standard variables of the environment.

The exporters of OpenTelemetry's library read the variables of addresses, headers, certificates and compression.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from luminosity.errors import OptionError

__all__ = ["TelemetrySettings"]

_SPANS_EVERY_S = 5.0  # as the standard has it
_METRICS_EVERY_S = 10.0  # the standard's minute is longer than many runs
_TIMEOUT_S = 3.0  # for one sending with its retries; the standard's 10 seconds would keep the end of a run waiting
_PROTOCOL = "http/protobuf"
_SIGNALS = ("traces", "metrics")


@dataclass(frozen=True)
class TelemetrySettings:
    """What is sent, and how often."""

    signals: frozenset[str] = frozenset(_SIGNALS)  # of "traces" and "metrics"
    spans_every_s: float = _SPANS_EVERY_S
    metrics_every_s: float = _METRICS_EVERY_S
    trace_timeout_s: float | None = _TIMEOUT_S  # this and the following: None if the environment says it
    metric_timeout_s: float | None = _TIMEOUT_S

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> TelemetrySettings:
        """Read the variables. Raises :class:`OptionError` for a value that can't be used.

        >>> sorted(TelemetrySettings.of({"OTEL_TRACES_EXPORTER": "none"}).signals)
        ['metrics']
        >>> TelemetrySettings.of({"OTEL_SDK_DISABLED": "true"}).signals
        frozenset()
        """
        given = {name: value.strip() for name, value in environment.items() if name.startswith("OTEL_")}
        if given.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return cls(signals=frozenset())
        signals = frozenset(signal for signal in _SIGNALS if _is_sent(given, signal))
        for signal in signals:
            _check_protocol(given, signal)
        return cls(
            signals,
            _seconds(given, "OTEL_BSP_SCHEDULE_DELAY", _SPANS_EVERY_S),
            _seconds(given, "OTEL_METRIC_EXPORT_INTERVAL", _METRICS_EVERY_S),
            _timeout(given, "TRACES"),
            _timeout(given, "METRICS"),
        )


def _is_sent(given: Mapping[str, str], signal: str) -> bool:
    name = f"OTEL_{signal.upper()}_EXPORTER"
    value = given.get(name) or "otlp"
    if value not in ("otlp", "none"):
        raise OptionError(
            f"{name}={value}: expected otlp or none, because --telemetry=otlp sends by OTLP alone",
            fix=f"leave {name} out",
        )
    return value == "otlp"


def _check_protocol(given: Mapping[str, str], signal: str) -> None:
    names = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    name = next((name for name in names if given.get(name)), "")
    if name and given[name] != _PROTOCOL:
        raise OptionError(
            f"{name}={given[name]}: expected {_PROTOCOL}, the only protocol that --telemetry=otlp speaks",
            fix=f"set it to {_PROTOCOL}, and name the collector's port for it, most often 4318",
        )


def _seconds(given: Mapping[str, str], name: str, default: float) -> float:
    """Return a time that a variable has in milliseconds."""
    value = given.get(name)
    if not value:
        return default
    try:
        seconds = float(value) / 1000
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise OptionError(f"{name}={value}: expected a number of milliseconds above 0, such as 5000")
    return seconds


def _timeout(given: Mapping[str, str], signal: Literal["TRACES", "METRICS"]) -> float | None:
    is_given = given.get(f"OTEL_EXPORTER_OTLP_{signal}_TIMEOUT") or given.get("OTEL_EXPORTER_OTLP_TIMEOUT")
    return None if is_given else _TIMEOUT_S
