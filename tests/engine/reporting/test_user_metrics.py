"""Tests of the metrics of user code: what a run reports at its end, and what ``lum show`` prints of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.metrics import Metrics, monitoring_infos

from luminosity.cli.main import main
from luminosity.core import InferenceMetrics
from luminosity.engine.reporting.step_metrics import user_metrics
from luminosity.events import MetricView
from tests.runners import IS_REFERENCE, run


def counter(step: str, namespace: str, name: str, value: int) -> object:
    return monitoring_infos.int64_user_counter(namespace, name, value, ptransform=step)


def test_metrics_are_sorted_by_step_and_libraries_come_last() -> None:
    infos = [
        counter("Read", "ReadTable", "rows_read", 3),
        counter("Late", "mine", "b", 1),
        counter("Late", "mine", "a", 2),
        counter("Early", "mine", "z", 3),
        counter("Batch", "apache_beam.transforms.util.Batch", "size", 3),
        counter("Infer", "RunInference", "num_inferences", 3),
    ]
    found = user_metrics({"s1": infos}, ["Early", "Read", "Late"])  # type: ignore[dict-item]  # pyright: ignore
    assert [(view.step, view.name) for view in found] == [
        ("Early", "z"),
        ("Late", "a"),
        ("Late", "b"),
        ("Read", "rows_read"),
        ("Batch", "size"),
        ("Infer", "num_inferences"),
    ]
    assert [view.of_library for view in found] == [False] * 3 + [True] * 3


def test_the_counters_of_a_models_step_are_shown_elsewhere() -> None:
    infos = [
        counter("Infer", "Echo", InferenceMetrics.DEVICE_BUSY, 3),
        counter("Infer", "Echo", "num_inferences", 3),
        counter("Infer", "mine", "words", 3),
    ]
    found = user_metrics({"s1": infos}, [])  # type: ignore[dict-item]  # pyright: ignore
    assert [view.name for view in found] == ["words"]


class Measure(beam.DoFn):
    def process(self, element: str) -> Iterator[str]:
        Metrics.counter("mine", "words").inc()
        Metrics.distribution("mine", "length").update(len(element))
        Metrics.gauge("mine", "last").set(7)
        yield element


@pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")
def test_lum_show_prints_what_the_code_of_a_run_has_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        _ = pipeline | beam.Create(["a", "ccc"]) | "Measure" >> beam.ParDo(Measure())

    run(build, f"--run_dir={tmp_path}", "--cpu_workers=1")
    assert main(["show", "last", f"--run_dir={tmp_path}"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "counter Measure: words 2" in lines
    assert "distribution Measure: length min 1, mean 2, max 3, count 2" in lines
    assert "gauge Measure: last 7" in lines

    assert main(["show", "last", "--json", f"--run_dir={tmp_path}"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["state"] == "done"
    assert shown["metrics_left_out"] == 0
    names = {"step": "Measure", "namespace": "mine"}
    assert {metric["name"]: metric for metric in shown["metrics"]} == {
        "words": {"kind": "counter", **names, "name": "words", "value": 2},
        "last": {"kind": "gauge", **names, "name": "last", "value": 7},
        "length": {"kind": "distribution", **names, "name": "length"}
        | {"count": 2, "sum": 4, "min": 1, "max": 3, "mean": 2.0},
    }


def test_an_empty_distribution_has_no_mean() -> None:
    assert MetricView("distribution", "s", "n", "d").mean == 0.0
