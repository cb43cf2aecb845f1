"""What the commands about recorded runs share."""

from __future__ import annotations

import argparse
from pathlib import Path

from luminosity.engine.monitor import records
from luminosity.errors import RecordError


def add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run_dir",
        metavar="DIR",
        help="where the runs are (default: the environment's LUMINOSITY_RUN_DIR, else ~/.luminosity/runs)",
    )


def folder(parsed: argparse.Namespace) -> Path:
    found = records.folder(parsed.run_dir)
    if found is None:
        raise RecordError(
            "runs are not recorded (--run_dir or LUMINOSITY_RUN_DIR is off); --run_dir=DIR names a folder"
        )
    return found
