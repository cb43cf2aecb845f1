"""Luminosity makes Apache Beam pipelines deliver what the machine can do."""

from luminosity.core import WorkerShare
from luminosity.engine.options import LuminosityOptions
from luminosity.engine.runner import LuminosityRunner
from luminosity.errors import LuminosityError

__all__ = ["LuminosityError", "LuminosityOptions", "LuminosityRunner", "WorkerShare"]
