"""Two programs for one job: a DoFn that does everything by hand, and RunInference.

Both classify the same reviews, and must return the same predictions and dead letters. Then their lines and the keywords
at which they branch are counted::

    lum run examples/talks/sentiment_compare.py
    python examples/talks/sentiment_compare.py --runner=FnApiRunner
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _sentiment_job as job
import sentiment
import sentiment_by_hand
from _count_lines import count_file
from _models import train_sentiment

PROGRAMS = {"by hand": sentiment_by_hand, "RunInference": sentiment}


def compare(by_hand: dict[str, Any], ours: dict[str, Any]) -> None:
    """Print how many labels are the same, and by how much the scores differ."""
    same = sum(one[:2] == two[:2] for one, two in zip(by_hand["answers"], ours["answers"], strict=True))
    apart = max(abs(one[2] - two[2]) for one, two in zip(by_hand["answers"], ours["answers"], strict=True))
    print(f"{same} of {len(ours['answers'])} labels are the same; scores differ by at most {apart:.0e}")
    dead = [[number for number, _ in each["errors"]] for each in (by_hand, ours)]
    print(f"dead letters by hand: {dead[0]}, with RunInference: {dead[1]}")


def report_lines() -> None:
    print(f"{'':14}{'lines':>7}{'code':>7}{'comments':>10}{'blanks':>8}{'complexity':>12}")
    for name, program in PROGRAMS.items():
        found = count_file(Path(str(program.__file__)))
        columns = f"{found.lines:7}{found.code:7}{found.comments:10}{found.blanks:8}{found.complexity:12}"
        print(f"{name:14}{columns}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare two programs for one job.", allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=200, help="reviews to classify (default: 200)")
    parser.add_argument("--model", help="a text classifier's folder (default: train a small one)")
    arguments, beam_args = parser.parse_known_args(argv)

    rows = job.texts(arguments.rows)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or train_sentiment(Path(folder) / "model")
        for name, program in PROGRAMS.items():
            output = Path(folder) / name
            job.run(program.classify, model, rows, output, beam_args)
            found.append({file.stem: json.loads(file.read_text()) for file in output.glob("*.json")})
    compare(*found)
    report_lines()


if __name__ == "__main__":
    main()
