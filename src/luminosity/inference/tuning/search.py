"""Which candidates are tried, and in which order: each step keeps the best of the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from luminosity.core import machine_ram_bytes, usable_cores
from luminosity.inference.tuning.candidates import Candidate
from luminosity.inference.tuning.compare import Difference
from luminosity.inference.tuning.measure import Measurement

__all__ = ["Search", "Space", "Trial"]

_GAIN = 1.03
"""How much faster is faster: below that it is chance, and the simpler settings stay."""
_LEAST_BATCH = 4


@dataclass(frozen=True)
class Trial:
    """What came of a candidate: numbers, or why there are none."""

    candidate: Candidate
    measured: Measurement | None
    reason: str = ""
    differs: Difference | None = None
    """From the predictions of the first trial that had any; None for that one itself."""

    @property
    def rate(self) -> float:
        return self.measured.rows_per_second if self.measured is not None else 0.0


@dataclass(frozen=True)
class Space:
    """What may be tried; the first of each is where the search begins. Empty: the handler has no such setting."""

    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    threads: tuple[int, ...] = ()
    """Empty: all cores for one worker, then more workers with fewer threads each, while that is faster."""
    batch_limits: bool = True
    cores: int = field(default_factory=usable_cores)
    ram_bytes: int = field(default_factory=machine_ram_bytes)


class Search:
    """Not all combinations: the device, then the dtype on it, then threads, then smaller batches.

    >>> def measure(candidate):
    ...     rate = {"float32": 1.0, "bfloat16": 2.0}[candidate.dtype] * candidate.workers**0.5
    ...     return Trial(candidate, Measurement(rate, 1, 1.0, 1, 1.0, 1.0, 1.0, 1, 1.0, 0, 0, "process"))
    >>> search = Search(Space(("cpu",), ("float32", "bfloat16"), cores=4))
    >>> for trial in search.run(measure):
    ...     print(trial.candidate, trial.rate)
    cpu, float32, 4 threads 1.0
    cpu, bfloat16, 4 threads 2.0
    cpu, bfloat16, 2 workers of 2 threads 2.8284271247461903
    cpu, bfloat16, 4 workers of 1 thread 4.0
    >>> print(search.best.candidate)
    cpu, bfloat16, 4 workers of 1 thread
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self.trials: list[Trial] = []
        self.planned = 0
        """About how many trials there will be, as far as is known."""
        self.best: Trial | None = None

    def run(self, measure: Callable[[Candidate], Trial | None]) -> Iterator[Trial]:
        """Trials as they are done; None from `measure` ends the search."""
        space = self._space
        self.planned = max(1, len(space.devices)) + max(0, len(space.dtypes) - 1) + 3
        for step in (self._devices, self._dtypes, self._threads, self._batch_limits):
            for candidate in step():
                if candidate in [trial.candidate for trial in self.trials]:
                    continue
                trial = self._impossible(candidate) or measure(candidate)
                if trial is None:
                    return
                self.trials.append(trial)
                if trial.rate > _GAIN * (self.best.rate if self.best is not None else 0.0):
                    self.best = trial
                self.planned = max(self.planned, len(self.trials))
                yield trial
            if self.best is None and step != self._devices:
                return  # Nothing to build on; a smaller dtype was the last hope.

    def _devices(self) -> Iterator[Candidate]:
        dtype = self._space.dtypes[0] if self._space.dtypes else None
        for device in self._space.devices or (None,):
            yield self._on_cores(Candidate(device, dtype))

    def _dtypes(self) -> Iterator[Candidate]:
        for dtype in self._space.dtypes:
            yield replace(self._so_far, dtype=dtype)

    def _threads(self) -> Iterator[Candidate]:
        begun = self._so_far
        if begun.threads is None:
            return
        if self._space.threads:
            for threads in self._space.threads:
                yield self._with_threads(begun, threads)
            return
        threads = begun.threads
        while threads > 1 and self._so_far.threads == threads:
            threads //= 2
            yield self._with_threads(begun, threads)

    def _batch_limits(self) -> Iterator[Candidate]:
        """Below what the host found to pay: caches may be happier with less."""
        best = self.best
        if not self._space.batch_limits or best is None or best.measured is None:
            return
        limit: int | None = None
        size = 1 << (best.measured.largest_batch.bit_length() - 1)
        while size > _LEAST_BATCH and self._so_far.max_batch_size == limit:
            size //= 2
            limit = size
            yield replace(self._so_far, max_batch_size=limit)

    @property
    def _so_far(self) -> Candidate:
        return self.trials[0].candidate if self.best is None else self.best.candidate

    def _on_cores(self, candidate: Candidate) -> Candidate:
        """With all cores at work, where they compute; beside another device, threads matter little."""
        if candidate.device not in (None, "cpu"):
            return candidate
        return self._with_threads(candidate, self._space.threads[0] if self._space.threads else self._space.cores)

    def _with_threads(self, candidate: Candidate, threads: int) -> Candidate:
        return replace(candidate, threads=threads, workers=max(1, self._space.cores // threads))

    def _impossible(self, candidate: Candidate) -> Trial | None:
        """As many copies of the model as there are workers may be too many."""
        if candidate.workers == 1 or self.best is None or self.best.measured is None:
            return None
        one = self.best.measured.memory_bytes / self.best.candidate.workers
        if candidate.workers * one <= self._space.ram_bytes / 2:
            return None
        return Trial(candidate, None, f"{candidate.workers} copies of the model would take more than half of the RAM")
