"""Tests of the BigQuery example, against emulators in a separate environment: the real wire formats, both ways."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import apache_beam
import pytest

import luminosity
from tests.own_environment import interpreter_with

EXAMPLE = Path(__file__).parents[3] / "examples" / "stores" / "bigquery.py"
SOURCES = Path(luminosity.__file__).parents[1]
PACKAGES = [
    "bqemulator==1.4.*",
    "duckdb==1.5.5",
    "duckdb-extension-spatial==1.5.5",
    "duckdb-extension-avro==1.5.5",
    "gcp-storage-emulator",
    f"apache-beam[gcp]=={apache_beam.__version__}",
    *("nvidia-ml-py", "pyarrow", "rich", "threadpoolctl"),  # our own
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the emulators, whose packages conflict with ours. ``BIGQUERY_VENV`` names a folder that has them."""
    return interpreter_with(PACKAGES, "BIGQUERY_VENV", tmp_path_factory.mktemp("bigquery"))


@pytest.mark.slow
@pytest.mark.timeout(1_500)
@pytest.mark.parametrize(("write", "read"), [("STREAMING_INSERTS", "DIRECT_READ"), ("FILE_LOADS", "DIRECT_READ")])
def test_a_table_goes_to_bigquery_and_back(write: str, read: str, python: Path, tmp_path: Path) -> None:
    emulator = Path(__file__).with_name("bigquery_emulator.py")
    options = [f"--method={write}", f"--read={read}", "--temp_location=gs://bucket/temp"]
    done = subprocess.run(
        [python, emulator, EXAMPLE, "--table=project:dataset.colours", *options],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
    )

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 10
    assert "crimson [0.86, 0.08, 0.24]" in lines
