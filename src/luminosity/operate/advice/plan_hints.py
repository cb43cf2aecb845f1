"""The steps of a plan that a resource hint would help, from the newest recorded run of the same pipeline."""

from __future__ import annotations

from pathlib import Path

from luminosity._shared.text import format_bytes, format_size, list_some
from luminosity.engine.reporting.run_names import RunName
from luminosity.operate.advice.measured import PoolUse, measure
from luminosity.operate.advice.rules import min_ram_for, step_names
from luminosity.operate.cost.prices import load_prices
from luminosity.runs import records
from luminosity.runs.records import Record

__all__ = ["hints_for_plan"]

_MOST_LOOKED_AT = 20  # records: a plan should come at once
_LARGE = 1 << 30  # bytes: a worker that needs less fits nearly everywhere
_WASTE = 2.0  # a step that asks for this many times what it needs keeps others away
_MOST_NAMED = 3  # steps, in one line


def hints_for_plan(called: RunName, folder: Path | None) -> list[str]:
    """Return a sentence for each pool of the newest run of a pipeline whose steps a hint would help.

    ``called`` is what the pipeline's runs are called. ``folder`` has the recorded runs; None if runs are not recorded.
    """
    record = _newest(called, folder)
    if record is None:
        return []
    use = measure([record], load_prices())
    names = step_names(use)
    told = [_sentence(pool, list_some(map(repr, names[pool.name]), _MOST_NAMED)) for pool in use.pools]
    return [f"{sentence} (run {record.started.run})" for sentence in told if sentence]


def _newest(called: RunName, folder: Path | None) -> Record | None:
    if folder is None:
        return None
    for run_id in records.run_ids(folder)[:_MOST_LOOKED_AT]:
        record = records.load(records.path_of(folder, run_id))
        if not isinstance(record, Record) or record.state != "done" or not called.is_of(record.started):
            continue
        if record.started.pools_mode != "uniform":  # there, all steps share the same workers
            return record
    return None


def _sentence(pool: PoolUse, steps: str) -> str:
    asked, peak = pool.info.asked.ram, pool.peak_ram
    if not peak or not steps:
        return ""
    wanted = min_ram_for(peak)
    hint = f'min_ram="{format_size(wanted)}"'
    if not asked and peak >= _LARGE:
        return f"{steps}: a worker used {format_bytes(peak)}, and no hint says so; write {hint}"
    if asked and peak > asked:
        return f"{steps}: a worker used {format_bytes(peak)}, more than {format_size(asked)}; write {hint}"
    if asked >= _WASTE * wanted:
        return f"{steps}: a worker used {format_bytes(peak)} of {format_size(asked)}; write {hint}"
    return ""
