"""Tests of what a copy has: everything that was written to the folder, whatever failed on the way."""

from __future__ import annotations

import marshal
import os
import random
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from luminosity.engine.data.world import THIS_MACHINE
from luminosity.engine.durable.copies import shipper
from luminosity.engine.durable.copies.fetching import fetch, find
from luminosity.engine.durable.copies.lease import Lease, read_lease
from luminosity.engine.durable.copies.places import Place, place_at
from luminosity.engine.durable.copies.shipper import Shipper
from luminosity.engine.durable.store import CheckpointFolder, StoredContent, Transaction
from luminosity.errors import CheckpointError, CopyError
from tests.engine.durable.test_ends import wait_until

_LONGEST_S = 60.0


class Shaky:
    """A place that fails when the test says so."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.address = place.address
        self.fails: Callable[[str], bool] = lambda _: False

    def read(self, name: str) -> Iterator[bytes] | None:
        return self._place.read(name)

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        if self.fails(name):
            raise CopyError("the line is cut")
        self._place.write(name, pieces)

    def remove(self, names: Collection[str]) -> None:
        self._place.remove(names)

    def names(self) -> set[str]:
        return self._place.names()


class Copied:
    """A checkpoint folder with a copy, and random changes of it."""

    def __init__(self, folder: Path, place: Place | None = None, seed: int = 1) -> None:
        self.path = folder / "checkpoint"
        self.folder = CheckpointFolder(str(self.path))
        self.place = Shaky(place or place_at(str(folder / "copy")))
        self.lease = Lease(self.place, "f00", 60.0, THIS_MACHINE)
        self.shipped: list[str] = []
        self.shipper: Shipper | None = None
        self._chance = random.Random(seed)
        self._number = 0
        self._contents: list[StoredContent] = []
        self._next_id = 1

    def ship(self) -> Shipper:
        """Begin to ship, as a start does."""
        if self.shipper is not None:
            self.shipper.close(_LONGEST_S)
        self.shipper = Shipper(self.place, self.lease, self.folder, "f00", THIS_MACHINE, self._note)
        return self.shipper

    def write(self, count: int = 1) -> None:
        """Write some transactions with rows, contents, files and all that may go again."""
        for _ in range(count):
            self._number += 1
            changes, chance, gone = Transaction(self._number), self._chance, list[str]()
            for _ in range(chance.randrange(1, 6)):
                row = f"owner{chance.randrange(3)}", bytes([chance.randrange(20)])
                changes.rows[row] = chance.choice([None, chance.randbytes(chance.randrange(200))])
            if not chance.randrange(8):
                owner = f"owner{chance.randrange(3)}"
                changes.cleared.add(owner)
                changes.rows = {row: value for row, value in changes.rows.items() if row[0] != owner}
            if chance.randrange(2):
                path = f"blocks/1/blocks.{self._next_id}.packed" if chance.randrange(2) else None
                data = chance.randbytes(50)
                if path is not None:
                    (self.path / path).parent.mkdir(parents=True, exist_ok=True)
                    (self.path / path).write_bytes(data)
                    changes.files.append(str(self.path / path))
                content = StoredContent(self._next_id, None if path else data, path, 0, 50, is_packed=bool(path))
                self._next_id += 1
                self._contents.append(content)
                changes.contents.append(content)
            while len(self._contents) > chance.randrange(1, 6):
                content = self._contents.pop(0)
                if content in changes.contents:
                    changes.contents.remove(content)
                else:
                    changes.dropped.append(content.id)
                gone += [content.path] if content.path is not None else []
            changes.meta["saved_at"] = f"{self._number}.000"
            self.folder.write(changes)
            for each in gone:
                os.unlink(self.path / each)

    def _note(self, saved_at: str, error: str) -> None:
        self.shipped += [saved_at] if saved_at else []

    def close(self) -> None:
        if self.shipper is not None:
            self.shipper.close(_LONGEST_S)
        self.lease.close()
        self.folder.close()


def everything(folder: CheckpointFolder) -> Any:
    """Return all that a checkpoint folder has."""
    files = {
        c.path: Path(folder.path, c.path).read_bytes() for c in sorted(folder.contents(), key=lambda c: c.id) if c.path
    }
    meta = {key: value for key, value in folder.meta().items() if key != "number"}
    rows = {owner: list(folder.rows(owner)) for owner in sorted(folder.owners())}
    return rows, sorted(folder.contents(), key=lambda c: c.id), files, meta


def restored(place: Place, folder: Path) -> Any:
    """Fetch a copy, and return all that it has."""
    found = find(place, read_lease(place))
    assert found is not None
    target = CheckpointFolder(str(folder))
    try:
        fetch(place, found, target)
        return everything(target)
    finally:
        target.close()
        shutil.rmtree(folder)


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Copied]:
    monkeypatch.setattr(shipper, "_SHIP_S", 0.001)
    copied = Copied(tmp_path)
    yield copied
    copied.close()


def test_a_copy_has_what_was_there_before_and_what_was_written_since(copied: Copied, tmp_path: Path) -> None:
    copied.write(30)
    ship = copied.ship()
    for _ in range(20):
        copied.write(5)
        assert ship.finish(_LONGEST_S)
        assert restored(copied.place, tmp_path / "fresh") == everything(copied.folder)
    assert ship.lag_s() == 0
    assert copied.shipped[-1] == "130.000"


def test_a_copy_of_changes_that_come_while_it_is_written(copied: Copied, tmp_path: Path) -> None:
    ship = copied.ship()
    for _ in range(30):
        copied.write(20)  # without a pause: files go while they are on their way
    assert ship.finish(_LONGEST_S)
    assert restored(copied.place, tmp_path / "fresh") == everything(copied.folder)


def test_new_bases_keep_the_copy_small(copied: Copied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipper, "_MOST_SEGMENTS", 3)
    ship = copied.ship()
    for _ in range(40):
        copied.write(2)
        assert ship.finish(_LONGEST_S)
        assert restored(copied.place, tmp_path / "fresh") == everything(copied.folder)
    names = copied.place.names()
    assert len([name for name in names if name.startswith("manifest-")]) == 1
    assert len([name for name in names if name.startswith("segment-")]) <= 4
    assert len([name for name in names if name.startswith("base-")]) == 2
    assert len([name for name in names if name.startswith("file-")]) <= 20


def test_an_outage_is_made_up_for(copied: Copied, tmp_path: Path) -> None:
    ship = copied.ship()
    copied.write(5)
    assert ship.finish(_LONGEST_S)
    before = everything(copied.folder)
    copied.place.fails = lambda name: name.startswith(("segment-", "file-", "base-", "manifest-"))
    copied.write(50)
    wait_until(lambda: "the line is cut" in ship.error)
    assert ship.lag_s() > 0
    assert restored(copied.place, tmp_path / "fresh")[0] == before[0]
    copied.place.fails = lambda _: False
    assert ship.finish(_LONGEST_S)
    assert not ship.error
    assert restored(copied.place, tmp_path / "fresh") == everything(copied.folder)


def test_a_long_outage_ends_with_a_new_base(copied: Copied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipper, "_PENDING_BYTES", 1_000)
    ship = copied.ship()
    copied.write(5)
    assert ship.finish(_LONGEST_S)
    copied.place.fails = lambda name: name.startswith("segment-")
    copied.write(200)
    copied.place.fails = lambda _: False
    assert ship.finish(_LONGEST_S)
    assert not [name for name in copied.place.names() if name.startswith("base-") and "-0001-" in name]
    assert restored(copied.place, tmp_path / "fresh") == everything(copied.folder)


def test_failures_at_any_moment(copied: Copied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipper, "_MOST_SEGMENTS", 5)
    monkeypatch.setattr(shipper, "_LONGEST_PAUSE_S", 0.001)
    chance = random.Random(3)
    copied.place.fails = lambda name: name != "lease.json" and not chance.randrange(4)
    ship = copied.ship()
    for _ in range(25):
        copied.write(chance.randrange(1, 10))
        assert ship.finish(_LONGEST_S)
        assert restored(copied.place, tmp_path / "fresh") == everything(copied.folder)


def test_large_groups_have_files(copied: Copied, tmp_path: Path) -> None:
    path = copied.path / "blocks" / "1" / "spill.1"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"values")
    row = marshal.dumps(("blocks/1/spill.1", [(0, 6, 6)]))
    copied.folder.write(Transaction(1, rows={("groups", b"token"): row}, files=[str(path)]))
    ship = copied.ship()
    assert ship.finish(_LONGEST_S)
    found = find(copied.place, read_lease(copied.place))
    assert found is not None
    fresh = CheckpointFolder(str(tmp_path / "fresh"))
    fetch(copied.place, found, fresh)
    fresh.close()
    assert (tmp_path / "fresh" / "blocks" / "1" / "spill.1").read_bytes() == b"values"


@pytest.mark.parametrize("kind", ["manifest", "base", "segment", "file"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "exchange"])
def test_a_damaged_copy_is_refused(copied: Copied, tmp_path: Path, kind: str, damage: str) -> None:
    copied.write(20)
    ship = copied.ship()
    for _ in range(5):
        copied.write(4)
        assert ship.finish(_LONGEST_S)
    copied.lease.close()
    good = restored(copied.place, tmp_path / "fresh")
    assert good[2], "expected files in this test"
    folder = tmp_path / "copy"
    live = {name for name in os.listdir(folder) if name.startswith(f"{kind}-")}
    if kind == "file":
        live = {f"file-{copied.lease.writer}-0000-{Path(path).parent.name}.{Path(path).name}" for path in good[2]}
    path = folder / max(live)
    data = path.read_bytes()
    if damage == "flip":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "exchange":
        other = next(each for each in sorted(folder.iterdir()) if each != path and each.name != "lease.json")
        path.write_bytes(other.read_bytes())
    else:
        path.unlink()
    what = "the manifest" if (kind, damage) == ("manifest", "remove") else path.name
    with pytest.raises(CheckpointError, match=f"the copy in {folder} is damaged: {what}"):
        restored(copied.place, tmp_path / "fresh2")


def test_a_copy_that_has_lost_its_end_is_refused_by_all_who_take_it(copied: Copied, tmp_path: Path) -> None:
    ship = copied.ship()
    copied.write(20)
    assert ship.finish(_LONGEST_S)
    copied.lease.close()
    (tmp_path / "copy" / max(name for name in copied.place.names() if name.startswith("segment-"))).unlink()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"is damaged: segment-.* is missing"):
            find(copied.place, read_lease(copied.place))
        Lease(copied.place, "f01", 60.0, THIS_MACHINE).close()


def test_a_start_that_is_killed_right_after_its_first_base(copied: Copied, tmp_path: Path) -> None:
    copied.write(20)
    assert copied.ship().finish(_LONGEST_S)
    copied.lease.close()
    before = read_lease(copied.place)
    copied.lease = Lease(copied.place, "f00", 60.0, THIS_MACHINE)
    copied.write(5)
    assert copied.ship().finish(_LONGEST_S)
    after = read_lease(copied.place)
    assert before is not None
    assert after is not None
    assert after.last == before.last, "expected no renewal yet"
    assert restored(copied.place, tmp_path / "fresh") == everything(copied.folder)


def test_writing_does_not_wait_for_the_copy(copied: Copied) -> None:
    ship = copied.ship()
    assert ship.finish(_LONGEST_S)
    may_go, is_there = threading.Event(), threading.Event()

    def wait(name: str) -> bool:
        if name.startswith("segment-"):
            is_there.set()
            assert may_go.wait(_LONGEST_S)
        return False

    copied.place.fails = wait
    copied.write()
    assert is_there.wait(_LONGEST_S)
    copied.write(100)
    assert not ship.finish(0.0)
    may_go.set()
    assert ship.finish(_LONGEST_S)
