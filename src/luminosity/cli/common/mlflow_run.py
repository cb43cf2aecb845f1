"""Results of commands as runs of an experiment in MLflow, for ``--mlflow EXPERIMENT``."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, TypeVar

from luminosity._shared.text import first_line
from luminosity.cli.common.exits import FAILED, fail
from luminosity.cli.common.output import json_text
from luminosity.errors import ModelUnavailable, OptionError
from luminosity.extras import require
from luminosity.runs.manifest.masking import mask_text

__all__ = ["MlflowRun", "add_mlflow_option"]

_MOST_METRICS = 1_000  # what MLflow takes at once; all are in the file of the whole result
_MOST_SETTINGS = 100
_MOST_CHARACTERS = 500  # of a setting; older servers take no more
_NOT_IN_NAMES = re.compile(r"[^\w. -]")
_LONGEST_NAME = 120  # characters of a group or a name; MLflow takes 250 of both
T = TypeVar("T")
_REASON_CHARACTERS = 300


def add_mlflow_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--mlflow`` to the parser of a command."""
    parser.add_argument(
        "--mlflow",
        metavar="EXPERIMENT",
        help="also log the whole result as a run of this experiment; MLFLOW_TRACKING_URI names the server",
    )


class MlflowRun:
    """Where the result of a command goes."""

    def __init__(self, command: str, experiment: str | None) -> None:
        """Check that MLflow is there, before any work is done. Without an experiment, nothing is logged.

        Raises ``MissingExtra``, ``OptionError`` or ``ModelUnavailable``.
        """
        self._command = command
        self._experiment = experiment
        self._began_ms = int(time.time() * 1000)
        if experiment is None:
            return
        if not experiment.strip():
            raise OptionError("--mlflow is empty, expected the name of an experiment; perhaps a variable is not set")
        mlflow = require("mlflow", "mlflow")
        from luminosity.inference.registry.mlflow_registry import check_reachable

        check_reachable(mlflow.get_tracking_uri())
        try:
            mlflow.MlflowClient().get_experiment_by_name(experiment)  # which fails where a run can't be logged
        except Exception as error:  # of the server, the store or the network
            raise ModelUnavailable(
                f"MLflow can't be used: {_reason(error)}", fix="check MLFLOW_TRACKING_URI", may_pass=True
            ) from None

    def log(
        self,
        name: str,
        metrics: Mapping[str, Any],
        settings: Mapping[str, Any],
        result: Mapping[str, Any],
        report: str | None,
        exit_code: int,
    ) -> int:
        """Log a result, and return the exit code: ``exit_code``, or 1 if MLflow does not take it.

        What is no finite number is left out of the metrics; ``result`` has it.
        """
        if self._experiment is None:
            return exit_code
        import importlib.metadata  # not for --help: it takes a while

        mlflow = require("mlflow", "mlflow")
        numbers = _named({each: float(value) for each, value in metrics.items() if _is_number(value)})
        known = _named({each: mask_text(str(value)) for each, value in settings.items() if value not in (None, "")})
        tags = {
            "mlflow.runName": f"{self._command} {mask_text(name)}"[:_MOST_CHARACTERS],
            "luminosity.command": self._command,
            "luminosity.version": importlib.metadata.version("luminosity"),
            "luminosity.exit_code": str(exit_code),
        }
        try:
            client = mlflow.MlflowClient()
            found = client.get_experiment_by_name(self._experiment)
            experiment = client.create_experiment(self._experiment) if found is None else found.experiment_id
            run = client.create_run(experiment, start_time=self._began_ms, tags=tags).info.run_id
            for each, value in list(known.items())[:_MOST_SETTINGS]:
                client.log_param(run, each, value[:_MOST_CHARACTERS])
            now = int(time.time() * 1000)
            logged = [mlflow.entities.Metric(*each, now, 0) for each in list(numbers.items())[:_MOST_METRICS]]
            client.log_batch(run, metrics=logged)
            client.log_text(run, json_text(_masked(result)), "result.json")
            if report:
                client.log_artifact(run, os.path.abspath(report))
            client.set_terminated(run, "FINISHED")
        except Exception as error:  # of the server, the store or the network
            return fail(self._command, f"the result is not in MLflow: {_reason(error)}", FAILED)
        if len(numbers) > _MOST_METRICS:
            print(
                f"lum {self._command}: MLflow has the first {_MOST_METRICS:,} of {len(numbers):,} metrics, and all in "
                "result.json",
                file=sys.stderr,
            )
        return exit_code


def _reason(error: Exception) -> str:
    return first_line(mask_text(str(error)), _REASON_CHARACTERS) or type(error).__name__


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _named(values: Mapping[str, T]) -> dict[str, T]:
    """Return values with names that MLflow takes, which may be those of files: GROUP/NAME or NAME.

    >>> _named({"missing/a/b": 1, "missing/é €": 2, "missing/é $": 3, "missing/..": 4})
    {'missing/a_b': 1, 'missing/é _': 2, 'missing/é _ 2': 3, 'missing/_': 4}
    """
    found: dict[str, T] = {}
    for text, value in values.items():
        parts = [_NOT_IN_NAMES.sub("_", part)[:_LONGEST_NAME] for part in text.split("/", 1)]
        name = "/".join("_" if not part.strip(". ") else part for part in parts)
        count = 1
        while name in found:  # another name has become the same
            count += 1
            name = f"{name.removesuffix(f' {count - 1}')} {count}"
        found[name] = value
    return found


def _masked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _masked(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(each) for each in value]
    return mask_text(value) if isinstance(value, str) else value
