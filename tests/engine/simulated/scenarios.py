"""Scenarios: a pipeline, its data, a world and its disasters, all drawn from a seed, run and checked."""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from luminosity.engine.data import grouping
from luminosity.engine.folders import SHARED_MEMORY
from luminosity.engine.loop import stage
from luminosity.engine.simulated.disasters import Disaster, Weather
from luminosity.engine.simulated.invariants import Broken
from luminosity.engine.simulated.simulated_run import Outcome, SimulatedRun
from luminosity.engine.workers.sdk import channel, partitions
from tests.engine.simulated.results import told
from tests.engine.simulated.shapes import Data, Shape, random_data, random_shape
from tests.engine.simulated.steps import WORLD

_SEEDS_OF_SHAPE = 40  # that one pipeline gets: to plan it takes as long as to run it some times
_DISASTERS = {  # kind → the least and the most amount
    "kill worker": (0, 0),
    "kill busy worker": (0, 0),
    "kill starting worker": (0, 0),
    "freeze worker": (0.05, 2),
    "slow worker": (2, 10),
    "jump clock": (-3000, 3000),
    "raise": (1, 2),
    "kill at element": (0, 0),
    "leave": (0, 0),
}
_DURABLE = {
    "kill driver": (0, 0),
    "lose power": (0, 0),
    "stop driver": (0, 0),
    "fail disk": (0.1, 1),
    "slow disk": (0.001, 0.05),
}


@dataclass(frozen=True)
class Scenario:
    """A run to try."""

    seed: int  # of chance within the run
    shape: Shape
    data: Data
    workers: int = 2
    weather: Weather = field(default_factory=Weather)
    memory_budget: int = 1 << 30
    interval_s: float = 0.2  # between checkpoints
    inline_bytes: int = 32 << 10  # blocks of more, and large groups of more, are files
    small_bytes: int = 16 << 20  # groupings of more are split among workers
    joined_bytes: int = 4 << 20  # partitions of less share a bundle

    def run(self) -> Outcome:
        """Run it in simulated time. Raises if anything is wrong, with the last messages as a note."""
        folder = Path(tempfile.mkdtemp(prefix="simulated-", dir=tempfile.tempdir or SHARED_MEMORY))
        plan = self.shape.plan()
        config = replace(
            plan.prepared.config,
            memory_budget=self.memory_budget,
            checkpoint_dir=str(folder) if self.shape.is_durable else None,
            checkpoint_interval=self.interval_s,
        )
        run = SimulatedRun(plan, self.seed, self.workers, self.weather, config)
        WORLD.data, WORLD.chaos, WORLD.simulation = list(self.data), run.chaos, run.simulation
        WORLD.told, WORLD.finalized = 0, []
        try:
            with (
                _quiet(),
                mock.patch.object(channel, "_INLINE_BYTES", self.inline_bytes),
                mock.patch.object(partitions, "_INLINE_BYTES", self.inline_bytes),
                mock.patch.object(grouping, "_SMALL_BYTES", self.small_bytes),
                mock.patch.object(stage, "_JOINED_BYTES", self.joined_bytes),
            ):
                outcome = run.run(folder)
        except BaseException as error:
            add_note: Any = getattr(error, "add_note", None)  # from Python 3.11 on
            if add_note is not None:
                add_note("\n".join(run.simulation.trace.last))
            raise
        finally:
            WORLD.chaos = WORLD.simulation = None
            shutil.rmtree(folder, ignore_errors=True)
        self._compare(outcome)
        return outcome

    def _compare(self, outcome: Outcome) -> None:
        found = told(info for infos in outcome.metrics.by_stage().values() for info in infos)
        expected = self.shape.expected(self.data)
        if found.results != expected:
            raise Broken(f"lacks {dict(expected - found.results)}, has too much: {dict(found.results - expected)}")
        if found.count != found.results.total():
            raise Broken(f"{found.count} results were counted, and {found.results.total()} told")
        final = Counter(WORLD.finalized)
        if lost := final.keys() - found.to_finalize:
            raise Broken(f"bundles {sorted(lost)} became final, and do not count")
        if final and max(final.values()) > 1:
            raise Broken(f"bundles became final more than once: {final}")
        if not outcome.disasters and final.keys() != found.to_finalize:
            raise Broken(f"bundles {sorted(found.to_finalize - final.keys())} never became final")


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    loggers = [logging.getLogger(name) for name in ("luminosity", "apache_beam.runners.common")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def scenario(seed: int) -> Scenario:
    """Return the scenario of a seed. Neighbours share a pipeline."""
    shape = random_shape(random.Random(f"shape {seed // _SEEDS_OF_SHAPE}"))
    chance = random.Random(f"scenario {seed}")
    data = shape.events or random_data(chance, is_stream=shape.is_stream)
    kinds = {**_DISASTERS, **(_DURABLE if shape.is_durable else {})}
    chosen = sorted(kind for kind in kinds if chance.random() < 0.4)
    span = chance.choice((30, 100, 300))
    disasters: list[Disaster] = []
    for _ in range(chance.randint(0, 10) if chosen else 0):
        kind = chance.choice(chosen)
        disasters.append(
            Disaster(kind, chance.randint(1, span), round(chance.uniform(*kinds[kind]), 3), chance.randrange(4))
        )
    raising = [d for d in disasters if d.kind == "raise"]
    for d in raising[1:]:  # an element that raises four times rightly ends the run
        disasters.remove(d)
    killing = [d for d in disasters if d.kind in ("kill worker", "kill busy worker", "kill at element")]
    for d in killing[3:]:
        disasters.remove(d)
    deadly = [d for d in disasters if d.kind == "kill starting worker"]
    for d in deadly[2:]:  # three starts in a row that fail end a run
        disasters.remove(d)
    weather = Weather(
        delay_s=chance.choice((0.0, 0.002, 0.01)),
        far_delay_s=chance.choice((0.02, 0.5)),
        far_part=chance.choice((0.0, 0.0, 0.1)),
        element_s=chance.choice((0.0, 0.001, 0.005)),
        slow_part=chance.choice((0.0, 0.0, 0.05)),
        slow_s=chance.choice((0.05, 0.5)),
        start_s=chance.choice((0.02, 0.2)),
        loop_s=chance.choice((1e-6, 1e-6, 1e-4)),
        stall_part=chance.choice((0.0, 0.0, 0.05)),
        block=chance.choice((2, 4, 50)),
        may_reorder=chance.random() < 0.5,
        disasters=tuple(sorted(disasters, key=lambda d: d.message)),
    )
    return Scenario(
        seed,
        shape,
        data,
        workers=chance.randint(1, 4),
        weather=weather,
        memory_budget=chance.choice((1 << 30, 1 << 30, 100_000, 100_000 if shape.is_stream else 1)),
        interval_s=chance.choice((0.05, 0.2, 1.0)),
        inline_bytes=chance.choice((32 << 10, 32 << 10, 40)),
        small_bytes=chance.choice((16 << 20, 0, 0, 2000)),
        joined_bytes=chance.choice((4 << 20, 0, 60)),
    )
