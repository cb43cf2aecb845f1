"""Prints for ``lum drift`` the verdict or JSON, and describes the settings for the HTML report."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from luminosity.cli.common.exits import print_ignoring_closed_pipe
from luminosity.cli.common.output import json_text
from luminosity.cli.drift.sources import Source
from luminosity.drift.by_key import KeyedComparison, key_text
from luminosity.drift.contract import DriftTest
from luminosity.drift.result import DriftResult

__all__ = [
    "describe_settings",
    "keyed_result",
    "print_verdict",
    "print_verdicts",
    "settings_of",
    "whole_result",
]

_MOST_KEYS = 50  # lines of values: those that drifted come first


def print_verdict(result: DriftResult, settings: Mapping[str, Any], seconds: float, as_json: bool) -> None:
    """Print one line, such as ``no drift: p = 0.31, …``, or the whole result as JSON."""
    print_ignoring_closed_pipe(
        json_text(whole_result(result, settings, seconds)) if as_json else _line(result, settings, seconds)
    )


def _line(result: DriftResult, settings: Mapping[str, Any], seconds: float) -> str:
    rows = f"{result.reference_rows:,} rows against {result.current_rows:,}{_skipped(settings)}"
    return f"{result} · {rows} · {seconds:.1f} s"


def _skipped(settings: Mapping[str, Any]) -> str:
    """Return how many rows ``--skip-missing`` left out, or nothing if it left out none."""
    skipped = settings["rows_skipped"]
    return " · {:,} and {:,} rows with missing values skipped".format(*skipped) if any(skipped) else ""


def print_verdicts(found: KeyedComparison, settings: Mapping[str, Any], seconds: float, as_json: bool) -> None:
    """Print a line for all keys and one for each key, or the whole results as JSON."""
    if as_json:
        print_ignoring_closed_pipe(json_text(keyed_result(found, settings, seconds)))
        return
    drifted = sum(result.drift for result in found.results.values())
    read = "{:,} rows against {:,}".format(*settings["rows_read"]) + _skipped(settings)
    verdict = "too few rows to tell" if found.verdict == "too few rows" else found.verdict
    lines = [
        f"{verdict}: {drifted:,} of {len(found.results):,} values of {found.by} drifted · {read} · {seconds:.1f} s"
    ]
    width = max(len(key_text(key)) for key in found.results)
    for key, result in list(found.results.items())[:_MOST_KEYS]:
        rows = f" · {result.reference_rows:,} rows against {result.current_rows:,}" if result.is_compared else ""
        lines.append(f"  {key_text(key):<{width}}  {result}{rows}")
    if len(found.results) > _MOST_KEYS:
        lines.append(f"  and {len(found.results) - _MOST_KEYS:,} more; --json and --report show all")
    print_ignoring_closed_pipe("\n".join(lines))


def keyed_result(found: KeyedComparison, settings: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return the results of all keys and the settings as plain values."""
    keys = [{"key": key, **result.as_dict()} for key, result in found.results.items()]
    whole = {"drift": found.drift, "verdict": found.verdict, "by": found.by, "level": found.level, "keys": keys}
    return {**whole, "settings": settings, "seconds": round(seconds, 3)}


def whole_result(result: DriftResult, settings: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return the result and the settings as plain values."""
    return {**result.as_dict(), "settings": settings, "seconds": round(seconds, 3)}


def settings_of(
    parsed: argparse.Namespace, test: DriftTest, sources: tuple[Source, Source], prepared: Mapping[str, Any]
) -> dict[str, Any]:
    """Return settings that are not in the result of a test: files, columns, preparation of rows, versions, device."""
    return {
        "reference": parsed.reference,
        "current": parsed.current,
        "columns": _columns(sources),
        **({"by": parsed.by} if parsed.by is not None else {}),
        "test": test.name,
        **test.settings(),
        **prepared,
        "rows_asked_for": parsed.rows,
        **_surroundings(test),
    }


def describe_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with names and values for people."""
    shown = {name: value for name, value in settings.items() if name != "test"}  # The report names the test itself.
    described = {name.replace("_", " "): value for name, value in shown.items() if value not in (None, "")}
    described["rows skipped"] = "{:,} and {:,}".format(*settings["rows_skipped"])
    described["rows read"] = "{:,} and {:,}".format(*settings["rows_read"])
    del described["versions"]  # The report lists the versions itself.
    return described


def _columns(sources: tuple[Source, Source]) -> str:
    """Return the compared columns; of both tables, if their only columns of vectors have different names."""
    return " against ".join(dict.fromkeys(", ".join(each.columns) for each in sources if each.columns))


def _surroundings(test: DriftTest) -> dict[str, Any]:
    from importlib.metadata import version

    names = ("luminosity", *test.libraries, "numpy")
    found: dict[str, Any] = {"versions": {name: version(name) for name in names}}
    return {**found, "device": _device()} if "jax" in test.libraries else found


def _device() -> str:
    import jax

    device = jax.devices()[0]
    return f"{jax.device_count()} of {device.device_kind}" if jax.device_count() > 1 else str(device.device_kind)
