"""Lets the disasters of a simulated run happen, each before the message that it names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from luminosity.engine.simulated.crew import SimulatedCrew
from luminosity.engine.simulated.disasters import Disaster
from luminosity.engine.simulated.simulation import Simulation
from luminosity.engine.simulated.worker import SimulatedWorker

__all__ = ["Chaos", "DriverKilled"]

_SLOWEST = 100.0  # times as long as usual, however often a worker gets slower: a run still ends
_DRIVER = {"kill driver", "lose power"}


class DriverKilled(BaseException):
    """Ends a run as a kill of its process would. ``power`` is what the power was lost with, too."""

    def __init__(self, *, is_power_lost: bool) -> None:
        super().__init__("the driver was killed")
        self.is_power_lost = is_power_lost


class Chaos:
    """The disasters that are left of a scenario, over all starts of its run."""

    def __init__(self, disasters: list[Disaster]) -> None:
        self._left = sorted(disasters, key=lambda each: each.message)
        self.happened: Counter[str] = Counter()
        self.messages = 0
        self.is_over = False  # for this start: the driver is dead
        self.raises = 0  # how often the next elements raise
        self.kills = 0  # how many of the next elements kill their worker
        self.disk_fails_until = self.disk_full_until = self.sync_s = 0.0

    def before_message(self, simulation: Simulation, crew: SimulatedCrew, stop: Callable[[], None]) -> None:
        """Let happen what is due. Raises :class:`DriverKilled`."""
        if self.is_over:
            return
        self.messages += 1
        while self._left and self._left[0].message <= self.messages:
            disaster = self._left.pop(0)
            simulation.trace.add(f"{disaster}")
            if self._happen(disaster, simulation, crew, stop):
                self.happened[disaster.kind] += 1
            if disaster.kind in _DRIVER:
                self.is_over = True
                raise DriverKilled(is_power_lost=disaster.kind == "lose power")

    def end(self) -> None:
        """Let no more happen: the run goes on to its end."""
        self._left.clear()

    def _happen(
        self, disaster: Disaster, simulation: Simulation, crew: SimulatedCrew, stop: Callable[[], None]
    ) -> bool:
        """Return whether there was something to which it could happen."""
        kind, amount = disaster.kind, disaster.amount
        if kind == "kill starting worker":
            crew.deadly_starts += 1
        elif kind == "jump clock":
            simulation.clock.jump(amount)
        elif kind == "raise":
            self.raises += max(1, int(amount))
        elif kind == "kill at element":
            self.kills += 1
        elif kind == "fail disk":
            self.disk_fails_until = simulation.now + amount
        elif kind == "fill disk":
            self.disk_full_until = simulation.now + amount
        elif kind == "slow disk":
            self.sync_s = amount
        elif kind == "stop driver":
            stop()
        elif kind not in _DRIVER:
            return self._meet_worker(disaster, simulation, crew)
        return True

    def _meet_worker(self, disaster: Disaster, simulation: Simulation, crew: SimulatedCrew) -> bool:
        is_busy = disaster.kind == "kill busy worker"
        workers = [w for w in crew.workers if w.is_connected and not w.is_dead and (w.bundles or not is_busy)]
        if not workers:
            return False
        worker: SimulatedWorker = workers[disaster.choice % len(workers)]
        if disaster.kind in ("kill worker", "kill busy worker"):
            worker.kill()
        elif disaster.kind == "freeze worker":
            worker.frozen_until = simulation.now + disaster.amount
        elif disaster.kind == "slow worker":
            worker.slowness = min(_SLOWEST, worker.slowness * max(1.0, disaster.amount))
        elif disaster.kind == "leave":
            worker.leaves = True
        else:
            raise ValueError(f"found {disaster.kind!r}, expected a kind that Disaster lists")
        return True
