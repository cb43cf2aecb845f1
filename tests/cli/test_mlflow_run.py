"""``--mlflow`` of ``lum evaluate``, ``lum describe`` and ``lum drift``: results as runs of an experiment in MLflow."""

from __future__ import annotations

import importlib.util
import json
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from luminosity.cli.common import mlflow_run
from luminosity.cli.main import main
from luminosity.inference.registry import mlflow_registry

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs the extra mlflow")


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of MLflow, which keeps its runs in a folder."""
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return mlflow.MlflowClient()


@pytest.fixture
def table(tmp_path: Path) -> str:
    rows = 60
    columns = {
        "label": ["good" if row % 2 else "bad" for row in range(rows)],
        "guess": ["good" if row % 3 else "bad" for row in range(rows)],
        "x": [float(row) for row in range(rows)],
        "price in €": [float("nan") if row % 2 else 1.0 for row in range(rows)],
    }
    pq.write_table(pa.table(columns), tmp_path / "test.parquet")
    return str(tmp_path / "test.parquet")


def the_run(client: Any, experiment: str = "reviews") -> Any:
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    assert run.info.status == "FINISHED"
    return run


def the_result(client: Any, run: Any) -> Any:
    return json.loads(Path(client.download_artifacts(run.info.run_id, "result.json")).read_text())


def test_an_evaluation(client: Any, table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.html"
    words = ["--label=label", "--prediction=guess", "--slice=label", "--at-least=accuracy=0.99", f"--report={report}"]
    assert main(["evaluate", table, *words, "--mlflow=reviews"]) == 3
    run = the_run(client)
    assert run.data.metrics["accuracy"] == pytest.approx(0.5)
    assert run.data.metrics["accuracy_low"] < 0.5 < run.data.metrics["accuracy_high"]
    assert run.data.metrics["rows"] == 60
    assert run.data.metrics["label_good/accuracy"] == pytest.approx(2 / 3)
    assert run.data.params["prediction"] == "guess"
    assert run.data.tags["luminosity.exit_code"] == "3"
    assert run.data.tags["mlflow.runName"] == f"evaluate {table}"
    assert the_result(client, run)["metrics"]["accuracy"]["value"] == run.data.metrics["accuracy"]
    assert {each.path for each in client.list_artifacts(run.info.run_id)} == {"result.json", "report.html"}
    assert "not met: accuracy" in capsys.readouterr().out


def test_a_description(client: Any, table: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # the second one finds the experiment
        assert main(["describe", table, "--reference", table, "--mlflow=reviews"]) == 0
    run, _ = client.search_runs([client.get_experiment_by_name("reviews").experiment_id])
    metrics = run.data.metrics
    assert (metrics["rows"], metrics["missing/price in _"], metrics["distinct/label"]) == (60, 30, 2)
    assert metrics["distance/x"] == 0
    assert len(the_result(client, run)["columns"]) == 4


def test_drift(client: Any, table: str) -> None:
    words = [table, table, "--test=columns", "--column=x", "--mlflow=reviews"]
    assert main(["drift", *words]) == 0
    run = the_run(client)
    assert (run.data.metrics["drift"], run.data.metrics["reference_rows"]) == (0, 60)
    assert run.data.metrics["p_value"] > 0.9
    assert run.data.params["columns"] == "x"
    assert the_result(client, run)["verdict"] == "no drift"
    assert main(["drift", *words[:-1], "--by=label", "--mlflow=by label"]) == 0
    metrics = the_run(client, "by label").data.metrics
    assert (metrics["drift/good"], metrics["current_rows/bad"]) == (0, 30)


def test_secrets_are_hidden_and_what_is_too_much_is_told(
    client: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mlflow_run, "_MOST_METRICS", 3)
    address = "s3://me:pa55word@bucket/x"
    numbers = {f"n{number}": number for number in range(5)} | {"nan": float("nan"), "none": None}
    into = mlflow_run.MlflowRun("describe", "reviews")
    assert into.log(address, numbers, {"table": address, "long": "x" * 9_000}, {"tables": [address]}, None, 0) == 0
    run = the_run(client)
    assert run.data.metrics == {"n0": 0, "n1": 1, "n2": 2}
    assert len(run.data.params["long"]) == 500
    assert "pa55word" not in str(run) + json.dumps(the_result(client, run))
    assert "the first 3 of 5 metrics" in capsys.readouterr().err


def test_a_server_that_is_away_is_told_before_and_after(
    client: Any, table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["describe", table, "--mlflow=reviews"]
    assert main(["describe", table, "--mlflow="]) in (1, 2)
    assert "--mlflow is empty" in capsys.readouterr().err
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setattr(mlflow_registry, "_BETWEEN_ATTEMPTS_S", 0.0)
        with monkeypatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_URI", address)
            assert main(words) == 1
    said = capsys.readouterr()
    assert f"{address} can't be reached" in said.err
    assert said.out == ""  # nothing was computed

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(type(client), "log_text", refuse)
    assert main(words) == 1
    said = capsys.readouterr()
    assert "the result is not in MLflow: the disk is full" in said.err
    assert said.out.startswith("60 rows, 4 columns")
