"""The rules of ``lum advise`` and of ``lum plan``: what to write instead, from what a pool used."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from luminosity._shared.text import format_bytes, format_size, list_some
from luminosity.engine.reporting.run_names import RunName
from luminosity.events import InferenceView
from luminosity.operate.advice.measured import PipelineUse, PoolUse, measure
from luminosity.operate.cost.prices import load_prices
from luminosity.runs import records
from luminosity.runs.records import Record
from luminosity.runs.views.words import percent

__all__ = ["Advice", "Gain", "PoolAdvice", "advise_pool", "hints_for_plan", "min_ram_for", "step_names"]
_RAM_MARGIN = 1.15  # the next run has other data
_RAM_UNIT = 256 << 20
_CPU_TOLERANCE = 0.05  # of a core: the kernel counts CPU time in steps of 10 ms
_BUSY_LIMIT = 0.8  # of an accelerator, by all that share it
_MEMORY_LIMIT = 0.9  # of its memory
_FIXED_PART = 0.05  # of the time of batches
_FULL_BATCHES = 0.8
_MANY_THROTTLED = 0.05  # of all requests to a server
_FEW_BATCHES = 10  # fewer are not full for lack of rows
Gain = Literal["needed", "saves", "no gain", ""]


@dataclass(frozen=True)
class Advice:
    """One piece of advice: what to write, and why."""

    kind: str  # min_ram, cpu_count, accelerator, batches, requests, workers, deadline, branches, sharing
    write: str  # code or an option; empty if there is nothing to write
    why: str
    # needed: without it, workers use more than they ask for; saves: money or time; no gain: neither, so it is not worth
    # following; empty if that is not known.
    gain: Gain = ""
    # Predicted, if it is followed beside all other advice that is needed or saves: the part of the bill that it saves,
    # below 0 if it costs more. None if it is not known.
    saving: float | None = None
    hints: dict[str, Any] = field(default_factory=dict[str, Any])  # that it changes, as in a file of hints


@dataclass(frozen=True)
class PoolAdvice:
    """The advice for one pool, and the hints that it comes to."""

    use: PoolUse
    steps: tuple[str, ...]  # that hints can name
    advice: tuple[Advice, ...]

    @property
    def hints(self) -> dict[str, Any]:
        """The hints that each of the steps should get, as in a file of hints: those that are needed or save."""
        return {
            name: value
            for each in self.advice
            if each.gain in ("needed", "saves")
            for name, value in each.hints.items()
        }


def advise_pool(use: PoolUse, steps: tuple[str, ...]) -> PoolAdvice:
    """Return what to write for the steps of a pool. Whether it saves something is still to be predicted."""
    rules = (_min_ram, _cpu_count, _accelerator, _fewer_devices)
    advice = [found for rule in rules if (found := rule(use, steps)) is not None]
    advice += [found for view in use.inference if (found := _throttled(view)) is not None]
    if told := [why for view in use.inference if view.runs_on != "server" and (why := _why_batches(view))]:
        advice.append(Advice("batches", "lum bench", f"{'. '.join(told)}. It finds the settings of a model"))
    return PoolAdvice(use, steps, tuple(advice))


def min_ram_for(peak: int) -> int:
    """Return the RAM to ask for: 15% more than the peak, in steps of 256 MiB.

    >>> min_ram_for(1 << 30) >> 20, min_ram_for(100) >> 20
    (1280, 256)
    """
    return math.ceil(peak * _RAM_MARGIN / _RAM_UNIT) * _RAM_UNIT


def step_names(pipeline: PipelineUse) -> dict[str, tuple[str, ...]]:
    """Return for each pool the shortest names that are its steps' alone, so that one hint serves a whole composite.

    A composite whose parts run in several pools is named part by part.
    """
    pools_of: dict[str, set[str]] = {}
    for pool in pipeline.pools:
        for step in (step for stage in pool.stages for step in stage.steps):
            for prefix in _prefixes(step):
                pools_of.setdefault(prefix, set()).add(pool.name)
    return {
        pool.name: tuple(
            dict.fromkeys(
                next((prefix for prefix in _prefixes(step) if len(pools_of[prefix]) == 1), step)
                for stage in pool.stages
                for step in stage.steps
            )
        )
        for pool in pipeline.pools
    }


def _prefixes(step: str) -> list[str]:
    parts = step.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _code(steps: tuple[str, ...], hint: str) -> str:
    """Return the code to write at a pool's steps."""
    top = [step for step in steps if "/" not in step]
    named = top or list(steps)
    at = f"{named[0]!r}" + (f" and {len(named) - 1} more" if len(named) > 1 else "")
    return f".with_resource_hints({hint})  # at {at}" if named else f".with_resource_hints({hint})"


