"""RunInference as users see it, on both runners."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.ml.inference.base import KeyedModelHandler, ModelHandler, PredictionResult
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms import window

from luminosity import Handler, RunInference
from luminosity.inference.adapting.adapt import ModelSet
from luminosity.inference.steps.dofns import InferDoFn, PrepareDoFn
from luminosity.inference.steps.messages import PreparedBlock, StepSettings
from luminosity.testing import FakeDevice, FakeDeviceHandler
from tests.both_runners import Pipelines, counters


class Squares(ModelHandler[int, PredictionResult, str]):
    """A plain handler of Beam's."""

    def load_model(self) -> Any:
        return object()

    def run_inference(self, batch: Sequence[int], model: Any, inference_args: Any = None) -> Iterator[PredictionResult]:
        power = (inference_args or {}).get("power", 2)
        return (PredictionResult(example, example**power, "squares") for example in batch)


class Shout(Handler[str, PredictionResult, object]):
    """An example costs its length, and is prepared in another process than it is predicted."""

    def load_model(self) -> object:
        return object()

    def prepare(self, block: list[str]) -> list[bytes]:
        return [text.upper().encode() for text in block]

    def cost(self, prepared: list[bytes]) -> Any:
        import numpy as np

        return np.array([len(each) for each in prepared])

    def predict(self, model: object, batch: list[bytes], inference_args: dict[str, Any] | None = None) -> list[str]:
        if b"POISON" in batch:
            raise ValueError("poison")
        if b"CRASH" in batch:
            os._exit(7)
        return [each.decode() + (inference_args or {}).get("suffix", "") for each in batch]


def inferences(predictions: Any) -> Any:
    return predictions | "Inferences" >> beam.Map(lambda result: result.inference)


def test_a_handler_of_ours(pipelines: Pipelines) -> None:
    with pipelines() as (pipeline, _):
        predictions = pipeline | beam.Create(["a", "bc"]) | RunInference(Shout(), inference_args={"suffix": "!"})
        assert_that(predictions, equal_to([PredictionResult("a", "A!"), PredictionResult("bc", "BC!")]))


def test_a_handler_of_beams(pipelines: Pipelines) -> None:
    with pipelines() as (pipeline, run):
        predictions = pipeline | beam.Create(range(500)) | RunInference(Squares(), inference_args={"power": 3})
        assert_that(inferences(predictions), equal_to([number**3 for number in range(500)]))
    assert counters(run.result)["num_inferences"] == 500


def test_keys_go_round_a_handler_of_ours(pipelines: Pipelines) -> None:
    with pipelines() as (pipeline, _):
        predictions = pipeline | beam.Create([(1, "a"), (2, "bc")]) | RunInference(KeyedModelHandler(Shout()))
        assert_that(predictions, equal_to([(1, PredictionResult("a", "A")), (2, PredictionResult("bc", "BC"))]))


def test_functions_before_and_after_keep_the_hooks(pipelines: Pipelines) -> None:
    handler = Shout().with_preprocess_fn(str.strip).with_postprocess_fn(lambda result: result.inference + "?")
    with pipelines() as (pipeline, run):
        predictions = pipeline | beam.Create([" a ", "bcdef"]) | RunInference(handler)
        assert_that(predictions, equal_to(["A?", "BCDEF?"]))
    assert counters(run.result)["useful_cost"] == 6


def test_drop_example(pipelines: Pipelines) -> None:
    with pipelines() as (pipeline, _):
        ours = pipeline | "Texts" >> beam.Create(["a"]) | "Ours" >> RunInference(Shout(), drop_example=True)
        beams = pipeline | "Numbers" >> beam.Create([3]) | "Beam's" >> RunInference(Squares(), drop_example=True)
        assert_that(ours, equal_to([PredictionResult(None, "A")]), "ours")
        assert_that(beams, equal_to([PredictionResult(None, 9, "squares")]), "beam's")


def test_batches_of_the_users_own(pipelines: Pipelines) -> None:
    with pipelines() as (pipeline, run):
        batches = pipeline | beam.Create([[1, 2, 3], [4]])
        assert_that(inferences(batches | RunInference(Squares().with_no_batching())), equal_to([1, 4, 9, 16]))
    assert counters(run.result)["batches"] == 2
    assert counters(run.result)["num_inferences"] == 4


