"""Label reviews with a teacher in bulk, train a small student on the labels, and score both on held-out reviews.

::

    lum run examples/distil/pipeline.py
    lum run examples/distil/pipeline.py --rows=8000 --held-out=2000 --out=distilled

It is plain Beam and runs on any runner. Options that ``--help`` does not list go to Beam.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
import models
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import texts
from apache_beam.metrics.metric import MetricResults
from apache_beam.ml.inference.sklearn_inference import SklearnModelHandlerNumpy
from apache_beam.options.pipeline_options import PipelineOptions
from rich.console import Console
from rich.table import Table

from luminosity import Column, Enrich, MapTable, ReadTable, WriteTable
from luminosity.core import InferenceMetrics
from luminosity.evaluation import Evaluate, Evaluation

ROWS = 2_000  # reviews that the teacher labels
HELD_OUT = 1_000  # reviews that both models are scored with
_ROWS_PER_GROUP = 100  # rows that a reader takes at a time: few enough to give all workers something to do
_MICROSECONDS = 1e6


@dataclass(frozen=True)
class Outcome:
    """The scores of both models against people's labels, the student's against the teacher's, and both speeds."""

    against_people: dict[str, Any]
    against_teacher: dict[str, Any]
    teacher_rows_per_s: float
    student_rows_per_s: float


def label(reviews: Path, out: Path, options: PipelineOptions) -> None:
    """Run the teacher's encoder over the reviews, the slow part that is done once."""
    with beam.Pipeline(options=options) as pipeline:
        _ = (
            pipeline
            | "Read" >> ReadTable(str(reviews))
            | "Encode" >> Enrich(embedding=Column(models.encoder(), "text"))
            | "Write" >> WriteTable(str(out), if_exists="replace")
        )


def compare(reviews: Path, direction: models.Array, student: Path, out: Path, options: PipelineOptions) -> Outcome:
    """Run both models over held-out reviews, and evaluate them."""
    pipeline = beam.Pipeline(options=options)
    scored = (
        pipeline
        | "Read" >> ReadTable(str(reviews))
        | "Score"
        >> Enrich(
            embedding=Column(models.encoder(), "text"),
            teacher=Column(models.teacher_of(direction), "embedding"),
            student=Column(SklearnModelHandlerNumpy(str(student)), "text", pa.float32()),
        )
        | "Decide" >> MapTable(decide)
    )
    people = scored | "AgainstPeople" >> Evaluate(
        "is_good", "teacher_says", score="teacher", prediction_b="student_says", score_b="student"
    )
    teacher = scored | "AgainstTeacher" >> Evaluate("teacher_says", "student_says", score="student")
    _ = people | "SavePeople" >> beam.Map(save, str(out / "against_people.json"))
    _ = teacher | "SaveTeacher" >> beam.Map(save, str(out / "against_teacher.json"))
    result = pipeline.run()
    result.wait_until_finish()
    seconds = seconds_by_model(result.metrics())
    rows = pyarrow.parquet.read_metadata(reviews).num_rows
    return Outcome(
        json.loads((out / "against_people.json").read_text()),
        json.loads((out / "against_teacher.json").read_text()),
        rows / (seconds["embedding"] + seconds["teacher"]),
        rows / seconds["student"],
    )


def decide(scored: Any) -> Any:
    """Turn the scores of both models into decisions."""
    for model in ("teacher", "student"):
        scored = scored.append_column(f"{model}_says", pa.array(scored[model].to_numpy() > 0))
    return scored.drop_columns(["embedding", "text"])


def save(found: Evaluation, path: str) -> None:
    """Write an evaluation as JSON."""
    Path(path).write_text(json.dumps(found.as_dict()))


