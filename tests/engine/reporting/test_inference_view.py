"""Tests of how steps that run models are shown: from their counters to the words on the screen."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import apache_beam as beam
import pytest
from apache_beam.metrics import Metrics, monitoring_infos
from apache_beam.options.pipeline_options import PipelineOptions
from rich.console import Console, RenderableType

from luminosity import LuminosityRunner
from luminosity.cli.main import main
from luminosity.core import InferenceMetrics
from luminosity.engine.data.world import Clock, WallClock
from luminosity.engine.loop.metrics import BusyTime, RunMetrics
from luminosity.engine.reporting.step_metrics import LoadedModels, inference_views
from luminosity.events import (
    Event,
    InferenceView,
    ModelLoaded,
    ModelVersion,
    PoolInfo,
    RunEnded,
    RunStarted,
    Snapshot,
    StageInfo,
    StageView,
    from_json,
    to_json,
)
from luminosity.runs.views import step_lines
from luminosity.runs.views.frame import frame
from luminosity.runs.views.plain import line, summary
from tests.runners import IS_REFERENCE, finished, flags

pytestmark = [
    pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does"),
    pytest.mark.usefixtures("no_accelerators"),
]

_OF_A_BATCH = {
    InferenceMetrics.EXAMPLES: 41,
    InferenceMetrics.BATCHES: 1,
    InferenceMetrics.USEFUL_COST: 94,
    InferenceMetrics.PADDED_COST: 100,
    InferenceMetrics.BUDGET_COST: 108,
    InferenceMetrics.QUEUE_WAIT: 41 * 12_000,
    InferenceMetrics.PREPARE: 3_000,
    InferenceMetrics.COLLATE: 0,
    InferenceMetrics.TRANSFER: 1_000,
    InferenceMetrics.COMPUTE: 96_000,
    InferenceMetrics.RETURN: 2_000,
    InferenceMetrics.DEVICE_BUSY: 10,
    InferenceMetrics.OUT_OF_MEMORY: 0,
    InferenceMetrics.BY_KERNELS: 40,
    InferenceMetrics.BY_TRANSFORMERS: 1,
    InferenceMetrics.LOADS: 1,
    InferenceMetrics.LOAD: 500_000,
    InferenceMetrics.MODEL_BYTES: 4096,
    "batch_ms_to_100": 1,
}
_WORDS = "padding 6% · batches 41 rows, 92% full"
_TIMES = "waits 12 ms · batch 102 ms (prepare 3, transfer 1, compute 96, return 2)"


class Counts(beam.DoFn):
    """Counts what a batch of each model would count."""

    def __init__(self, *models: str) -> None:
        self._models = models

    def process(self, element: int) -> Iterable[int]:
        for model in self._models:
            for name, value in _OF_A_BATCH.items():
                Metrics.counter(model, name).inc(value)
        Metrics.counter("mine", "other").inc()
        yield element


def events_of_a_run(*extra: str, models: tuple[str, ...] = ("RunInference",)) -> list[Event]:
    events: list[Event] = []
    options = PipelineOptions(flags("--cpu_workers=1", *extra))
    pipeline = beam.Pipeline(runner=LuminosityRunner(on_event=events.append), options=options)
    _ = pipeline | "Read" >> beam.Create(range(20)) | beam.Reshuffle() | "Embed/Infer" >> beam.ParDo(Counts(*models))
    finished(pipeline.run())
    return events


def text_of(picture: RenderableType, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(picture)
    return console.export_text()


def test_the_counters_of_a_run_are_in_its_events_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = events_of_a_run(f"--run_dir={tmp_path}")
    run, end = events[0], events[-1]
    assert isinstance(run, RunStarted)
    assert isinstance(end, RunEnded)
    (view,) = step_lines.models_of(end.last)
    assert view.step == "Embed/Infer"
    assert (view.inferences, view.batches) == (20 * 41, 20)
    assert (view.useful_cost, view.padded_cost, view.budget_cost) == (1880, 2000, 2160)
    assert view.compute_seconds == pytest.approx(20 * 0.096)
    assert view.worker_seconds > 0
    assert (view.loads, view.load_seconds, view.model_bytes) == (20, 10.0, 4096)
    assert (view.runs_on, view.requests) == ("worker", 0)
    assert view.computed_by == "without padding (Luminosity's kernels) and padded (transformers)"
    assert step_lines.sentence(view).endswith(view.computed_by)
    assert view.batch_p50_ms is not None
    assert 80 < view.batch_p50_ms < 100
    assert view.batch_p99_ms == view.batch_p50_ms
    loaded = [event for event in events if isinstance(event, ModelLoaded)]
    assert len(loaded) == 20
    assert {(e.step, e.load_seconds, e.model_bytes) for e in loaded} == {("Embed/Infer", 0.5, 4096)}
    assert end.metrics[0].name == "other"
    assert len(end.metrics) == 1
    assert [stage.inference for stage in end.last.stages].count(()) == len(end.last.stages) - 1
    assert from_json(json.loads(json.dumps(to_json(end)))) == end

    picture = text_of(frame(run, end.last, 160, 24), 160)
    assert f"model Embed/Infer: {_WORDS}" in picture
    assert _TIMES in picture
    assert _WORDS in " ".join(text_of(summary(run, end), 100).split())
    assert main(["show", "last", f"--run_dir={tmp_path}"]) == 0
    assert _WORDS in " ".join(capsys.readouterr().out.split())


def test_models_of_one_step_are_told_apart() -> None:
    end = events_of_a_run("--run_dir=off", models=("mood", "semantic"))[-1]
    assert isinstance(end, RunEnded)
    assert [view.step for view in step_lines.models_of(end.last)] == ["Embed/Infer mood", "Embed/Infer semantic"]
    assert {view.inferences for view in step_lines.models_of(end.last)} == {20 * 41}


def test_each_load_is_reported_once() -> None:
    before = InferenceView("Infer", loads=3, load_seconds=9.0)
    loaded = LoadedModels([ModelVersion("Infer", "models:/tone", "2", "/path")], {"s1": (before,)})
    assert loaded.news("r", 0.0, {"s1": (before,)}) == []
    now = {
        "s1": (replace(before, loads=5, load_seconds=12.0, model_bytes=7),),
        "s2": (InferenceView("Other", loads=1),),
    }
    first = ModelLoaded("r", 1.0, "Infer", "models:/tone", load_seconds=1.5, model_bytes=7)
    assert loaded.news("r", 1.0, now) == [first, first, ModelLoaded("r", 1.0, "Other", "")]
    assert loaded.news("r", 2.0, now) == []


def test_a_line_through_batches_is_exact_for_large_costs_too() -> None:
    costs = [10**7 * n for n in range(1, 9)]
    micros = [2500 + cost // 1000 for cost in costs]
    squares, products = sum(c * c for c in costs), sum(c * m for c, m in zip(costs, micros, strict=True))
    counters = {
        "batches": 8,
        "line_batches": 8,
        "line_cost": sum(costs),
        "line_micro_secs": sum(micros),
        "line_cost_squared": squares % 2**32,
        "line_cost_squared_high": squares >> 32,
        "line_cost_micro_secs": products % 2**32,
        "line_cost_micro_secs_high": products >> 32,
    }
    metrics = RunMetrics()
    infos = [
        monitoring_infos.int64_user_counter("Model", name, value, ptransform="Infer")
        for name, value in counters.items()
    ]
    metrics.add("s1", infos)
    pool = SimpleNamespace(most_workers=lambda: 1, plan=SimpleNamespace(device_groups=()))
    plan = SimpleNamespace(pool=pool, id="s1", busy=BusyTime(WallClock()))
    (view,) = inference_views(plan, metrics)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert (view.fixed_seconds, view.seconds_per_cost) == (0.0025, 1e-9)
    # Without the squares, costs seem to be all alike.
    squared = InferenceMetrics.LINE_COST_SQUARED
    metrics.add("s2", [i for i in infos if not i.labels["NAME"].startswith(squared)])
    plan.id = "s2"
    (view,) = inference_views(plan, metrics)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert (view.fixed_seconds, view.seconds_per_cost) == (0.0, 0.0)


def a_snapshot(*views: InferenceView) -> tuple[RunStarted, Snapshot]:
    stage = StageInfo("s0", "Embed", "device")
    run = RunStarted("r", 0.0, "pipeline.py", 0.0, (stage,), (PoolInfo("device", 1, 1),), queue_limit=1)
    return run, Snapshot("r", 9.0, (StageView("s0", "busy", elements=5, inference=views),), pools=())


VIEW = InferenceView(
    "Embed/Infer",
    410,
    10,
    940,
    1000,
    1080,
    4.92,
    0.03,
    0.0,
    0.01,
    0.96,
    0.02,
    device_busy_seconds=8.7,
    worker_seconds=10,
    runs_on="device",
)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_a_line_of_a_model_fits_and_is_never_cut_within_a_word(width: int) -> None:
    run, snapshot = a_snapshot(VIEW)
    text = text_of(frame(run, snapshot, width, 24), width)
    (of_model,) = (row for row in text.splitlines() if row.startswith("model "))
    said = of_model.removeprefix("model Embed/Infer: ").split(" · ")
    assert said == step_lines.parts(VIEW)[: len(said)]
    assert len(of_model) <= width
    assert "padding 6%" in of_model


def test_all_of_it_is_said_where_there_is_room() -> None:
    assert step_lines.line(VIEW, 200) == f"model Embed/Infer: {_WORDS} · device 87% busy · {_TIMES}"


def test_many_models_leave_room_for_the_stages() -> None:
    run, snapshot = a_snapshot(*[VIEW] * 30)
    text = text_of(frame(run, snapshot, 80, 24), 80)
    assert len(text.splitlines()) <= 24
    assert text.count("model Embed/Infer") == 3
    assert "and 27 more models" in text


def test_a_plain_line_says_the_most_important() -> None:
    assert "Embed: 5 done, padding 6%, batches 41 rows, 92% full, device 87% busy;" in line(*a_snapshot(VIEW))


def test_what_is_not_known_is_not_said() -> None:
    assert step_lines.parts(InferenceView("Infer", batches=3)) == ["batches"]
    assert step_lines.parts(InferenceView("Infer", 3, 2, out_of_memory=1)) == ["batches 1.5 rows", "out of memory once"]


def test_only_an_accelerator_is_called_a_device() -> None:
    words = [step_lines.parts(replace(VIEW, runs_on=place))[2] for place in ("device", "worker", "server", "")]
    computes = "computes 87% of the time"
    assert words == ["device 87% busy", computes, "requests in flight 87% of the time", computes]


def test_trouble_comes_first() -> None:
    view = replace(VIEW, runs_on="server", requests=500, retries=90, throttled=1, retry_wait_seconds=45.0, cut_texts=7)
    assert step_lines.parts(view)[:2] == [
        "90 of 500 requests sent again (1 time the server asked to send less), 0.5 s wait each",
        "7 of 410 texts cut at max_new_tokens",
    ]
    refused = InferenceView("Infer", runs_on="server", requests=3, retries=2, worker_seconds=1.0)
    assert step_lines.parts(refused) == ["2 of 3 requests sent again, 0.0 s wait each"]


def test_the_time_from_the_first_begin_to_the_last_end() -> None:
    now = 100.0
    busy = BusyTime(cast(Clock, SimpleNamespace(monotonic=lambda: now)))
    assert busy.first_to_last_seconds == 0.0
    busy.begin()
    now = 103.0
    assert busy.first_to_last_seconds == 0.0  # no bundle has ended
    busy.end()
    now = 110.0
    busy.begin()
    now = 111.0
    assert busy.first_to_last_seconds == 3.0  # the running bundle has reported nothing yet
    busy.end()
    assert busy.first_to_last_seconds == 11.0