def test_windows_and_timestamps_stay(pipelines: Pipelines) -> None:
    def told(result: PredictionResult, time: Any = beam.DoFn.TimestampParam, in_: Any = beam.DoFn.WindowParam) -> Any:
        return result.inference, int(time), int(in_.start)

    with pipelines() as (pipeline, _):
        predictions = (
            pipeline
            | beam.Create([1, 5, 12, 27])
            | beam.Map(lambda second: window.TimestampedValue(second, second))
            | beam.WindowInto(window.SlidingWindows(size=20, period=10))
            | RunInference(Squares())
            | beam.Map(told)
        )
        expected = [(s * s, s, start) for s in (1, 5, 12, 27) for start in ((s // 10 - 1) * 10, s // 10 * 10)]
        assert_that(predictions, equal_to(expected))


def test_one_poison_example_among_ten_thousand(pipelines: Pipelines) -> None:
    texts = [f"text {number}" for number in range(10_000)]
    texts[7_321] = "poison"
    with pipelines() as (pipeline, _):
        good, bad = pipeline | beam.Create(texts) | RunInference(Shout()).with_exception_handling()
        assert_that(good | beam.combiners.Count.Globally(), equal_to([9_999]), "good")
        letters = bad.failed_inferences | beam.Map(lambda letter: (letter[0], letter[1][0].__name__, letter[1][1]))
        assert_that(letters, equal_to([(["poison"], "ValueError", "ValueError('poison')")]), "bad")


def test_what_can_not_be_prepared_is_a_dead_letter_too(pipelines: Pipelines) -> None:
    with pipelines() as (pipeline, _):
        good, bad = pipeline | beam.Create(["a", 5, "b"]) | RunInference(Shout()).with_exception_handling()
        assert_that(inferences(good), equal_to(["A", "B"]), "good")
        assert_that(bad.failed_inferences | beam.Map(lambda letter: letter[0]), equal_to([[5]]), "bad")


def test_other_exceptions_end_the_pipeline(pipelines: Pipelines) -> None:
    with pytest.raises(Exception, match="poison"), pipelines() as (pipeline, _):
        _ = pipeline | beam.Create(["poison"]) | RunInference(Shout()).with_exception_handling(exc_class=KeyError)
    with pytest.raises(Exception, match="poison"), pipelines() as (pipeline, _):
        _ = pipeline | beam.Create(["poison"]) | RunInference(Shout())


def test_threshold(pipelines: Pipelines) -> None:
    def run(threshold: float) -> None:
        with pipelines() as (pipeline, _):
            texts = pipeline | beam.Create(["poison", "a", "b", "c"])
            _ = texts | RunInference(Shout()).with_exception_handling(threshold=threshold)

    run(0.25)
    with pytest.raises(Exception, match="1 of 4 examples failed"):
        run(0.2)


def test_a_crash_in_a_process_of_its_own(pipelines: Pipelines) -> None:
    transform = RunInference(Shout()).with_exception_handling(use_subprocess=True)
    with pipelines() as (pipeline, _):
        good, bad = pipeline | beam.Create(["a", "crash", "b"]) | transform
        assert_that(inferences(good), equal_to(["A", "B"]), "good")
        assert_that(bad.failed_inferences | beam.Map(lambda letter: letter[0]), equal_to([["crash"]]), "bad")


class OnlyMemoryLimits(FakeDeviceHandler):
    """Wants batches as large as the memory allows, however long a busy machine takes for them."""

    def batch_elements_kwargs(self) -> dict[str, Any]:
        return {"target_batch_overhead": 1e-6}


def test_out_of_memory_fails_nothing_and_the_budget_settles(pipelines: Pipelines, tmp_path: Path) -> None:
    device = FakeDevice(memory=1000, seconds_per_batch=0.001, log=str(tmp_path / "log"))
    texts = ["x" * (1 + number % 90) for number in range(20_000)]
    with pipelines() as (pipeline, run):
        predictions = pipeline | beam.Create(texts) | RunInference(OnlyMemoryLimits(device))
        assert_that(predictions | beam.combiners.Count.Globally(), equal_to([20_000]))
    batches = device.batches()
    too_large = [batch for batch in batches if not batch.fitted]
    of_processes = [[batch for batch in batches if batch.pid == pid] for pid in {batch.pid for batch in batches}]
    assert too_large
    assert counters(run.result)["out_of_memory"] == len(too_large)
    # A worker that started late may have got only the last few examples, and had no time to learn.
    learned = [mine for mine in of_processes if len(mine) >= 100]
    assert learned
    for mine in learned:
        assert all(batch.fitted for batch in mine[len(mine) // 2 :])
        # Later batches don't consist of single examples, either.
        assert max(batch.padded_cost for batch in mine[len(mine) // 2 :]) > 250
    assert sum(batch.count for batch in batches if batch.fitted) == 20_000


def test_an_example_that_never_fits_fails_alone(pipelines: Pipelines, tmp_path: Path) -> None:
    device = FakeDevice(memory=100, log=str(tmp_path / "log"))
    texts = ["short"] * 50 + ["x" * 101]
    transform = RunInference(FakeDeviceHandler(device)).with_exception_handling()
    with pipelines() as (pipeline, _):
        good, bad = pipeline | beam.Create(texts) | transform
        assert_that(good | beam.combiners.Count.Globally(), equal_to([50]), "good")
        assert_that(bad.failed_inferences | beam.Map(lambda letter: letter[0]), equal_to([["x" * 101]]), "bad")


def test_padding_stays_small_on_skewed_lengths(pipelines: Pipelines, tmp_path: Path) -> None:
    import numpy as np

    lengths = np.clip(np.exp(np.random.default_rng(0).normal(2.5, 0.65, 12000)).round(), 3, 256).astype(int)
    device = FakeDevice(memory=1e9, seconds_per_batch=0.001, seconds_per_cost=2e-5, log=str(tmp_path / "log"))
    with pipelines() as (pipeline, run):
        texts = pipeline | beam.Create(["x" * int(length) for length in lengths])
        _ = texts | RunInference(FakeDeviceHandler(device))
    found = counters(run.result)
    assert found["useful_cost"] == lengths.sum()
    # On a busy machine a batch seems to cost more, and larger batches need more padding. They still need far less than
    # batches of the same sizes would need whose examples were not sorted.
    shuffled = iter(np.random.default_rng(1).permutation(lengths))
    unsorted = sum(each.count * max(itertools.islice(shuffled, each.count)) for each in device.batches())
    padding = 1 - found["useful_cost"] / found["padded_cost"]
    assert padding < 0.25 or found["padded_cost"] < 0.5 * unsorted
    assert found["batches"] == len(device.batches())
    for stage in ("prepare", "compute", "device_busy", "queue_wait", "line"):
        assert found[f"{stage}_micro_secs"] > 0
    assert found["loads"] >= 1
    assert sum(count for name, count in found.items() if name.startswith("batch_ms_to_")) == found["batches"]
    assert 0 < found["line_batches"] < found["batches"]
    assert found["line_cost_squared"] * found["line_batches"] >= found["line_cost"] ** 2 > 0


def test_the_model_works_while_the_next_block_is_prepared(tmp_path: Path) -> None:
    """Both take 20 ms a batch; their own logs show what overlapped, not the total time."""

    class Noting(FakeDeviceHandler):
        def prepare(self, block: list[Any]) -> list[Any]:
            with open(tmp_path / "prepared", "a") as notes:
                notes.write(f"{time.monotonic()}\n")
            return super().prepare(block)

    device = FakeDevice(memory=1e9, seconds_per_batch=0.02, log=str(tmp_path / "log"))
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        _ = pipeline | beam.Create(["x"] * 30_000) | RunInference(Noting(device, seconds_per_prepare=0.02))
    prepared = [float(line) for line in (tmp_path / "prepared").read_text().split()]
    assert len(prepared) < 500
    assert device.batches()[0].began_at < prepared[-1]


def test_self_batching_models_get_single_examples_at_once(pipelines: Pipelines) -> None:
    class Busy(Handler[int, PredictionResult, object]):
        self_batching = True
        concurrency = 8

        def load_model(self) -> object:
            return object()

        def predict(self, model: Any, batch: list[int], inference_args: Any = None) -> list[tuple[int, int]]:
            import threading

            time.sleep(0.02)
            return [(len(batch), threading.get_ident())]

    with pipelines() as (pipeline, _):
        answers = inferences(pipeline | beam.Create(range(64)) | RunInference(Busy()))
        assert_that(answers | beam.Map(lambda answer: answer[0]), equal_to([1] * 64), "one by one")
        threads = answers | beam.Map(lambda answer: answer[1]) | beam.combiners.ToSet()
        assert_that(threads | beam.Map(lambda found: len(found) > 1), equal_to([True]), "at once")


def test_hints_apply_to_the_model_alone() -> None:
    pipeline = beam.Pipeline()
    _ = (
        pipeline
        | beam.Create(["a"])
        | RunInference(Shout()).with_resource_hints(accelerator="type:any;count:1", min_ram="1GB")
    )
    components = pipeline.to_runner_api(return_context=False).components
    hinted = {
        transform.unique_name
        for transform in components.transforms.values()
        if transform.environment_id and components.environments[transform.environment_id].resource_hints
    }
    assert hinted == {"RunInference/Infer"}


def test_a_hint_of_the_transform_wins_over_the_handlers() -> None:
    class Hinted(Squares):
        def get_resource_hints(self) -> dict[str, Any]:
            return {"min_ram": "1GB"}

    pipeline = beam.Pipeline()
    _ = pipeline | beam.Create([1]) | RunInference(Hinted()).with_resource_hints(min_ram="2GB")
    environments = pipeline.to_runner_api(return_context=False).components.environments.values()
    hints = [hint for environment in environments for hint in environment.resource_hints.items()]
    assert ("beam:resources:min_ram_bytes:v1", b"2000000000") in hints
    assert len([hint for hint in hints if "min_ram" in hint[0]]) == 1


def test_predictions_that_do_not_match_their_examples(pipelines: Pipelines) -> None:
    class Forgetful(Squares):
        def run_inference(self, batch: Sequence[int], model: Any, inference_args: Any = None) -> Any:
            return [PredictionResult(1, 1)]

    def run() -> None:
        with pipelines() as (pipeline, _):
            _ = pipeline | beam.Create([[1, 2, 3]]) | beam.FlatMap(list) | RunInference(Forgetful())

    with pytest.raises(Exception, match="returned 1 predictions for 3 examples"):
        run()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"model_manager_args": {"slack_percentage": 0.2}}, "model_manager_args"),
        ({"interval": 5}, "found interval or stop_timestamp without watch_model_pattern"),
    ],
)
def test_keywords_that_would_do_nothing_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunInference(Squares(), **keywords)


def test_a_misspelt_keyword_is_refused() -> None:
    with pytest.raises(TypeError, match="monitoring_transfrom"):
        RunInference(Squares(), monitoring_transfrom=beam.Map(print))  # type: ignore[call-arg]


def test_steps_that_share_a_model_keep_their_own_arguments(pipelines: Pipelines) -> None:
    with pipelines() as (pipeline, run):
        numbers = pipeline | beam.Create([3])
        for power in (2, 3):
            transform = RunInference(Squares(), inference_args={"power": power}, model_identifier="shared")
            predictions = numbers | f"To the {power}" >> transform
            assert_that(predictions, equal_to([PredictionResult(3, 3**power, "squares")]), f"is the power {power}")
    assert counters(run.result)["num_inferences"] == 2


def test_outputs_whose_shape_differs_between_batches(pipelines: Pipelines) -> None:
    class PerToken(Shout):
        def predict(self, model: object, batch: list[bytes], inference_args: dict[str, Any] | None = None) -> Any:
            import numpy as np

            return np.ones((len(batch), max(len(each) for each in batch)))

        def batch_elements_kwargs(self) -> dict[str, Any]:
            return {"max_batch_size": 2}

    with pipelines() as (pipeline, _):
        predictions = pipeline | beam.Create(["a" * length for length in (1, 1, 2, 2, 3, 3)]) | RunInference(PerToken())
        assert_that(inferences(predictions) | beam.combiners.Count.Globally(), equal_to([6]))


@pytest.mark.parametrize("cost", [float("nan"), float("inf")])
def test_costs_that_are_no_numbers(cost: float, pipelines: Pipelines) -> None:
    class Costly(Shout):
        def cost(self, prepared: list[bytes]) -> Any:
            return [cost if each == b"BAD" else 1 for each in prepared]

    with pipelines() as (pipeline, _):
        good, bad = pipeline | beam.Create(["a", "bad", "b"]) | RunInference(Costly()).with_exception_handling()
        assert_that(inferences(good), equal_to(["A", "B"]), "good")
        assert_that(bad.failed_inferences | beam.Map(lambda letter: letter[0]), equal_to([["bad"]]), "bad")


def test_a_model_that_ends_its_process(pipelines: Pipelines) -> None:
    class Quitter(Shout):
        def predict(self, model: object, batch: list[bytes], inference_args: dict[str, Any] | None = None) -> Any:
            raise SystemExit(3)

    def run() -> None:
        with pipelines() as (pipeline, _):
            _ = pipeline | beam.Create(["a"]) | RunInference(Quitter())

    with pytest.raises(Exception, match=r"the model's code raised SystemExit\(3\)"):
        run()


def test_blocks_of_large_examples_are_small() -> None:
    step = PrepareDoFn(ModelSet(Shout()), StepSettings(step_id="step", model_tag="model", metrics_namespace="test"))
    step.setup()
    step.start_bundle()
    given = ["x" * 100_000] * 1000
    blocks = [block.value.examples for block in step.process_batch(given, 0, window.GlobalWindow())]
    assert max(len(block) for block in blocks) <= 160


def test_old_versions_of_a_model_are_left() -> None:
    """The host forgets old versions after a while; the step must leave their lanes."""
    import numpy as np
    from apache_beam.ml.inference.base import ModelMetadata

    class Versioned(Squares):
        def update_model_path(self, model_path: str | None = None) -> None:
            pass

    step = InferDoFn(Versioned(), StepSettings(step_id="versions", model_tag="versions", metrics_namespace="test"))
    step.setup()
    for version in range(5):
        block = PreparedBlock([1], [0], None, np.ones(1))
        step.start_bundle()
        results = list(step.process(block, ModelMetadata(f"v{version}", f"v{version}"), window.GlobalWindow()))
        results += list(step.finish_bundle())
        assert [result.value.examples for result in results] == [[1]]
    # The version in use, and the one before, which the last bundle may have used.
    assert len(step._router._entered) <= 2
    step.teardown()


def test_a_length_of_the_users_own_decides_what_meets(pipelines: Pipelines) -> None:
    class Together(Shout):
        def predict(self, model: object, batch: list[bytes], inference_args: dict[str, Any] | None = None) -> list[Any]:
            return [tuple(sorted(each.decode() for each in batch))] * len(batch)

    handler = Together(batch_length_fn=lambda text: int(text[-1]), batch_bucket_boundaries=[5])
    with pipelines() as (pipeline, _):
        texts = pipeline | beam.Create([["long long 1", "a9", "b8", "c2"]]) | beam.FlatMap(list)
        groups = inferences(texts | RunInference(handler))
        sides = groups | beam.Map(lambda group: len({int(each[-1]) >= 5 for each in group}))
        assert_that(sides, equal_to([1] * 4))


def test_batch_settings_are_told_of_where_the_pipeline_is_built(caplog: pytest.LogCaptureFixture) -> None:
    class Varied(Squares):
        def batch_elements_kwargs(self) -> dict[str, Any]:
            return {"variance": 0.25}

    _ = beam.Pipeline() | beam.Create([1]) | RunInference(Varied())
    assert caplog.text.count("variance=0.25 has no effect") == 1
    with pytest.raises(ValueError, match="batch_length_fn"):
        _ = beam.Pipeline() | beam.Create(["a"]) | RunInference(Shout(batch_bucket_boundaries=[5]))
