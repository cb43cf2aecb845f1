"""The ``__main__`` of processes that a worker's code spawns with multiprocessing: Beam's model manager spawns some.

A spawned process imports the main module of its parent under the name ``__mp_main__`` and uses it as ``__main__``. For
a worker that module is this one: it defines the classes of the user's script, as in the worker.
"""

from __future__ import annotations

import logging
import os
import sys


def _prepare() -> None:
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.addFilter(_is_worth_reading)
    logging.basicConfig(handlers=[handler], format=logging.BASIC_FORMAT)
    from luminosity.engine.workers import worker_files
    from luminosity.engine.workers.sdk import beam_models

    beam_models.keep_files_in(os.environ[beam_models.FOLDER_VARIABLE])
    worker_files.load(os.environ[worker_files.FILE_VARIABLE], into=sys.modules[__name__])


def _is_worth_reading(record: logging.LogRecord) -> bool:
    """Return False for what Beam says whenever a shared object's process starts, or ends with its worker."""
    return record.module != "multi_process_shared" or record.levelno >= logging.ERROR


if __name__ == "__mp_main__":
    _prepare()
