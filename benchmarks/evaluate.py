"""Evaluate and Describe over 1,000,000 rows on two cores, beside scikit-learn and pandas in memory.

Every side reads the same Parquet files. Ours also computes confidence intervals and curves, scikit-learn does not.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _measure
import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROWS = 1_000_000
FILES = 8
FOLDER = "EVALUATE_BENCHMARK"  # the variable with the folder of the files, for the sides' processes
SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)
NUMBERS = ("score", "price")


def write_files(folder: Path) -> None:
    random = np.random.default_rng(0)
    for number in range(FILES):
        rows = ROWS // FILES
        label = random.integers(2, size=rows)
        score = random.beta(1 + 2 * label, 3 - 2 * label)
        columns = {
            "label": label,
            "prediction": (score > 0.5).astype(np.int64),
            "score": score,
            "price": random.lognormal(3, 1, rows),
            "country": random.choice(["de", "fr", "it", "pl", "pt"], rows),
            "text": [f"row {value}" for value in random.integers(0, 10**9, rows)],
        }
        pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=rows // 2)


def _pattern() -> str:
    return f"{os.environ[FOLDER]}/*.parquet"


def _run(transform: Any, as_dict: Any) -> dict[str, float]:
    """Run a pipeline that writes its one result to a file, and return the result with the seconds."""
    from luminosity import ReadTable

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/result.json"

        def save(found: Any) -> None:
            Path(path).write_text(json.dumps(as_dict(found)))

        def build(pipeline: beam.Pipeline) -> None:
            _ = pipeline | ReadTable(_pattern()) | transform | beam.Map(save)

        seconds = _measure.run_ours(build, "--cpu_workers=2")
        return {"seconds": seconds, **json.loads(Path(path).read_text())}


def _metrics(found: Any) -> dict[str, float]:
    names = ("accuracy", "precision", "recall", "f1", "f1_macro", "auc", "average_precision", "brier", "log_loss")
    return {name: found[name] for name in names}


def evaluate_pipeline() -> dict[str, float]:
    from luminosity.evaluation import Evaluate

    return _run(Evaluate("label", "prediction", score="score"), _metrics)


def evaluate_in_memory() -> dict[str, float]:
    from luminosity.evaluation import evaluate

    start_s = time.perf_counter()
    table = pa.concat_tables(pq.read_table(path) for path in sorted(Path(os.environ[FOLDER]).glob("*.parquet")))
    found = evaluate(table, "label", "prediction", score="score")
    return {"seconds": time.perf_counter() - start_s, **_metrics(found)}


def scikit_learn() -> dict[str, float]:
    import pandas as pd
    from sklearn import metrics as sk

    start_s = time.perf_counter()
    frame = pd.read_parquet(os.environ[FOLDER], columns=["label", "prediction", "score"])
    label, prediction, score = (frame[name].to_numpy() for name in frame)
    precision, recall, f1, _ = sk.precision_recall_fscore_support(label, prediction, average="binary")
    found = {
        "accuracy": sk.accuracy_score(label, prediction),
        "precision": precision,
        "recall": recall,
        "f1": f1,
        "f1_macro": sk.f1_score(label, prediction, average="macro"),
        "auc": sk.roc_auc_score(label, score),
        "average_precision": sk.average_precision_score(label, score),
        "brier": sk.brier_score_loss(label, score),
        "log_loss": sk.log_loss(label, score),
    }
    sk.confusion_matrix(label, prediction)
    return {"seconds": time.perf_counter() - start_s, **{name: float(value) for name, value in found.items()}}


def _columns(found: Any) -> dict[str, float]:
    numbers = {f"{name} {share}": found[name].quantiles[share] for name in NUMBERS for share in SHARES}
    moments = {f"{name} {what}": getattr(found[name], what) for name in NUMBERS for what in ("mean", "deviation")}
    return {**numbers, **moments, "distinct texts": found["text"].distinct, "most frequent": found["country"].top[0][1]}


def describe_pipeline() -> dict[str, float]:
    from luminosity.evaluation import Describe

    return _run(Describe(), _columns)


def pandas() -> dict[str, float]:
    import pandas as pd

    start_s = time.perf_counter()
    frame = pd.read_parquet(os.environ[FOLDER])
    found: dict[str, float] = {}
    for name in NUMBERS:
        found |= {f"{name} {share}": value for share, value in frame[name].quantile(list(SHARES)).items()}
        found |= {f"{name} mean": frame[name].mean(), f"{name} deviation": frame[name].std()}
    found["distinct texts"] = frame["text"].nunique()
    found["most frequent"] = frame["country"].value_counts().iloc[0]
    frame.describe(include="all")  # the other columns
    for name in ("text", "country"):
        frame[name].value_counts()
        frame[name].str.len().describe()
    return {"seconds": time.perf_counter() - start_s, **{name: float(value) for name, value in found.items()}}


def _difference(one: dict[str, float], other: dict[str, float]) -> str:
    """Return the largest relative difference, and what it is of."""
    names = [name for name in one if name != "seconds"]
    apart, name = max((abs(one[name] - other[name]) / abs(other[name]), name) for name in names)
    return f"{apart:.1g} ({name})"


def report(results: _measure.Results) -> None:
    _measure.print_table({name: {"seconds": each["seconds"]} for name, each in results.items()})
    learn, frame = results["scikit-learn"], results["pandas"]
    for name in ("Evaluate", "evaluate()"):
        _measure.print_figure(f"{name}: time / scikit-learn's", results[name]["seconds"] / learn["seconds"], at_most=1)
        print(f"{name}: largest relative difference from scikit-learn: {_difference(results[name], learn)}")
    _measure.print_figure("Describe: time / pandas'", results["Describe"]["seconds"] / frame["seconds"], at_most=1)
    exact = {name: value for name, value in results["Describe"].items() if name != "distinct texts"}
    print(f"Describe: largest relative difference from pandas: {_difference(exact, frame)}")
    texts = abs(results["Describe"]["distinct texts"] / frame["distinct texts"] - 1)
    print(f"Describe: relative error of the estimated number of distinct texts: {texts:.1g}")


SIDES: dict[str, _measure.Side] = {
    "Evaluate": evaluate_pipeline,
    "evaluate()": evaluate_in_memory,
    "scikit-learn": scikit_learn,
    "Describe": describe_pipeline,
    "pandas": pandas,
}

if __name__ == "__main__":
    if len(sys.argv) > 1:
        _measure.main(SIDES, report)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            write_files(Path(temporary))
            os.environ[FOLDER] = temporary
            _measure.main(SIDES, report, rounds=1)
