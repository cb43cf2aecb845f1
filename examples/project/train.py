"""Train a small classifier of wines: ``train.py TABLE MODEL --seed=N``."""

from __future__ import annotations

import argparse
import pickle

import numpy as np
from raw import COLUMNS
from sklearn.ensemble import RandomForestClassifier

TREES = 20


def main() -> None:
    """Train on the table, and save the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table")
    parser.add_argument("model")
    parser.add_argument("--seed", type=int, default=0, help="of the random forest: the same seed gives the same model")
    parsed = parser.parse_args()
    rows = np.loadtxt(parsed.table, delimiter=",", skiprows=1)
    features, cultivars = rows[:, : len(COLUMNS)], rows[:, len(COLUMNS)].astype(int)
    model = RandomForestClassifier(TREES, random_state=parsed.seed).fit(features, cultivars)
    with open(parsed.model, "wb") as file:
        pickle.dump(model, file)


if __name__ == "__main__":
    main()