def _min_ram(use: PoolUse, steps: tuple[str, ...]) -> Advice | None:
    if not use.peak_ram or not steps:
        return None
    wanted = min_ram_for(use.peak_ram)
    given, asked = use.info.ram_per_worker, use.info.asked.ram
    if use.peak_ram * _RAM_MARGIN <= asked <= wanted + _RAM_UNIT:
        return None  # a small difference is not worth a change
    peak = f"its largest worker used {format_bytes(use.peak_ram)}; 15% more, in steps of 256 MiB"
    gain: Gain = ""
    if not asked:
        if given and use.peak_ram > given:
            gain = "needed"
            why = f"no step asks for RAM, and each worker was given {format_size(given)}, but {peak}"
        else:
            had = f", so each worker counts with its share of the machine, {format_size(given)}" if given else ""
            why = f"no step asks for RAM{had}; {peak}"
    elif wanted < asked:
        why = f"its steps ask for {format_size(asked)}, but {peak}"
    elif use.peak_ram > asked:
        gain = "needed"
        why = f"its steps ask for {format_size(asked)} only, but {peak}: on a full machine it may be killed"
    else:
        gain = "needed"
        why = f"its steps ask for {format_size(asked)}, which leaves little room: {peak}"
    size = format_size(wanted)
    return Advice("min_ram", _code(steps, f'min_ram="{size}"'), why, gain, hints={"min_ram": size})


def _cpu_count(use: PoolUse, steps: tuple[str, ...]) -> Advice | None:
    if use.cpu_per_second is None or not steps:
        return None
    wanted = max(1, math.ceil(use.cpu_per_second - _CPU_TOLERANCE))
    asked = int(use.info.asked.cores)
    if wanted == (asked or 1):
        return None
    what = "on average" if use.cpu_is_mean else "in 95% of the time at most"
    why = f"a worker took {use.cpu_per_second:.2f} CPU seconds in a second, {what}" + (
        f"; its steps ask for {asked} cores" if asked else ""
    )
    return Advice("cpu_count", _code(steps, f'cpu_count="{wanted}"'), why, hints={"cpu_count": wanted})


def _accelerator(use: PoolUse, steps: tuple[str, ...]) -> Advice | None:
    if not use.info.devices or use.device_was_used is not False:
        return None
    why = "its driver saw no work on the accelerator in the whole run"
    hints = {"accelerator": "count:0"}
    return Advice("accelerator", _code(steps, 'accelerator="count:0"'), why, hints=hints)


def _fewer_devices(use: PoolUse, steps: tuple[str, ...]) -> Advice | None:
    """Let fewer accelerators do the work of several that are mostly idle."""
    busy = sum(use.device_busy)
    if use.device_was_used is False or len(use.device_busy) < 2 or use.info.workers < 2:
        return None
    enough = max(1, math.ceil(busy / _BUSY_LIMIT))
    fits = use.device_memory is None or use.device_memory <= _MEMORY_LIMIT
    if enough >= len(use.device_busy) or not fits:
        return None
    parts = " + ".join(percent(each) for each in use.device_busy)
    memory = "their memory is not known" if use.device_memory is None else f"memory {percent(use.device_memory)} full"
    why = f"its accelerators were {parts} busy ({memory}): together at most {percent(_BUSY_LIMIT)} of {enough}"
    return Advice("sharing", f"--accelerators={enough}", why)


def _throttled(view: InferenceView) -> Advice | None:
    """Say that a model's server is the limit, if it refuses many requests."""
    if not view.requests or view.throttled / view.requests < _MANY_THROTTLED:
        return None
    share = percent(view.throttled / view.requests)
    why = f"model {view.step}: its server answered {share} of {view.requests:,} requests with a demand to send less"
    return Advice("requests", "", f"{why}. More workers do not help; a higher limit of the server does")


def _why_batches(view: InferenceView) -> str:
    """Say why a model's batches are worth a look; empty if they are not."""
    reasons: list[str] = []
    fixed = view.fixed_seconds * view.batches
    grows = view.seconds_per_cost * view.padded_cost
    if fixed + grows > 0 and fixed / (fixed + grows) > _FIXED_PART:
        reasons.append(f"{percent(fixed / (fixed + grows))} of the time of its batches does not depend on their size")
    if view.out_of_memory:
        reasons.append(f"batches did not fit into memory {view.out_of_memory} time(s)")
    is_full = not view.budget_cost or view.padded_cost / view.budget_cost >= _FULL_BATCHES
    if not is_full and view.batches >= _FEW_BATCHES:
        reasons.append(f"its batches were {percent(view.padded_cost / view.budget_cost)} full")
    return f"model {view.step}: {'; '.join(reasons)}" if reasons else ""


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
