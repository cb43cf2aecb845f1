"""What a start takes over from a checkpoint."""

from __future__ import annotations

from pathlib import Path

from luminosity.engine.data.blocks import BlockStore
from luminosity.engine.data.state import StateStore
from luminosity.engine.durable.restoring import RestoredRows
from luminosity.engine.durable.store import CheckpointFolder, StoredContent, Transaction
from luminosity.engine.durable.writer import Contents
from luminosity.engine.spill.quota import Ledger


def test_parts_of_one_block_are_restored_although_the_first_is_released_at_once(tmp_path: Path) -> None:
    """A stage with shards cuts what it takes over by key, and releases it."""
    folder = CheckpointFolder(str(tmp_path / "checkpoint"))
    path = Path(folder.blocks, "1", "file")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"abcdef")
    contents = [StoredContent(1, b"abcdef", None, size=6), StoredContent(2, None, "blocks/1/file", size=6)]
    folder.write(Transaction(1, contents=contents))
    ledger = Ledger(None, 1 << 20, 0)
    blocks = BlockStore(str(tmp_path), ledger)
    state = StateStore(str(tmp_path), ledger)
    saved = RestoredRows(folder, Contents(folder, str(tmp_path), blocks, state), blocks, state)
    for number in (1, 2):
        first = saved.block((number, 0, 2, 1, 0, 2, b""))
        assert first.data() == b"ab"
        first.release()
        second = saved.block((number, 2, 4, 2, 0, 4, b""))
        assert second.data() == b"cdef"
        saved.close()
        assert second.data() == b"cdef"
        second.release()
    assert ledger.used == 0
    assert path.exists()  # until a checkpoint does not have it any more
    folder.close()
