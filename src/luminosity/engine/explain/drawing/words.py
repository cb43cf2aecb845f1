"""Phrases about machines and pools that texts and pictures share."""

from __future__ import annotations

from collections.abc import Iterable

from luminosity._text import format_size
from luminosity.engine.resources.machine import Machine
from luminosity.engine.resources.pools import Pool

__all__ = ["counted", "devices_in_words", "machine_in_words", "pool_in_words", "ranges", "share_in_words"]


def counted(number: float, noun: str) -> str:
    """Return a number with its noun in the singular or plural.

    >>> counted(1, "core"), counted(0.5, "core"), counted(3, "stage")
    ('1 core', '0.5 cores', '3 stages')
    """
    return f"{number:.3g} {noun}" if number == 1 else f"{number:.3g} {noun}s"


def ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as a list with ranges.

    >>> ranges([1, 2, 4, 5, 6, 9])
    '1, 2, 4-6, 9'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def machine_in_words(machine: Machine) -> str:
    """Return the cores, RAM and accelerators of ``machine``."""
    accelerators = counted(len(machine.devices), "accelerator") if machine.devices else "no accelerators"
    return f"{counted(machine.cores, 'core')}, {format_size(machine.ram_bytes)} RAM, {accelerators}"


def share_in_words(pool: Pool) -> str:
    """Return the cores and RAM of each worker of ``pool``."""
    return f"{counted(pool.cores_per_worker, 'core')}, {format_size(pool.ram_per_worker)} RAM"


def devices_in_words(pool: Pool) -> str:
    """Return the devices of ``pool``, worker by worker."""
    return ", ".join("+".join(group) for group in pool.device_groups)


def pool_in_words(pool: Pool) -> str:
    """Return the name of ``pool``, its number of workers and their shares."""
    devices = f" with {devices_in_words(pool)}" if pool.device_groups else ""
    each = "each " if pool.workers > 1 else ""
    return f"{pool.name}: {counted(pool.workers, 'worker')}, {each}{share_in_words(pool)}{devices}"
