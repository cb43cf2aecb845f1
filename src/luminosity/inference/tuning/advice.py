"""Explains the results of ``lum bench`` in sentences and as code to paste."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from luminosity.core import usable_cores
from luminosity.inference.tuning.candidates import Candidate
from luminosity.inference.tuning.search import Trial
from luminosity.inference.tuning.trial_runner import Survey

__all__ = ["flags", "handler_code", "sentences"]

_SOME_PADDING, _MUCH_PADDING = 0.005, 0.15  # shares of the work that are worth a sentence, and an explanation
_IDLE = 0.8  # a device that computes less of the time waits for the CPU


def sentences(best: Trial, trials: list[Trial], survey: Survey) -> Iterator[str]:
    """Yield sentences about what limits the speed."""
    measured = best.measured
    if measured is None:
        return
    if measured.padding > _SOME_PADDING:
        why = ": lengths differ a lot within a batch" if measured.padding > _MUCH_PADDING else ""
        yield f"Padding is {measured.padding:.0%} of the work{why}."
    yield _preparing(best, survey)
    if measured.memory_of == "device" and measured.busy_share < _IDLE:
        yield f"The device computes {measured.busy_share:.0%} of the time: the CPU that feeds it is the limit."
    if measured.out_of_memory:
        yield f"Memory ran out {measured.out_of_memory} times: batches were halved until they fit."
    gain = _gain_by_dtype(best, trials)
    if gain is not None and best.differs is not None:
        yield (
            f"{best.candidate.dtype} is {gain:.1f}x as fast as float32, and predictions differ by at most "
            f"{best.differs.largest:.2g}{_changed(best)}."
        )


def _gain_by_dtype(best: Trial, trials: list[Trial]) -> float | None:
    """Compare two trials that differ only in the dtype."""
    rates = {trial.candidate: trial.rate for trial in trials if trial.rate}
    for candidate, rate in rates.items():
        other = replace(candidate, dtype=best.candidate.dtype)
        if candidate.dtype == "float32" and other != candidate and other in rates:
            return rates[other] / rate
    return None


def _preparing(best: Trial, survey: Survey) -> str:
    ratio = survey.prepared_per_second / best.rate
    rate = f"One core prepares {survey.prepared_per_second:,.0f} rows/s"
    if best.candidate.device in (None, "cpu"):
        cores = best.candidate.workers * (best.candidate.threads or 1)
        share = 1 / (1 + ratio * cores)
        if share < 0.01:
            return "Preparing takes less than 1% of the cores' time."
        return f"{rate}: preparing takes {share:.0%} of the cores' time, the model the rest."
    if ratio >= 1:
        return f"{rate}, {ratio:.1f}x what the model takes: one CPU worker feeds it."
    needed = math.ceil(1 / ratio)
    enough = "" if needed < usable_cores() else f"; this machine has {usable_cores()} cores, so preparing is the limit"
    return f"{rate}: it takes {needed} CPU workers to feed the model{enough}."


def _changed(best: Trial) -> str:
    differs = best.differs
    return f"; {differs.changed} of {differs.rows} have another label or text" if differs and differs.changed else ""


def handler_code(name: str, first_argument: str, best: Candidate) -> str:
    """Return the code that creates the handler in a pipeline.

    >>> handler_code("SentenceEmbedder", "'models/mini'", Candidate("cpu", "bfloat16", max_batch_size=32))
    "SentenceEmbedder('models/mini', device='cpu', dtype='bfloat16', max_batch_size=32)"
    """
    settings = {"device": best.device, "dtype": best.dtype, "max_batch_size": best.max_batch_size}
    given = [f"{key}={value!r}" for key, value in settings.items() if value is not None]
    return f"{name}({', '.join([first_argument, *given])})"


def flags(best: Candidate) -> list[str]:
    """Return the pipeline's flags, if they differ from its defaults: a worker with one thread for each core."""
    if best.threads is None or (best.threads == 1 and best.workers == usable_cores()):
        return []
    return [f"--cpu_workers={best.workers}", f"--model_threads={best.threads}"]
