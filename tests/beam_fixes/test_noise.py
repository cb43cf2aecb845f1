"""Tests of what is printed when our modules import Beam: nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "code", ["import luminosity, apache_beam", "from luminosity import LuminosityRunner", "import luminosity.cli.main"]
)
def test_importing_beam_after_luminosity_prints_nothing(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, env={**os.environ}
    )
    assert done.stderr == ""


def test_other_messages_of_the_root_logger_stay(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    import luminosity

    assert luminosity.__all__
    logging.warning("something else")
    logging.warning("apitools not found, and more")
    assert caplog.messages == ["something else"]


def test_a_script_sets_up_logging_after_the_imports() -> None:
    code = """
import logging
import luminosity, apache_beam
import apache_beam.io.gcp.internal.clients.bigquery
assert logging.getLogger().handlers == []
logging.basicConfig(level=logging.INFO, format="mine %(message)s")
logging.info("hello")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == "mine hello\n"
