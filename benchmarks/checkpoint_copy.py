"""Writes checkpoints with and without a copy, and fetches the copy: a million rows, of which 20,000 change each second.

CPU seconds are those of the process, so that other load counts little. The copy is a folder on the same disk: to the
cloud, what is sent is the same, and requests take longer.

    python benchmarks/checkpoint_copy.py
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import _measure

from luminosity.engine.data.world import THIS_MACHINE
from luminosity.engine.durable.copies.fetching import fetch, find
from luminosity.engine.durable.copies.lease import Lease, read_lease
from luminosity.engine.durable.copies.places import place_at
from luminosity.engine.durable.copies.shipper import Shipper
from luminosity.engine.durable.store import CheckpointFolder, Transaction

_ROWS = int(os.environ.get("COPY_ROWS", "1000000"))
_AT_ONCE = 50_000  # rows of a transaction while the folder is filled
_CHANGES, _CHANGED = 200, 1_000  # transactions, and rows of each
_EVERY_S = 0.05  # as often as a stream saves
_LONGEST_S = 600.0


class _Written(NamedTuple):
    cpu_s: float
    lags_s: list[float]


def _row(number: int, chance: random.Random) -> tuple[tuple[str, bytes], bytes]:
    return ("state/Count", b"the key of a cell of state %09d" % number), chance.randbytes(40)


def _write(folder: CheckpointFolder, chance: random.Random, shipper: Shipper | None) -> _Written:
    """Change rows as a stream does, and look at the lag meanwhile."""
    began, lags = time.process_time(), list[float]()
    due = time.monotonic()
    for number in range(_CHANGES):
        rows = dict(_row(chance.randrange(_ROWS), chance) for _ in range(_CHANGED))
        folder.write(Transaction(number, rows=dict(rows), meta={"saved_at": f"{time.time():.3f}"}))
        if not number % 20:
            folder.sync()
        if shipper is not None:
            lags.append(shipper.lag_s())
        due = max(due + _EVERY_S, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
    if shipper is not None:
        shipper.finish(_LONGEST_S)
    return _Written(time.process_time() - began, lags)


def main() -> int:
    with tempfile.TemporaryDirectory(dir=os.environ.get("CHECKPOINTS")) as name:
        chance = random.Random(1)
        folder = CheckpointFolder(f"{name}/checkpoint")
        for first in range(0, _ROWS, _AT_ONCE):
            numbers = range(first, min(_ROWS, first + _AT_ONCE))
            folder.write(Transaction(0, rows=dict(_row(number, chance) for number in numbers)))
            folder.sync()
        without = _write(folder, chance, None)
        place = place_at(f"{name}/copy")
        lease = Lease(place, "benchmark", _LONGEST_S, THIS_MACHINE)
        began, cpu = time.monotonic(), time.process_time()
        shipper = Shipper(place, lease, folder, "benchmark", THIS_MACHINE, lambda *_: None)
        shipper.finish(_LONGEST_S)
        size = sum(path.stat().st_size for path in Path(name, "copy").iterdir())
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        print(f"base: {size / 1e6:.0f} MB, {seconds:.1f} s, {cpu:.1f} s of CPU time")
        shipped = _write(folder, chance, shipper)
        shipper.close(_LONGEST_S)
        lease.close()
        folder.close()
        fresh = CheckpointFolder(f"{name}/fresh")
        found = find(place, read_lease(place))
        assert found is not None
        began, cpu = time.monotonic(), time.process_time()
        fetched = fetch(place, found, fresh)
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        print(f"restore: {fetched}, {seconds:.1f} s, {cpu:.1f} s of CPU time")
        fresh.close()
    _measure.print_figure("CPU time of writing, with the copy / without", shipped.cpu_s / without.cpu_s, at_most=1.2)
    _measure.print_figure("lag, at most, in seconds", max(shipped.lags_s), at_most=10.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
