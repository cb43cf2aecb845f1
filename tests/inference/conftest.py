"""These run on both runners, since nothing here may need the engine, and ask no hub for anything."""

import os

from tests.both_runners import pipelines, runner_name

__all__ = ["pipelines", "runner_name"]

os.environ["HF_HUB_OFFLINE"] = "1"
