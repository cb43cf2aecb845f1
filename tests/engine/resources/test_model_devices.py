"""Tests of models that get an accelerator without a resource hint, by themselves or by an option."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
import torch
from apache_beam.ml.inference import base
from apache_beam.ml.inference.base import KeyedModelHandler, KeyModelMapping, ModelHandler
from apache_beam.ml.inference.onnx_inference import OnnxModelHandlerNumpy
from apache_beam.ml.inference.pytorch_inference import PytorchModelHandlerTensor
from apache_beam.ml.inference.sklearn_inference import SklearnModelHandlerNumpy
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import Column, Enrich, Handler, JaxModelHandler, RunInference, SentenceEmbedder, TorchModelHandler
from luminosity._shared.accelerators import accelerators_of
from luminosity.core import WorkerShare
from luminosity.engine.options import EngineConfig
from luminosity.engine.resources.fitting import give_devices
from luminosity.engine.resources.machine import Machine
from luminosity.errors import OptionError
from tests.plans import break_between, explained, stage_with
from tests.runners import IS_REFERENCE, collect, new_pipeline

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")]

_ASKED_BY_OPTION = "--experiments=worker_accelerator=type:nvidia-tesla-t4;count:1;install-nvidia-driver"


class Looking(ModelHandler[Any, Any, None]):
    """One of Beam's handlers: its predictions tell which process made them. It may name a device."""

    def __init__(self, device: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        if device is not None:
            self._device = device

    def load_model(self) -> None:
        return None

    def run_inference(self, batch: Sequence[Any], model: None, inference_args: Any = None) -> Iterable[Any]:
        return [(os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES"), WorkerShare.current())] * len(batch)


class LookingHandler(Handler[Any, Any, None]):
    """One of our handlers, which does the same."""

    def __init__(self, accelerators: tuple[str, ...] | None) -> None:
        super().__init__()
        self._accelerators = accelerators

    @property
    def accelerators(self) -> tuple[str, ...] | None:
        return self._accelerators

    def load_model(self) -> None:
        return None

    def predict(self, model: None, batch: Any, inference_args: Any = None) -> Any:
        return [(os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES"), WorkerShare.current())] * len(batch)


def torch_handler(device: str) -> PytorchModelHandlerTensor:
    return PytorchModelHandlerTensor(state_dict_path="weights.pt", model_class=torch.nn.Identity, device=device)


def infers(transform: Any) -> Callable[[beam.Pipeline], Any]:
    return lambda pipeline: pipeline | beam.Create([1]) | "Infer" >> transform


def pools_of(transform: Any, *flags: str) -> set[str]:
    """Return the names of all pools of a pipeline with one transform."""
    return {pool.name for pool in explained(infers(transform), *flags).pools}


# ---- what a handler can use


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (lambda: torch_handler("GPU"), ("gpu",)),
        (lambda: torch_handler("CPU"), ()),
        (lambda: Looking("GPU"), ("gpu",)),  # as Beam's Hugging Face handlers, which keep the name
        (lambda: Looking("CPU"), ()),
        (lambda: KeyedModelHandler(torch_handler("GPU")), ("gpu",)),
        (lambda: torch_handler("GPU").with_preprocess_fn(str).with_postprocess_fn(str), ("gpu",)),
        (lambda: base.MaybeKeyedModelHandler(torch_handler("CPU")), ()),
        (
            lambda: KeyedModelHandler(
                [KeyModelMapping(["a"], torch_handler("CPU")), KeyModelMapping(["b"], torch_handler("GPU"))]
            ),
            ("gpu",),
        ),
        (lambda: SklearnModelHandlerNumpy("model.pkl"), ()),
        (lambda: OnnxModelHandlerNumpy("model.onnx", providers=["CPUExecutionProvider"]), ()),
        (lambda: Looking(), None),
        (lambda: LookingHandler(None), None),
        (lambda: SentenceEmbedder("model"), ("gpu",)),
        (lambda: SentenceEmbedder("model", device="CPU"), ()),
        (lambda: TorchModelHandler("weights.pt", torch.nn.Identity), ("gpu",)),
        (lambda: JaxModelHandler(lambda params, batch: batch, {}), ("gpu", "tpu")),
        (lambda: JaxModelHandler(lambda params, batch: batch, {}, device="cpu"), ()),
        (lambda: JaxModelHandler(lambda params, batch: batch, {}, device="tpu"), ("tpu",)),
    ],
)
def test_the_handler_says_what_its_model_can_use(make: Callable[[], Any], kinds: tuple[str, ...] | None) -> None:
    assert accelerators_of(make()) == kinds


@pytest.mark.parametrize(
    ("arguments", "kinds"),
    [
        ({"device": "cpu"}, ()),
        ({"device": "cuda:0"}, ("gpu",)),
        ({"device": 0}, ("gpu",)),
        ({"device": -1}, ()),
        ({"device_map": "auto"}, ("gpu",)),
        ({}, None),
    ],
)
def test_a_pipeline_of_transformers_names_its_device(arguments: Any, kinds: tuple[str, ...] | None) -> None:
    handler: Any = Looking()
    handler._load_pipeline_args = arguments  # as Beam's HuggingFacePipelineModelHandler, which needs TensorFlow
    assert accelerators_of(handler) == kinds


# ---- which steps get a device


@pytest.mark.parametrize(
    "transform",
    [
        lambda: base.RunInference(torch_handler("GPU")),
        lambda: base.RunInference(Looking("GPU")).with_exception_handling(),
        lambda: base.RunInference(Looking("GPU")).with_exception_handling(timeout=9, threshold=0.5),
        lambda: base.RunInference(LookingHandler(("gpu",))),
        lambda: RunInference(torch_handler("GPU")),
        lambda: RunInference(LookingHandler(("gpu", "tpu"))),
        lambda: RunInference(SentenceEmbedder("model")),
        lambda: RunInference(LookingHandler(("gpu",))).with_resource_hints(min_ram="1GB"),
    ],
)
def test_a_model_that_can_use_a_device_gets_it(transform: Callable[[], Any]) -> None:
    assert "device" in pools_of(transform(), "--accelerators=1")
    assert "device" not in pools_of(transform())


@pytest.mark.parametrize(
    "transform",
    [
        lambda: base.RunInference(torch_handler("CPU")),
        lambda: base.RunInference(Looking()),
        lambda: base.RunInference(torch_handler("GPU")).with_resource_hints(accelerator="count:0"),
        lambda: RunInference(torch_handler("CPU")),
        lambda: RunInference(LookingHandler(None)),
        lambda: RunInference(SentenceEmbedder("model", device="cpu")),
        lambda: RunInference(LookingHandler(("gpu",))).with_resource_hints(accelerator="count:0"),
        lambda: beam.Map(str),
    ],
)
def test_other_steps_get_none(transform: Callable[[], Any]) -> None:
    assert "device" not in pools_of(transform(), "--accelerators=1")


def test_a_hint_decides_how_many() -> None:
    transform = RunInference(LookingHandler(("gpu",))).with_resource_hints(accelerator="count:2")
    assert "device x2" in pools_of(transform, "--accelerators=2")


def test_a_model_that_uses_gpus_does_not_get_a_tpu() -> None:
    pipeline = beam.Pipeline()
    infers(RunInference(LookingHandler(("gpu",))))(pipeline)
    proto = pipeline.to_runner_api()
    config = EngineConfig.of(PipelineOptions([]))
    before = {t.environment_id for t in proto.components.transforms.values()}

    def environments(*devices: str) -> set[str]:
        given = give_devices(proto, Machine(2, 1 << 30, devices), config)
        return {t.environment_id for t in given.components.transforms.values()}

    assert environments("tpu:0") == before
    assert environments("gpu:0") > before
    assert {t.environment_id for t in proto.components.transforms.values()} == before  # it is the caller's


def test_models_of_a_table_are_told_apart() -> None:
    def build(pipeline: beam.Pipeline) -> None:
        table = pipeline | beam.Create([pa.record_batch({"text": ["a"]})])
        columns = {
            "on_gpu": Column(LookingHandler(("gpu",)), "text"),
            "too": Column(LookingHandler(("gpu",)), "text"),
            "on_cpu": Column(LookingHandler(()), "text"),
        }
        _ = table | "Enrich" >> Enrich(**columns)

    plan = explained(build, "--accelerators=1", is_full=True)
    on_device = {step.name for stage in plan.stages if stage.pool.name == "device" for step in stage.steps}
    assert [name for name in on_device if "Infer on_gpu, too" in name]
    assert not [name for name in on_device if "on_cpu" in name]


def test_bundles_of_our_step_share_the_device() -> None:
    plan = explained(infers(RunInference(LookingHandler(("gpu",)))), "--accelerators=1")
    (slots,) = {stage.max_active_bundles for stage in plan.stages if stage.pool.name == "device"}
    assert slots == 8
    plan = explained(infers(base.RunInference(Looking("GPU"))), "--accelerators=1")
    (slots,) = {stage.max_active_bundles for stage in plan.stages if stage.pool.name == "device"}
    assert slots == 1


# ---- Dataflow's option


@pytest.mark.parametrize(
    "flag",
    [_ASKED_BY_OPTION, "--dataflow_service_options=worker_accelerator=type:nvidia-tesla-t4;count:1"],
)
@pytest.mark.parametrize(
    ("transform", "gets_it"),
    [
        (lambda: base.RunInference(Looking()), True),
        (lambda: RunInference(LookingHandler(None)), True),
        (lambda: base.RunInference(torch_handler("CPU")), False),
        (lambda: beam.Map(str), False),
    ],
)
def test_the_option_gives_it_to_models(flag: str, transform: Callable[[], Any], gets_it: bool) -> None:
    assert ("device" in pools_of(transform(), "--accelerators=1", flag)) == gets_it


def test_the_option_warns_like_a_hint(caplog: pytest.LogCaptureFixture) -> None:
    pools_of(RunInference(LookingHandler(None)), _ASKED_BY_OPTION)
    (said,) = warnings(caplog)
    assert "'Infer' asks for 1 accelerator(s) of type nvidia-tesla-t4; this machine has 0: it runs on the CPU" in said


def test_the_options_count_must_be_a_number() -> None:
    with pytest.raises(OptionError, match="count:many"):
        EngineConfig.of(PipelineOptions(["--experiments=worker_accelerator=count:many"]))


# ---- what is said


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("luminosity") and r.levelno >= logging.WARNING]


def test_without_a_device_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    pools_of(RunInference(LookingHandler(("gpu",))))
    pools_of(base.RunInference(Looking("GPU")))
    assert warnings(caplog) == []


def test_a_device_that_no_step_uses_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pools_of(RunInference(LookingHandler(None)), "--accelerators=1")
    (said,) = warnings(caplog)
    assert "no step uses this machine's accelerators (declared:0)" in said
    assert 'with_resource_hints(accelerator="count:1")' in said
    assert "\n" not in said


def test_a_device_that_a_step_uses_is_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    pools_of(RunInference(LookingHandler(("gpu",))), "--accelerators=1")
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ((), "accelerator=count:1 (its model can use a GPU)"),
        (
            (_ASKED_BY_OPTION,),
            f"accelerator={_ASKED_BY_OPTION.split('=', 2)[2]} (the option worker_accelerator gives it to models)",
        ),
    ],
)
def test_the_plan_says_why(flags: tuple[str, ...], reason: str) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        ones = pipeline | "Ones" >> beam.Create([1])
        _ = ones | "Predict" >> base.RunInference(Looking("GPU").with_no_batching()) | "Print" >> beam.Map(print)

    plan = explained(build, "--accelerators=1", *flags)
    assert stage_with(plan, "Predict").asks_for == reason
    (why,) = break_between(plan, "Ones", "Predict").reasons
    assert why.text == f"different resources: 'Predict' asks for {reason}; 'Ones' for nothing"


# ---- real runs


@pytest.mark.usefixtures("leaves_nothing", "no_accelerators")
@pytest.mark.parametrize(
    "transform",
    [
        lambda: base.RunInference(Looking("GPU")),
        lambda: RunInference(LookingHandler(("gpu",))) | beam.Map(lambda result: result.inference),
    ],
)
def test_one_process_owns_the_device_and_runs_the_model(transform: Callable[[], Any], tmp_path: Path) -> None:
    def build(pipeline: beam.Pipeline) -> beam.PCollection:
        return pipeline | beam.Create(range(40)) | beam.Reshuffle() | "Infer" >> transform()

    found = collect(build, tmp_path, new_pipeline("--cpu_workers=2", "--accelerators=1"))
    assert len(found) == 40
    ((_, visible, share),) = set(found)
    assert visible == "0"
    assert (share.pool, share.devices) == ("device", ("declared:0",))
    on_cpu = collect(build, tmp_path, new_pipeline("--cpu_workers=2", "--accelerators=0"))
    assert {share.devices for _, _, share in on_cpu} == {()}