def seconds_by_model(metrics: MetricResults) -> Counter[str]:
    """Return the seconds that preparing and computing took, by the column of the model."""
    parts = (InferenceMetrics.PREPARE, InferenceMetrics.COLLATE, InferenceMetrics.COMPUTE)
    found: Counter[str] = Counter()
    for counter in metrics.query()["counters"]:
        if counter.key.metric.name in parts:
            found[counter.key.metric.namespace] += counter.result / _MICROSECONDS
    return found


def print_outcome(console: Console, outcome: Outcome) -> None:
    """Print what the student keeps of the teacher's quality, and how much faster it is."""
    people, faster = outcome.against_people, outcome.student_rows_per_s / outcome.teacher_rows_per_s
    table = Table("model", "accuracy", "AUC", "agrees with the teacher", "rows/s", "speed")
    first, second = people["metrics"], people["metrics_b"]
    agreement = _shown(outcome.against_teacher["metrics"]["accuracy"])
    speeds = f"{outcome.teacher_rows_per_s:,.0f}", f"{outcome.student_rows_per_s:,.0f}"
    table.add_row("teacher", _shown(first["accuracy"]), f"{first['auc']['value']:.3f}", "", speeds[0], "1x")
    table.add_row(
        "student", _shown(second["accuracy"]), f"{second['auc']['value']:.3f}", agreement, speeds[1], f"{faster:,.0f}x"
    )
    console.print(table)
    kept = people["metrics_b"]["accuracy"]["value"] / people["metrics"]["accuracy"]["value"]
    difference = people["differences"]["accuracy"]
    console.print(
        f"The student keeps {kept:.0%} of the teacher's accuracy and is {faster:,.0f} times as fast. "
        f"Student minus teacher: {difference['value']:+.3f} ({difference['low']:+.3f} to {difference['high']:+.3f})."
    )


def _shown(metric: dict[str, float]) -> str:
    return f"{metric['value']:.3f} ({metric['low']:.3f} to {metric['high']:.3f})"


def main(argv: Sequence[str] | None = None) -> None:
    """Label, train, compare, and print the table."""
    parser = argparse.ArgumentParser(description="Distil a sentence encoder into a linear model.", allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"reviews to label (default: {ROWS:,})")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help=f"reviews to score (default: {HELD_OUT:,})")
    parser.add_argument("--out", type=Path, help="folder for all files (default: a temporary one)")
    arguments, beam_args = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    out = arguments.out or Path(tempfile.mkdtemp(prefix="distil-"))
    out.mkdir(parents=True, exist_ok=True)
    options = PipelineOptions(beam_args)
    console = Console(highlight=False)

    to_label, held_out = texts.load(arguments.rows, arguments.held_out)
    # The sentences that define good and bad are encoded with the reviews.
    sentences = pa.table({"id": list(range(-1, -9, -1)), "text": [*models.GOOD, *models.BAD]})
    pyarrow.parquet.write_table(
        pa.concat_tables([sentences, to_label]), out / "to_label.parquet", row_group_size=_ROWS_PER_GROUP
    )
    pyarrow.parquet.write_table(held_out, out / "held_out.parquet", row_group_size=_ROWS_PER_GROUP)
    label(out / "to_label.parquet", out / "labelled", options)

    # Files come in any order. In that of the ids, the student is the same in every run.
    labelled = pyarrow.parquet.read_table(out / "labelled").sort_by("id")
    direction = models.direction(labelled)
    labelled = labelled.slice(len(sentences))
    scores = np.stack(labelled["embedding"].to_numpy()) @ direction
    weights = models.train_student(labelled["text"].to_pylist(), scores, out / "student.pkl")
    console.print(
        f"The teacher (22.7 million weights) labelled {len(labelled):,} reviews, {np.mean(scores > 0):.0%} of them as "
        f"good. The student has {weights:,} weights."
    )

    outcome = compare(out / "held_out.parquet", direction, out / "student.pkl", out, options)
    print_outcome(console, outcome)
    console.print(f"files  {out}", soft_wrap=True)


if __name__ == "__main__":
    main()
