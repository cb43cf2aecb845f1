"""The report of ``lum bench``: a table, sentences about what matters, and settings to paste."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from luminosity._shared.text import format_bytes
from luminosity.core import usable_cores
from luminosity.inference.tuning.tune import flags, handler_code, sentences

if TYPE_CHECKING:
    from luminosity.inference.tuning.search import Trial
    from luminosity.inference.tuning.tune import Tuning

__all__ = ["as_data", "print_report"]

_CLASSES = {"embed": "SentenceEmbedder", "classify": "TextClassifier"}


def print_report(console: Console, tuning: Tuning, name: str, rows: int) -> None:
    """Print the report."""
    trials, best = sorted(tuning.search.trials, key=lambda trial: -trial.rate), tuning.search.best
    console.print(Text(f"{name} on {rows:,} rows, {usable_cores()} cores", style="bold"))
    console.print()
    if any(trial.measured for trial in trials):
        console.print(_table([trial for trial in trials if trial.measured], best))
    for trial in trials:
        if not trial.measured:
            console.print(Text(f"✗ {trial.candidate}: {trial.reason}", style="red"))
    console.print()
    for sentence in _notes(tuning):
        console.print(Text(sentence))
    if best is not None:
        console.print()
        console.print(Text(settings(name, tuning.handler_name, best), style="bold green"), soft_wrap=True)


def settings(name: str, handler_name: str, best: Trial) -> str:
    """Return the text to paste: the handler, and the pipeline's flags if they differ from the defaults."""
    kind, _, path = name.partition(":")
    own = _CLASSES.get(kind)
    first = repr(path) if own else "..."
    code = handler_code(own or handler_name, first, best.candidate)
    return "\n".join([code, *([" ".join(flags(best.candidate))] if flags(best.candidate) else [])])


def as_data(tuning: Tuning, name: str, rows: int) -> dict[str, Any]:
    """Return all numbers, for other programs."""
    best, survey = tuning.search.best, tuning.survey
    return {
        "handler": name,
        "rows": rows,
        "cores": usable_cores(),
        "prepared_rows_per_second": survey.prepared_per_second if survey is not None else None,
        "is_out_of_time": tuning.is_out_of_time,
        "best": asdict(best.candidate) if best is not None else None,
        "settings": settings(name, tuning.handler_name, best).splitlines() if best is not None else [],
        "trials": [_trial_data(trial) for trial in tuning.search.trials],
    }


def _trial_data(trial: Trial) -> dict[str, Any]:
    measured = None if trial.measured is None else {**asdict(trial.measured), "padding": trial.measured.padding}
    differs = asdict(trial.differs) if trial.differs is not None else None
    if differs is not None and math.isinf(differs["largest"]):
        differs["largest"] = None  # JSON has no infinity
    return {"candidate": asdict(trial.candidate), "measured": measured, "differs": differs, "reason": trial.reason}


def _table(trials: list[Trial], best: Trial | None) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    table.add_column("device", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    for head in ("workers", "threads", "rows/s", "padding", "budget", "batch", "memory", "differs"):
        table.add_column(head, no_wrap=True, justify="right")
    for trial in trials:
        table.add_row("▸" if trial is best else "", *_cells(trial), style="bold" if trial is best else "")
    return table


def _cells(trial: Trial) -> list[str]:
    candidate, measured = trial.candidate, trial.measured
    if measured is None:
        return []
    return [
        candidate.device or "-",
        candidate.dtype or "-",
        str(candidate.workers),
        str(candidate.threads or "-"),
        f"{measured.rows_per_second:,.0f}" if measured.rows_per_second >= 10 else f"{measured.rows_per_second:.2g}",
        f"{measured.padding:.0%}",
        f"{measured.budget:,.0f}",
        f"{measured.largest_batch:,}" if candidate.max_batch_size is None else f"≤{candidate.max_batch_size:,}",
        format_bytes(measured.memory_bytes),
        _differs(trial),
    ]


def _differs(trial: Trial) -> str:
    if trial.differs is None:
        return "-"
    changed = f" +{trial.differs.changed}" if trial.differs.changed else ""
    return f"{trial.differs.largest:.1g}{changed}"


def _notes(tuning: Tuning) -> list[str]:
    notes: list[str] = []
    search, best = tuning.search, tuning.search.best
    if best is None:
        return ["No candidate could be measured."]
    compared = [trial.differs for trial in search.trials if trial.differs is not None]
    if compared:
        more = "; +N: in N rows a label or text differs" if any(differs.changed for differs in compared) else ""
        notes.append(f"differs: the largest difference from the predictions of {tuning.reference}{more}")
    if any(trial.rate > best.rate for trial in search.trials):
        notes.append("A gain of less than 3% may be chance: the simpler settings are kept.")
    if tuning.survey is not None:
        notes += sentences(best, search.trials, tuning.survey)
    notes += tuning.not_varied
    if tuning.is_out_of_time:
        notes.append("The time was over before everything was tried: use a larger --seconds.")
    return notes
