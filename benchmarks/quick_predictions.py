"""A million quick predictions from Parquet to Parquet: the time of the whole process, from start to exit.

Daft and Ray are not part of this project: they are installed into a separate environment in the folder for temporary
files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import _measure
import _others
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

ROWS = 1_000_000
FEATURES = 8
FILES = 4
ROUNDS = 5
OTHERS = ["daft==0.7.26", "ray[data]==2.60.0", "numpy==2.4.6", "pyarrow==25.0.1"]

HERE = Path(__file__).parent
SIDES = HERE / "quick"


def make_table(folder: Path, weights: Path, total: int = ROWS) -> None:
    generator = np.random.default_rng(0)
    np.save(weights, generator.normal(size=FEATURES))
    folder.mkdir()
    for number in range(FILES):
        rows = total // FILES
        features = generator.normal(size=(rows, FEATURES)).astype(np.float32)
        columns = {"id": np.arange(number * rows, (number + 1) * rows)}
        columns.update({f"f{place}": features[:, place] for place in range(FEATURES)})
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet", row_group_size=rows // 2)


def check(target: Path, source: Path, weights: Path) -> None:
    """Check that every row was written once, with its score."""
    found = ds.dataset(target, format="parquet").to_table().sort_by("id")
    rows = ds.dataset(source, format="parquet").to_table().sort_by("id")
    matrix = np.column_stack([rows[f"f{place}"].to_numpy() for place in range(FEATURES)])
    assert found["id"].equals(rows["id"]), "rows are missing or repeated"
    np.testing.assert_allclose(found["score"].to_numpy(), matrix @ np.load(weights), rtol=1e-5, atol=1e-5)


def timed(command: list[str], target: Path, source: Path, weights: Path) -> float:
    shutil.rmtree(target, ignore_errors=True)
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "DO_NOT_TRACK": "true"}
    begun = time.perf_counter()
    done = subprocess.run(
        [*command, str(source), str(target), str(weights)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    seconds = time.perf_counter() - begun
    if done.returncode:
        sys.exit(f"FAILED: {' '.join(command)}\n{done.stdout}{done.stderr}")
    check(target, source, weights)
    return seconds


def main() -> None:
    python, others = sys.executable, _others.python_with(*OTHERS)
    lum = str(Path(python).parent / "lum")
    commands = {
        "numpy": [python, str(SIDES / "by_numpy.py")],
        "Daft": [others, str(SIDES / "by_daft.py")],
        "Luminosity": [lum, "run", str(SIDES / "by_luminosity.py"), "--progress=off"],
        "Ray Data": [others, str(SIDES / "by_ray.py")],
    }
    with tempfile.TemporaryDirectory(dir=_others.PLACE) as folder:
        source, weights = Path(folder) / "source", Path(folder) / "weights.npy"
        make_table(source, weights)
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(ROUNDS):
            for name, command in commands.items():
                if name != "Ray Data" or number < 2:  # It takes long and varies little.
                    seconds[name].append(timed(command, Path(folder) / "target", source, weights))
    results = {name: {"seconds": median(each)} for name, each in seconds.items()}
    _measure.print_table(results)
    ours = results["Luminosity"]["seconds"]
    _measure.print_figure("times Daft's time", ours / results["Daft"]["seconds"], at_most=2.0)
    _measure.print_figure("times as fast as Ray Data", results["Ray Data"]["seconds"] / ours, at_least=5.0)


if __name__ == "__main__":
    main()
