"""Restoring state and timers: each at its shard, as if they had been written there, and within the memory budget."""

from __future__ import annotations

import marshal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.data import wire
from luminosity.engine.data.event_time import MAX
from luminosity.engine.data.saved_rows import BlockReference
from luminosity.engine.data.shard import Shard
from luminosity.engine.data.state import StateStore
from luminosity.engine.data.timers import FamilyKey, TimerStore
from luminosity.engine.data.wire import StateKeys
from luminosity.engine.durable.restoring import remove_other_files, restore_cells, restore_timers
from luminosity.engine.durable.store import CheckpointFolder
from luminosity.engine.plan.codecs import TimerRecord
from luminosity.engine.spill.diskmap import Cell, Cells
from luminosity.engine.spill.quota import Ledger

_FAMILY: FamilyKey = ("step", "family")


class _Rows:
    """Rows in memory, in place of a checkpoint."""

    def __init__(self, rows: dict[bytes, bytes]) -> None:
        self._rows = rows

    def rows(self, owner: str) -> Iterator[tuple[bytes, bytes]]:
        return iter(sorted(self._rows.items()))

    def block(self, reference: BlockReference) -> Any:
        raise AssertionError("found a reference to a block, expected none")


_NAMES: Any = SimpleNamespace(of_step=lambda step: step)


def _stage(shards: int) -> Any:
    plan = SimpleNamespace(
        steps=["step"], timers=[SimpleNamespace(transform_id="step", family_id="family", key=_FAMILY)]
    )
    return SimpleNamespace(plan=plan, expiry=None, shards=[Shard([], True, index) for index in range(shards)])


def _cell_key(key: bytes, step: str = "step", name: str = "count", window: bytes = b"", kind: str = "bag") -> bytes:
    state_key = beam_fn_api_pb2.StateKey()
    user_state = getattr(state_key, f"{kind}_user_state")
    user_state.transform_id, user_state.user_state_id, user_state.window, user_state.key = step, name, window, key
    return state_key.SerializeToString()


def test_state_keys_are_read_whatever_they_begin_with() -> None:
    expected = [
        (step, window, key, _cell_key(key, step, "x", window, kind))
        for kind in ("bag", "ordered_list")
        for step in ("a", "b", "a longer name" * 20)
        for window in (b"", b"w1", b'"\x01k')  # the last one looks like the field of a key
        for key in (b"", b"k", b"l", b"kk", b'"\x01k', b"x" * 127, b"x" * 128, b"y" * 128, b"z" * 20_000, b"k")
    ]
    for cells in (expected, expected[::-1], expected[::7] + expected[::3]):
        reader = StateKeys()
        for step, window, key, cell_key in cells:
            assert (reader.read(cell_key), reader.step, reader.window) == (key, step, window)


def test_restored_cells_are_counted_like_those_that_bundles_wrote(tmp_path: Path) -> None:
    cells: dict[bytes, Cell] = {
        b"one": [b"abc"],
        b"several": [b"", b"abc", b"x" * 1000],
        b"ordered": [(1, b"abc"), (2, b"de")],
        b"ordered, one": [(1, b"abc")],
    }
    put, filled = (Cells(str(tmp_path), Ledger(None, 1 << 20, 0)) for _ in range(2))
    put.put(cells, "shard")
    filled.fill(dict(cells), "shard")
    assert filled.memory_bytes == put.memory_bytes
    assert filled.group("shard", 1 << 20) == put.group("shard", 1 << 20) == (cells, True)
    filled.put({key: [] for key in cells}, "shard")
    assert filled.memory_bytes == 0


def test_more_state_than_memory_has_room_for_goes_to_disk_while_it_is_restored(tmp_path: Path) -> None:
    budget = 10 << 20
    keys = [b"key %d" % number for number in range(25_000)]
    rows = {_cell_key(key): marshal.dumps([key * 2]) for key in keys}
    ledger = Ledger(None, budget, 0)
    state = StateStore(str(tmp_path), ledger)

    def check_memory() -> None:
        if ledger.used > budget // 2:
            state.spill(ledger.used)

    stage = _stage(4)
    restore_cells(stage, _NAMES, _Rows(rows), state, check_memory)
    assert ledger.peak < budget
    assert ledger.spilled > budget // 2
    found = dict(state.cells_of(["step"], set(keys)))
    assert found == {_cell_key(key): key * 2 for key in keys}
    state.release()


def test_files_of_earlier_starts_are_removed_unless_the_checkpoint_needs_them(tmp_path: Path) -> None:
    folder = CheckpointFolder(str(tmp_path))
    kept, unused, spilled, lonely = (
        Path(folder.blocks, name) for name in ("1/kept", "1/unused", "3/spilled", "2/lonely")
    )
    for path in (kept, unused, spilled, lonely):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    remove_other_files(folder, {str(kept)}, str(spilled.parent))
    assert sorted(Path(folder.blocks).glob("*/*")) == [kept, spilled]
    assert not lonely.parent.exists()
    folder.close()


def test_restored_timers_are_those_that_were_set() -> None:
    records = [
        TimerRecord(b"identity %d" % n, b"key %d" % n, False, 1000 - n % 7, MAX if n % 5 else n % 3, b"", n % 4)
        for n in range(100)
    ]
    rows = {record.identity: marshal.dumps(tuple(record)) for record in records}
    stage, expected = _stage(4), [TimerStore() for _ in range(4)]
    restore_timers(stage, _NAMES, _Rows(rows))
    for record in records:
        expected[wire.shard_index(record.key, 4)].apply(_FAMILY, [record])
    for shard, store in zip(stage.shards, expected, strict=True):
        timers: TimerStore = shard.timers
        assert (len(timers), timers.entries) == (len(store), store.entries)
        while store:
            assert timers.holds.minimum == store.holds.minimum
            now = {_FAMILY: store.next_fire(_FAMILY) or 0}
            assert timers.next_fire(_FAMILY) == now[_FAMILY]
            due, expected_due = (sorted(each.take_due(now, 3)[_FAMILY]) for each in (timers, store))
            assert [record.fire_micros for record in due] == [record.fire_micros for record in expected_due]
        assert len(timers) == 0
        assert timers.holds.minimum == MAX
