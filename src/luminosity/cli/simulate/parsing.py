"""The values of the options of ``lum simulate``: counts such as 100M, pools, and ranges of workers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from luminosity._shared.text import did_you_mean, parse_size
from luminosity.cli.common.options import number
from luminosity.operate.simulation.workload import AutoscaleRange, PoolOrder

__all__ = ["amount", "at_least_zero", "autoscale", "pool", "rows"]

_AMOUNT = re.compile(r"(\d[\d_,]*\.?\d*|\.\d+)([kMG]?)")
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_MOST_WORKERS = 10_000  # of a pool: more take minutes to simulate
_MOST = 1e15  # of any number: more is a slip of the hand
_SETTINGS = ("cores", "ram", "speed", "startup")
_POOL_FORM = "NAME=WORKERS[:DEVICE][,cores=N][,ram=SIZE][,speed=X][,startup=SECONDS], such as device=500:T4,cores=4"


def amount(text: str) -> float:
    """Return a number such as 14, 1.5k, 100M or 2G.

    >>> amount("14"), amount("1.5k"), amount("100M")
    (14.0, 1500.0, 100000000.0)
    """
    match = _AMOUNT.fullmatch(text.strip())
    if match is None or not (found := float(re.sub("[_,]", "", match[1])) * _UNITS[match[2]]):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0, such as 14, 1.5k or 100M")
    if found > _MOST:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number up to {_MOST / 1e9:,.0f}G")
    return found


def rows(text: str) -> float:
    """Return a number of rows, at least one."""
    found = amount(text)
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected at least 1 row")
    return found


def at_least_zero(text: str) -> float:
    """Return a number from 0."""
    found = number(text)
    if not 0 <= found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 0")
    return found


def pool(text: str) -> PoolOrder:
    """Return what to give a pool.

    >>> pool("device=500:T4,cores=4,ram=15GB,speed=0.07")
    PoolOrder(name='device', workers=500, device='T4', cores=4.0, ram=15000000000, speed=0.07, startup_seconds=None)
    """
    first, *settings = text.split(",")
    name, equals, value = first.rpartition("=")  # names of pools may hold one, such as cpu ram=1GiB
    workers, _, device = value.partition(":")
    if not name or not equals or not workers.strip():
        raise argparse.ArgumentTypeError(f"{text!r}: expected {_POOL_FORM}")
    given: dict[str, float | int] = {}
    for setting in settings:
        key, _, given_value = (part.strip() for part in setting.partition("="))
        if key not in _SETTINGS:
            known = ", ".join(_SETTINGS)
            hint = did_you_mean(key, _SETTINGS)
            raise argparse.ArgumentTypeError(
                f"{text!r}: found the setting {key!r}, expected one of {known}. {hint}".strip()
            )
        given[key] = _READERS.get(key, amount)(given_value)
    count = amount(workers)
    if count != int(count) or count > _MOST_WORKERS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: found {workers} workers, expected a whole number up to {_MOST_WORKERS:,}"
        )
    return PoolOrder(
        name.strip(),
        int(count),
        device.strip(),
        given.get("cores"),
        given.get("ram"),
        given.get("speed"),
        given.get("startup"),
    )


def autoscale(text: str) -> tuple[str, AutoscaleRange]:
    """Return the name of a pool, or an empty one, and its range of workers.

    >>> autoscale("1:500"), autoscale("device=2:40")[0]
    (('', AutoscaleRange(least=1, most=500)), 'device')
    """
    name, _, numbers = text.rpartition("=")
    least, colon, most = numbers.partition(":")
    if not colon or not least.isdecimal() or not most.isdecimal() or not 0 < int(least) <= int(most):
        raise argparse.ArgumentTypeError(f"{text!r}: expected [POOL=]MIN:MAX, such as 1:500 or device=1:500")
    if int(most) > _MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"{text!r}: found {most} workers, expected at most {_MOST_WORKERS:,}")
    return name, AutoscaleRange(int(least), int(most))


def _size(text: str) -> int:
    found = parse_size(text)
    if not found:
        raise argparse.ArgumentTypeError(f"ram={text}: expected a size such as 15GB or 8GiB")
    return found


_READERS: dict[str, Callable[[str], float | int]] = {"ram": _size, "startup": at_least_zero}
"""What reads the value of a setting that is no amount."""
