"""Tests of the metrics for Prometheus: values, labels, limits, formats."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_classic

from luminosity.drift.history import DriftHistory
from luminosity.drift.result import PastTest
from luminosity.operate.prometheus import exporter as samples_module
from luminosity.operate.prometheus import exporter as text_module
from luminosity.operate.prometheus.catalog import CATALOG, markdown_table, series_names
from luminosity.operate.prometheus.exporter import Exporter, metrics_text
from tests.docs_pages import REPOSITORY
from tests.operate.exported_runs import STARTED_AT, ended, record, rich_run, run_id, snapshot, stalled, started

PROMTOOL = shutil.which("promtool")
Series = dict[str, dict[tuple[tuple[str, str], ...], float]]


def values(text: str, parse=parse_classic) -> Series:  # type: ignore[no-untyped-def]
    found: Series = {}
    for family in parse(text):
        for sample in family.samples:
            key = tuple(sorted(sample.labels.items()))
            assert key not in found.setdefault(sample.name, {}), "a series twice"
            found[sample.name][key] = sample.value
    return found


def value(series: Series, name: str, **labels: str) -> float:
    (found,) = [v for key, v in series[name].items() if labels.items() <= dict(key).items()]
    return found


def a_test(key: str, time: str, p_value: float, *, reference: str = "ref.parquet", mmd2: float = 0.5) -> PastTest:
    is_drift = p_value <= 0.05
    return PastTest(
        time,
        reference,
        "new.parquet",
        "embedding",
        "gaussian",
        1.0,
        0.9,
        mmd2,
        p_value,
        0.05,
        is_drift,
        10,
        20,
        key=key,
    )


def rich_text(folder: Path) -> str:
    """Every metric at once: the text that dashboards and rules are checked against."""
    record(folder, started(0, at=STARTED_AT - 100), ended(0, 10.0, "failed"))
    record(folder, started(1, at=STARTED_AT - 50), stalled(snapshot(1, 45.0), 40.0))
    rich_run(folder, 2)
    history = folder / "drift.sqlite"
    DriftHistory(history).append(
        a_test("de", "2026-01-01T00:00:00.000+00:00", 0.5),
        a_test("de", "2026-01-02T00:00:00.000+00:00", 0.01),
        a_test("fr", "2026-01-02T00:00:00.000+00:00", 0.7, mmd2=math.nan),
    )
    return metrics_text(folder, [history])


def test_the_newest_run_of_a_pipeline_is_exported_in_base_units(tmp_path: Path) -> None:
    text = rich_text(tmp_path)
    series = values(text)
    assert series.keys() == series_names()
    assert value(series, "luminosity_stage_elements_total", stage="Read", pool="cpu") == 100
    assert value(series, "luminosity_stage_cpu_seconds_total", stage="Read") == 9.25
    assert value(series, "luminosity_model_batch_p99_seconds", stage='Embed "x"\\y', model="Embed/Model") == 0.5
    assert value(series, "luminosity_model_padding_ratio") == 0.25
    assert value(series, "luminosity_worker_peak_resident_bytes", pool="cpu") == 333
    assert value(series, "luminosity_worker_peak_resident_bytes", pool="device") == 555
    assert value(series, "luminosity_run_last_success_timestamp_seconds") == STARTED_AT + 10
    assert value(series, "luminosity_checkpoint_last_timestamp_seconds") == STARTED_AT + 9
    assert value(series, "luminosity_checkpoint_copy_lag_seconds") == 1.5
    assert value(series, "luminosity_user_distribution_sum") == 10
    low, expected, high = (value(series, "luminosity_run_cost", bound=b) for b in ("low", "expected", "high"))
    assert 0 < low <= expected <= high
    assert {dict(key)["state"]: v for key, v in series["luminosity_run_state"].items() if v} == {"done": 1.0}
    assert value(series, "luminosity_drift_p_value", key="de") == 0.01, "the newest test"
    assert value(series, "luminosity_drift_detected", key="de") == 1
    assert ("key", "fr") not in {pair for key in series["luminosity_drift_mmd2"] for pair in key}
    of_runs = {name for name, each in series.items() if any(run_id(2) in dict(key).values() for key in each)}
    assert of_runs == {"luminosity_run_info"}, "a run's id is in no other series of the newest run"
    assert value(series, "luminosity_run_last_failure_timestamp_seconds", run=run_id(0)) == STARTED_AT - 90
    assert value(series, "luminosity_run_stalled_seconds", run=run_id(1), stage='Embed "x"\\y') == 40.0
    assert len(series["luminosity_run_stalled_seconds"]) == 1, "only of stages that are stalled"
    assert "job=" not in text


def test_openmetrics_has_the_same_values_and_its_own_type(tmp_path: Path) -> None:
    rich_run(tmp_path)
    exporter = Exporter(tmp_path)
    modern = exporter.export("application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert modern.content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert modern.text.endswith("# EOF\n")
    classic = exporter.export("*/*")
    assert classic.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert values(modern.text, parse_openmetrics) == values(classic.text)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_finds_nothing_wrong(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=rich_text(tmp_path), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_failed_run_keeps_the_time_of_the_last_success_and_tells_no_reason(tmp_path: Path) -> None:
    rich_run(tmp_path, 1)
    exporter = Exporter(tmp_path)
    exporter.export()
    record(tmp_path, started(2, at=STARTED_AT + 100), ended(2, 20.0, "failed", elements=5))
    for each in (exporter, Exporter(tmp_path)):  # one has seen the first run already
        text = each.export().text
        series = values(text)
        assert value(series, "luminosity_run_state", state="failed") == 1
        assert value(series, "luminosity_run_last_success_timestamp_seconds") == STARTED_AT + 10
        assert value(series, "luminosity_run_last_end_timestamp_seconds") == STARTED_AT + 120
        assert value(series, "luminosity_stage_elements_total", stage="Read") == 5, "a new run begins at 0 again"
        assert "hunter2" not in text
    (tmp_path / f"{run_id(2)}.json").unlink()
    assert value(values(exporter.export().text), "luminosity_run_state", state="done") == 1


def test_a_running_run_counts_and_falls_behind_while_it_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module.time, "time", lambda: STARTED_AT + 105.0)
    record(tmp_path, started(1), snapshot(1, 5.0))
    exporter = Exporter(tmp_path)
    series = values(exporter.export().text)
    assert value(series, "luminosity_running_runs") == 1
    assert value(series, "luminosity_run_state", state="running") == 1
    assert value(series, "luminosity_watermark_lag_seconds") == 2.5 + 100
    assert "luminosity_run_last_end_timestamp_seconds" not in series
    record(tmp_path, started(1), snapshot(1, 6.0, elements=150))
    assert value(values(exporter.export().text), "luminosity_stage_elements_total", stage="Read") == 150


def test_the_number_of_series_is_bounded_and_what_is_left_out_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples_module, "MOST_OF_USER", 10)
    monkeypatch.setattr(samples_module, "MOST_STAGES", 1)
    monkeypatch.setattr(text_module, "_MOST_PIPELINES", 2)
    monkeypatch.setattr(text_module, "_MOST_TESTS", 3)
    for number, name in enumerate(["old.py", "reviews.py", "secret.py?token=abcdef"], start=1):
        record(tmp_path, started(number, name), ended(number, 10.0, many=30))
    (tmp_path / f"{run_id(4)}.json").write_text("{")
    history = tmp_path / "drift.sqlite"
    DriftHistory(history).append(*(a_test(f"k{i}", f"2026-01-0{i + 1}T00:00:00.000+00:00", 0.5) for i in range(5)))
    broken = tmp_path / "broken.sqlite"
    broken.write_text("not a history at all")
    text = metrics_text(tmp_path, [history, broken, tmp_path / "none.sqlite"])
    series = values(text)
    assert {dict(key)["pipeline"] for key in series["luminosity_run_state"]} == {"reviews.py", "secret.py?token=***"}
    assert len(series["luminosity_user_counted_total"]) == 20
    assert len(series["luminosity_stage_elements_total"]) == 2
    assert {dict(key)["key"] for key in series["luminosity_drift_level"]} == {"k2", "k3", "k4"}
    left_out = {dict(key)["what"]: v for key, v in series["luminosity_export_left_out"].items()}
    assert left_out == {
        "pipelines": 1,
        "stages": 2,
        "user metrics": 2 * 23,
        "tests for drift": 2,
        "damaged records": 1,
        "records not read yet": 0,
        "damaged histories": 1,
    }


def test_a_scrape_reads_a_bounded_number_of_records(tmp_path: Path) -> None:
    for number in range(1, 6):
        record(tmp_path, started(number), ended(number, 10.0, "done" if number == 1 else "failed"))
    exporter = Exporter(tmp_path, read_at_once=2)
    counts: list[tuple[float, bool]] = []
    for _ in range(4):
        series = values(exporter.export().text)
        assert value(series, "luminosity_run_state", state="failed") == 1
        left = value(series, "luminosity_export_left_out", what="records not read yet")
        counts.append((left, "luminosity_run_last_success_timestamp_seconds" in series))
    assert counts == [(3, False), (1, False), (0, True), (0, True)]


def test_every_metric_is_documented_and_has_no_forbidden_label() -> None:
    assert markdown_table() in (REPOSITORY / "docs" / "metrics.md").read_text()
    for metric in CATALOG.values():
        assert not {"job", "instance", "quantile", "le"} & set(metric.labels), metric
        is_of_one_run = "run" in metric.labels
        allowed = ("run_info", "run_last_failure_timestamp_seconds", "run_stalled_seconds")
        assert is_of_one_run == (metric.name.removeprefix("luminosity_") in allowed), (
            "each run would add all series again"
        )


def test_pipelines_of_the_same_script_name_do_not_hide_each_other(tmp_path: Path) -> None:
    record(tmp_path, started(1, "pipeline.py", folder="/teams/a"), ended(1, 5.0, "failed"))
    record(tmp_path, started(2, "pipeline.py", folder="/teams/b"), ended(2, 5.0))
    record(tmp_path, started(3, "pipeline.py", folder="/teams/b", job="nightly"), ended(3, 5.0, "failed"))
    record(tmp_path, started(4, "pipeline.py", folder="/teams/b", job="hourly"), ended(4, 5.0))
    exporter = Exporter(tmp_path)
    for _ in range(2):  # the second look reads no file again
        series = values(exporter.export().text)
        states = {
            (dict(key)["pipeline"], dict(key)["folder"]): dict(key)["state"]
            for key, is_true in series["luminosity_run_state"].items()
            if is_true
        }
        assert states == {
            ("pipeline.py", "/teams/a"): "failed",
            ("pipeline.py", "/teams/b"): "done",
            ("nightly", ""): "failed",
            ("hourly", ""): "done",
        }
        failures = {dict(key)["run"]: dict(key) for key in series["luminosity_run_last_failure_timestamp_seconds"]}
        assert failures.keys() == {run_id(1), run_id(3)}
        assert failures[run_id(1)]["run_dir"] == str(tmp_path)


def test_records_without_a_folder_count_for_the_newest_run_of_their_script(tmp_path: Path) -> None:
    record(tmp_path, started(1, "pipeline.py", folder=""), ended(1, 5.0, "failed"))  # of an older version
    assert value(values(metrics_text(tmp_path)), "luminosity_run_state", state="failed", folder="") == 1
    record(tmp_path, started(2, "pipeline.py", at=STARTED_AT + 60, folder="/teams/a"), ended(2, 5.0))
    series = values(metrics_text(tmp_path))
    assert {dict(key)["folder"] for key in series["luminosity_run_state"]} == {"/teams/a"}, "the old failure is past"
    assert value(series, "luminosity_run_state", state="done") == 1


def test_a_failure_of_an_older_run_that_ends_later_is_seen(tmp_path: Path) -> None:
    record(tmp_path, started(1), ended(1, 100.0, "failed"))
    record(tmp_path, started(2, at=STARTED_AT + 10), ended(2, 5.0))
    series = values(metrics_text(tmp_path))
    newest = value(series, "luminosity_run_start_timestamp_seconds")
    assert value(series, "luminosity_run_last_failure_timestamp_seconds", run=run_id(1)) > newest


def test_pipelines_that_need_a_look_are_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "_MOST_PIPELINES", 2)
    for number, state in enumerate(["failed", "done", "done", "done"], start=1):
        record(tmp_path, started(number, folder=f"/tmp/{number}"), ended(number, 5.0, state))
    series = values(metrics_text(tmp_path))
    assert {dict(key)["folder"] for key in series["luminosity_run_state"]} == {"/tmp/1", "/tmp/4"}


def test_long_folders_stay_apart(tmp_path: Path) -> None:
    deep = "/srv/" + "deep/" * 60
    for number, end in enumerate("ab", start=1):
        record(tmp_path, started(number, folder=deep + end), ended(number, 5.0))
    folders = {dict(key)["folder"] for key in values(metrics_text(tmp_path))["luminosity_run_state"]}
    assert len(folders) == 2
    assert max(map(len, folders)) == 200
