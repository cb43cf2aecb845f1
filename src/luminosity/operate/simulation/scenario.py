"""What to change from the measured run: rows, models, workers, and what happens to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from luminosity._shared.text import did_you_mean, list_some
from luminosity.errors import OptionError
from luminosity.events import PoolInfo
from luminosity.operate.simulation.workload import AutoscaleRange

__all__ = ["PoolOrder", "Scenario", "pools_named"]

_MOST_NAMED = 6  # pools, in an error


@dataclass(frozen=True)
class PoolOrder:
    """What to give a pool. None means: as in the measured run."""

    name: str  # of the pool; "device" is every pool that has accelerators or runs models
    workers: int | None = None
    device: str = ""  # such as T4
    cores: float | None = None  # of one worker
    ram: float | None = None  # bytes
    speed: float | None = None  # of one worker, relative to the measured one
    startup_seconds: float | None = None


@dataclass(frozen=True)
class Scenario:
    """The run to simulate. None and empty fields mean: as in the measured run."""

    rows: float | None = None
    models: int | None = None
    pools: tuple[PoolOrder, ...] = ()
    cores: float | None = None  # that all workers share
    autoscale: tuple[tuple[str, AutoscaleRange], ...] = ()  # by the name of a pool; "" is what "device" is, or all
    preempted_per_hour: float = 0.0
    lost_at: tuple[float, ...] = ()
    measured_rows: float | None = None


def pools_named(name: str, pools: Sequence[PoolInfo], with_models: set[str]) -> list[str]:
    """Return the names of the pools that ``name`` stands for: its own, or for ``device`` those that run models.

    >>> pools_named("device", [PoolInfo("cpu", 1, 1), PoolInfo("gpu", 1, 8, ("gpu:0",))], set())
    ['gpu']
    """
    names = [pool.name for pool in pools]
    if name in names:
        return [name]
    if name == "device":
        found = [pool.name for pool in pools if pool.devices] or [each for each in names if each in with_models]
        if found:
            return found
    starting = [each for each in names if each.startswith(name)]
    if len(starting) == 1:
        return starting
    said = list_some([repr(each) for each in names], _MOST_NAMED)
    hint = did_you_mean(name, names)
    raise OptionError(
        f"no pool {name!r} in the measured run; found the pools {said}",
        fix=f"name one of them{f'; {hint}' if hint else ''}",
    )
