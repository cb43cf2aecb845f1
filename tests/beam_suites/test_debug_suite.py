"""Beam's own suite for its local runner, in debug mode: everything in this process, on this thread."""

from __future__ import annotations

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner import fn_runner_test

from tests.runners import IS_REFERENCE, new_pipeline

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does"),
]


class DebugTest(fn_runner_test.FnApiRunnerTest):
    def create_pipeline(self, is_drain: bool = False) -> beam.Pipeline:
        return new_pipeline("--debug", is_drain=is_drain)

    # Each waits 14 s for a source that ticks; run with the other suites, which take the same way through the loop.
    test_pardo_et_timer_with_no_firing = None
    test_pardo_et_timer_with_no_reset = None
    test_pardo_et_timer_with_no_reset_and_no_clear = None
