"""What ``lum drift`` says about a test."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from luminosity.cli.drift.sources import Compared
from luminosity.drift.result import MMDTestResult

__all__ = ["Stages", "as_json", "as_told", "settings_of", "verdict"]


def settings_of(parsed: argparse.Namespace, compared: Compared) -> dict[str, Any]:
    """What a test can't say of itself."""
    samples, pca = compared.samples, compared.pca
    return {
        "reference": parsed.reference,
        "current": parsed.current,
        "columns": _columns(compared),
        "kernel": _asked_kernel(parsed),
        "width": int(samples[0].rows.shape[1]),
        "components": None if pca is None else len(pca.components),
        "explained_variance": None if pca is None else round(float(pca.explained_variance_ratio.sum()), 4),
        "rows_asked_for": parsed.rows,
        "rows_read": [sample.read for sample in samples],
        "rows_skipped": [sample.skipped for sample in samples],
        "versions": {name: version(name) for name in ("luminosity", "jax", "numpy")},
        "device": _device(),
    }


def _columns(compared: Compared) -> str:
    """Of both, where the only vectors of one table have another name than those of the other."""
    return " against ".join(dict.fromkeys(", ".join(each.columns) for each in compared.sources if each.columns))


def _device() -> str:
    import jax

    device = jax.devices()[0]
    return f"{jax.device_count()} of {device.device_kind}" if jax.device_count() > 1 else str(device.device_kind)


def _asked_kernel(parsed: argparse.Namespace) -> str:
    bandwidths = ",".join(format(each, "g") for each in parsed.bandwidth)
    return f"{parsed.kernel}({bandwidths})" if bandwidths else parsed.kernel


def as_told(settings: Mapping[str, Any]) -> dict[str, Any]:
    told = {name.replace("_", " "): value for name, value in settings.items() if value not in (None, "")}
    told["rows skipped"] = "{:,} and {:,}".format(*settings["rows_skipped"])
    told["rows read"] = "{:,} and {:,}".format(*settings["rows_read"])
    del told["versions"]  # The page says them anyway.
    return told


def as_json(result: MMDTestResult, settings: Mapping[str, Any], seconds: float) -> str:
    return json.dumps(_strict({**result.as_dict(), "settings": settings, "seconds": round(seconds, 3)}), indent=2)


def _strict(value: Any) -> Any:
    """JSON has no NaN, whatever Python writes."""
    if isinstance(value, Mapping):
        return {str(name): _strict(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def verdict(result: MMDTestResult, seconds: float) -> str:
    return f"{result} · {result.reference_rows:,} rows against {result.current_rows:,} · {seconds:.1f} s"


class Stages:
    """One line on standard error that says what is done now, gone when all is."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (
            TimeElapsedColumn(),
            BarColumn(24),
            TextColumn("{task.description}"),
            TextColumn("{task.fields[more]}"),
            TimeRemainingColumn(compact=True),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task: TaskID | None = None

    def __enter__(self) -> Stages:
        self._progress.start()
        self.begin("starting")
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()

    def begin(self, what: str) -> TaskID:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, total=None, more="")
        return self._task

    def rows(self, what: str) -> Callable[[int], None]:
        """To be called with the rows done so far."""
        task = self.begin(what)
        return lambda done: self._progress.update(task, more=f"{done:,} rows")

    def tiles(self, what: str) -> Callable[[int, int], None]:
        """To be called with what is done and with all there is to do."""
        task = self.begin(what)
        return lambda done, in_all: self._progress.update(task, completed=done, total=in_all)
