"""Tests of the dashboard and the alert rules against what is really exported, with promtool where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from luminosity.cli.main import main
from luminosity.operate.prometheus import exporter as text_module
from luminosity.operate.prometheus.catalog import series_names
from luminosity.operate.prometheus.exporter import ALERT_RULES, DASHBOARD, metrics_text
from tests.operate.exported_runs import batch, ended, record, run_id, snapshot, stalled, started, with_device
from tests.operate.test_exported import PROMTOOL, rich_text

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
MINUTES = 60


def test_rules_that_the_user_has_changed_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "alerts.yaml"
    assert [main(["metrics", "--rules", str(path)]) for _ in range(2)] == [0, 0]
    path.write_text("mine")
    assert main(["metrics", "--rules", str(path)]) == 2
    assert "may hold changes of yours" in capsys.readouterr().err
    assert path.read_text() == "mine"


def dashboard_expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERT_RULES.read_text())["groups"] for rule in group["rules"]]


def promtool(*arguments: str) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dashboard_and_rules_name_only_series_and_labels_that_are_exported(tmp_path: Path) -> None:
    exported = {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(rich_text(tmp_path))
        for sample in family.samples
    }
    assert exported.keys() == series_names()
    expressions = [*dashboard_expressions(), *(rule["expr"] for rule in rules())]
    assert len(expressions) > 30
    for expression in expressions:
        names = re.findall(r"\bluminosity_\w+", expression)
        assert names, expression
        for name in names:
            assert name in exported, f"{name} in {expression}"
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            known = set.union(*(exported[name] for name in re.findall(r"\bluminosity_\w+", target["expr"])))
            assert labels <= known, target


def test_the_text_of_an_alert_names_the_run_and_how_to_show_it() -> None:
    for rule in rules():
        if rule["alert"] != "LuminosityDrift":
            text = " ".join(rule["annotations"].values())
            assert "{{ $labels.run }}" in text, rule["alert"]
            assert "{{ $labels.pipeline }} {{ $labels.folder }}" in text, rule["alert"]
            assert " last" not in re.sub(r"\{\{.*?\}\}", "", text).replace("at last", "")
            for joined in re.findall(r"(?:on|by) \(([^)]*)\)", rule["expr"]):
                assert joined.startswith("instance, pipeline, folder"), rule["alert"]


@needs_promtool
def test_promtool_reads_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    expressions = [each.replace("$__rate_interval", "5m") for each in dashboard_expressions()]
    recorded = [{"record": f"panel:{number}", "expr": each} for number, each in enumerate(expressions)]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    promtool("check", "rules", str(path))


@needs_promtool
def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module.time, "time", lambda: 5.0)
    exports = iter(range(100))

    def export(*events: Any) -> str:
        folder = tmp_path / str(next(exports))
        record(folder, started(1, at=0.0), *events)
        return metrics_text(folder)

    def case(name: str, text: str, expected: Iterable[str], grows: Mapping[str, float] | None = None) -> dict[str, Any]:
        return {
            "name": name,
            "interval": "1m",
            "input_series": series(text, grows or {}),
            "alert_rule_test": [
                {"eval_time": "40m", "alertname": rule["alert"], "exp_alerts": expectations(rule, expected, text)}
                for rule in rules()
            ],
        }

    fresh = {"luminosity_run_last_update_timestamp_seconds": 60.0}  # the run reports every minute
    moves = {**fresh, "luminosity_stage_elements_total": 10.0}
    busy = batch(snapshot(1, 5.0))
    record(tmp_path / "before", started(0, at=0.0), ended(0, 10.0, "failed"))
    record(tmp_path / "before", started(1, at=20.0), ended(1, 10.0))
    failed_before = metrics_text(tmp_path / "before")
    record(tmp_path / "meanwhile", started(1, at=0.0), ended(1, 30.0, "failed"))
    record(tmp_path / "meanwhile", started(2, at=20.0), ended(2, 5.0))
    failed_meanwhile = metrics_text(tmp_path / "meanwhile")
    record(tmp_path / "hangs", started(1, at=0.0), stalled(busy, 300.0))
    record(tmp_path / "hangs", started(2, at=20.0), ended(2, 5.0))
    hangs_meanwhile = metrics_text(tmp_path / "hangs")
    drifted = tmp_path / "drifted"
    drifted.mkdir()
    cases = [
        case("goes well", export(busy), [], moves),
        case("failed", export(ended(1, 10.0, "failed")), ["LuminosityRunFailed"]),
        case("done", export(ended(1, 10.0)), []),
        case("done after a failure", failed_before, []),
        case("an older run failed later", failed_meanwhile, ["LuminosityRunFailed"]),
        case("stalled", export(busy), ["LuminosityRunStalled"], fresh),
        case("hangs", export(stalled(busy, 300.0)), ["LuminosityStageStalled"], moves),
        case("hangs beside a later run", hangs_meanwhile, ["LuminosityStageStalled"], moves),
        case("takes long once", export(stalled(busy, 90.0)), [], moves),
        case("silent", export(busy), ["LuminosityRunStalled", "LuminosityRunSilent"]),
        case("quiet stream", export(snapshot(1, 5.0)), [], fresh),
        case(
            "late",
            export(snapshot(1, 5.0)),
            ["LuminosityWatermarkLag"],
            {**moves, "luminosity_watermark_lag_seconds": 60.0},
        ),
        case("idle", export(with_device(busy, 0.9, 0.01)), ["LuminosityDeviceIdle"], moves),
        case("idle, not measured", export(with_device(busy, 0.01, None)), ["LuminosityDeviceIdle"], moves),
        case("busy, not measured", export(with_device(busy, 0.5, None)), [], moves),
        case("drift", rich_text(drifted), ["LuminosityDrift"]),
    ]
    shutil.copy(ALERT_RULES, tmp_path / "alerts.yaml")
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": cases})
    )
    promtool("test", "rules", str(tmp_path / "tests.yaml"))


def series(text: str, grows: Mapping[str, float]) -> list[dict[str, str]]:
    """Return the exported values as series of an hour, those in ``grows`` by so much a minute."""
    found: list[dict[str, str]] = []
    used = ALERT_RULES.read_text()
    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.name in used else ():  # fewer series take promtool less time
            labels = ",".join(f"{name}={json.dumps(value)}" for name, value in sample.labels.items())
            values = f"{sample.value}+{grows.get(sample.name, 0.0)}x{MINUTES}"
            found.append({"series": f"{sample.name}{{{labels}}}", "values": values})
    return found


def expectations(rule: Mapping[str, Any], expected: Iterable[str], text: str) -> list[dict[str, Any]]:
    """Return the alerts of one rule, with all their labels; the annotations are checked for being complete."""
    if rule["alert"] not in expected:
        return []
    (where,) = {
        sample.labels["run_dir"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "run_dir" in sample.labels
    }
    labels = {"pipeline": "reviews.py", "folder": "/jobs", "run": run_id(1), "run_dir": where}
    value = {
        "LuminosityRunSilent": "39m 55s",
        "LuminosityWatermarkLag": "40m 2s",
        "LuminosityDeviceIdle": "1%",
        "LuminosityStageStalled": "5m 0s",
    }
    if rule["alert"] in ("LuminosityWatermarkLag", "LuminosityStageStalled"):
        labels["stage"] = 'Embed "x"\\y'
    elif rule["alert"] == "LuminosityDeviceIdle":
        labels["device"] = "gpu:0"
    elif rule["alert"] == "LuminosityDrift":
        labels = {"reference": "ref.parquet", "columns": "embedding", "kernel": "gaussian", "key": "de"}
    annotations = {
        name: re.sub(
            r"\{\{ \$(?:labels\.(\w+)|value)[^}]*\}\}",
            lambda found: labels.get(found[1], "") if found[1] else value[rule["alert"]],
            template,
        )
        for name, template in rule["annotations"].items()
    }
    return [{"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": annotations}]


def test_the_command_writes_whole_files_and_refuses_what_is_no_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, out = tmp_path / "runs", tmp_path / "lum.prom"
    record(runs, started(1), ended(1, 10.0))
    assert main(["metrics", "--run_dir", str(runs), "--out", str(out)]) == 0
    assert main(["metrics", "--run_dir", str(runs)]) == 0
    assert out.read_text() == capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["lum.prom"], "no unfinished file is left"
    (tmp_path / "x.sqlite").write_text("not a history")
    for history in ("x.sqlite", "none.sqlite"):
        assert main(["metrics", "--run_dir", str(runs), "--history", str(tmp_path / history), "--out", str(out)]) == 2
        assert history in capsys.readouterr().err
    assert "luminosity_run_state" in out.read_text(), "the file stays as it was"
    dashboard, alerts = tmp_path / "d.json", tmp_path / "a.yaml"
    assert main(["metrics", "--dashboard", str(dashboard), "--rules", str(alerts)]) == 0
    assert (dashboard.read_text(), alerts.read_text()) == (DASHBOARD.read_text(), ALERT_RULES.read_text())
