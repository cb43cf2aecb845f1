"""Beam's tests of RunInference, with ours in its place, on Beam's own local runner."""

from __future__ import annotations

from tests.beam_suites.run_inference_suite import our_transform_on, suite

ours = our_transform_on("FnApiRunner", "--runner=FnApiRunner")

globals().update(
    suite(
        {
            "RunInferenceBaseTest.test_run_inference_timeout_does_garbage_collection": (
                "looks at the very second at which the hanging call ends, and the model with it"
            ),
        }
    )
)
