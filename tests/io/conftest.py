"""These tests run on both runners, since tables must not need the engine."""

from tests.both_runners import pipelines, runner_name

__all__ = ["pipelines", "runner_name"]
