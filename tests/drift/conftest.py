"""Runs the tests of this folder on both runners: drift must not need the engine."""

from tests.both_runners import pipelines, runner_name

__all__ = ["pipelines", "runner_name"]
