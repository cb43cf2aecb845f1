"""Beam's tests of RunInference, with ours in its place, on our runner."""

from __future__ import annotations

from tests.beam_suites.run_inference_suite import our_transform_on, suite
from tests.runners import beam_test_options

ours = our_transform_on("LuminosityRunner", beam_test_options("--cpu_workers=1"))

globals().update(
    suite(
        {
            "RunInferenceBaseTest.test_env_vars_set_correctly": "looks for a worker's variable in the caller",
            "RunInferenceBaseTest.test_runinference_loads_same_model_with_identifier_multi_process_shared": (
                "counts calls of the model as if all elements were in one bundle"
            ),
            "RunInferenceBaseTest.test_increment_failed_batches_counter": "expects ValueError, not StepFailed",
        },
        # They sleep, and on FnApiRunner they run always.
        slow={
            "RunInferenceBaseTest.test_run_inference_timeout_does_garbage_collection",
            "RunInferenceBaseTest.test_run_inference_timeout_not_hit",
            "RunInferenceBaseTest.test_run_inference_timeout_on_inference_dlq",
            "RunInferenceBaseTest.test_run_inference_timeout_on_load_dlq",
            "RunInferenceBaseTest.test_model_status_provides_valid_garbage_collection",
            "RunInferenceRemoteTest.test_repeated_requests_fail",
            "RunInferenceRemoteTest.test_run_inference_with_rate_limiter",
            "RunInferenceRemoteTest.test_works_on_retry",
        },
    )
)
