"""The resource hint ``python_environment``: the Python environment in which the workers of a step run.

Importing this module registers the hint with Beam, beside ``min_ram`` and the others. Other runners ignore it.

>>> import apache_beam as beam
>>> step = beam.Map(str).with_resource_hints(python_environment="/envs/old")
"""

from __future__ import annotations

import os
from typing import Any

from apache_beam.transforms.resources import ResourceHint

__all__ = ["PYTHON_ENVIRONMENT", "PYTHON_ENVIRONMENT_URN", "PythonEnvironmentHint"]

PYTHON_ENVIRONMENT = "python_environment"
PYTHON_ENVIRONMENT_URN = "luminosity:resources:python_environment:v1"


class PythonEnvironmentHint(ResourceHint):
    """The folder of a virtual environment, or a Python executable. The hint of the innermost transform wins."""

    urn = PYTHON_ENVIRONMENT_URN

    @classmethod
    def parse(cls, value: Any) -> dict[str, bytes]:
        """Return the absolute path. Raises ValueError for anything but a path, as Beam expects."""
        if not isinstance(value, str | os.PathLike) or not os.fspath(value):
            raise ValueError("expected the path of a virtual environment")
        path = os.path.abspath(os.path.expanduser(os.fspath(value)))
        return {PYTHON_ENVIRONMENT_URN: os.fsencode(path)}


ResourceHint.register_resource_hint(PYTHON_ENVIRONMENT, PythonEnvironmentHint)
