"""These run on both runners, since nothing here may need the engine."""

from tests.both_runners import pipelines, runner_name

__all__ = ["pipelines", "runner_name"]
