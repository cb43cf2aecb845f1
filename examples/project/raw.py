"""Write measurements of wines to two tables, one to train on and one to predict: ``raw.py TRAIN TEST``."""

from __future__ import annotations

import csv
import sys
from typing import Any

from sklearn.datasets import load_wine

COLUMNS = ("alcohol", "flavanoids", "color_intensity", "proline")


def main(train: str, test: str) -> None:
    """Write every other wine to each table."""
    wines: Any = load_wine()
    chosen = [wines.feature_names.index(name) for name in COLUMNS]
    rows = [[*row[chosen], cultivar] for row, cultivar in zip(wines.data, wines.target, strict=True)]
    for path, part in ((train, rows[::2]), (test, rows[1::2])):
        with open(path, "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([[*COLUMNS, "cultivar"], *part])


if __name__ == "__main__":
    main(*sys.argv[1:])
