"""The examples run as a user runs them."""

from __future__ import annotations

import csv
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
