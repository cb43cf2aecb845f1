"""Asks a run to end: what ``lum stop``, ``lum drain`` and the page check before, and how the run is told."""

from __future__ import annotations

from pathlib import Path

from luminosity.errors import RecordError
from luminosity.runs import journal
from luminosity.runs.journal import Action
from luminosity.runs.records import Record

__all__ = ["ask_to_end"]


def ask_to_end(folder: Path, record: Record, action: Action) -> None:
    """Ask the run of a record in ``folder`` to stop or to drain. Does not wait.

    The request is a file that only this run takes, so that no other process can get it. Raises :class:`RecordError` if
    the run does not run, or if it can't be ended in this way.
    """
    run_id = record.started.run
    if record.state != "running":
        raise RecordError(
            f"run {run_id} is {record.state}, expected one that runs", fix="list the runs with `lum runs`"
        )
    if action == "drain" and not record.started.checkpoint_dir:
        raise RecordError(
            f"run {run_id} has no --checkpoint_dir, and a drain continues a run from its checkpoint",
            fix="end it with `lum stop`; it is cancelled then",
        )
    journal.send(folder, run_id, action)
