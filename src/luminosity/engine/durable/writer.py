"""What goes into a checkpoint: rows, contents of blocks and large groups; and the thread that writes them.

The loop goes on while the thread writes.
"""

from __future__ import annotations

import contextlib
import marshal
import os
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from luminosity.engine.data.blocks import Block, BlockStore, Content
from luminosity.engine.data.saved_rows import BlockReference
from luminosity.engine.data.state import StateStore
from luminosity.engine.data.world import World
from luminosity.engine.durable.store import CheckpointFolder, StoredContent, Transaction
from luminosity.engine.durable.tables import FILES
from luminosity.engine.spill.files import SpillFile

__all__ = ["CheckpointWriter", "Collected", "Contents", "Removal"]

_SYNC_S = 1.0  # at most so much is lost with the power; finalization callbacks wait for it
_CLOSE_S = 60.0  # how long the end of a run waits for a slow disk


class Removal(NamedTuple):
    """The removal of a file that a checkpoint does not refer to any more."""

    first: int  # number of the first checkpoint of this start that had the file; 0 if the last start left it
    last: int  # number of the first one that does not have it
    remove: Callable[[], None]

    def is_safe(self, written: int, synced: int) -> bool:
        """Return whether no start could need the file, given the last checkpoints that are written and synced.

        A file that came and went between two syncs is in no checkpoint that a start after a power loss could find.
        """
        return self.last <= synced or (self.last <= written and self.first > synced)


class Contents:
    """The data of blocks that the checkpoint has, and the files of large groups. Only the loop's thread uses it.

    A file stays until no checkpoint that a restart could find refers to it.
    """

    def __init__(self, folder: CheckpointFolder, new_files: str, blocks: BlockStore, state: StateStore) -> None:
        """Keep contents in ``folder``, and make files in ``new_files``, a folder below it."""
        self._folder = folder
        self._new_files = new_files
        self._blocks = blocks
        self._state = state
        self._next_id = 1
        self.paths: dict[int, str | None] = {}  # of each content: its file, if it has one
        self._numbered: dict[int, Content] = {}
        self._users = Counter[str]()  # how many contents a file has
        self._first: dict[str, int] = {}  # of each file: the number of the first checkpoint that had it
        self.groups: dict[bytes, SpillFile] = {}

    def note_restored(self, content: StoredContent, path: str | None) -> None:
        """Note a content that the last run saved."""
        self.paths[content.id] = path
        self._next_id = max(self._next_id, content.id + 1)
        if path is not None:
            self._users[path] += 1
            self._blocks.kept.add(path)

    def number_of(self, block: Block, changes: Transaction) -> int:
        """Return the number of a block's content. Adds the content to ``changes`` if the checkpoint lacks it."""
        content = block.content
        if content.number:
            return content.number
        content.number = number = self._next_id
        self._numbered[number] = content
        self._next_id += 1
        if content.file is None:
            self.paths[number] = None
            changes.contents.append(StoredContent(number, content.data, None, size=len(content.data)))
            return number
        path, is_packed = content.file.place
        self.paths[number] = path
        self._users[path] += 1
        if self._users[path] == 1:
            changes.files.append(path)
        if path not in self._blocks.kept:
            self._blocks.kept.add(path)
            self._first[path] = changes.number
        relative = os.path.relpath(path, self._folder.path)
        changes.contents.append(
            StoredContent(number, None, relative, content.base, content.file.size, is_packed=is_packed)
        )
        return number

    def save_group(self, token: bytes, changes: Transaction) -> None:
        """Add the values of a large group to ``changes`` if the checkpoint lacks them."""
        if token in self.groups:
            return
        self.groups[token] = file = SpillFile(self._new_files)
        chunks = [file.append(data) for data in self._state.group_data(token)]
        relative = os.path.relpath(file.path, self._folder.path)
        row = relative, [(chunk.offset, chunk.stored, chunk.size) for chunk in chunks]
        changes.rows["groups", token] = marshal.dumps(row)
        self._first[file.path] = changes.number
        changes.files.append(file.path)

    def drop_unused(self, used: set[int], tokens: set[bytes], changes: Transaction) -> list[Removal]:
        """Remove contents that nothing refers to. Returns the files that go with them, once that is safe."""
        removals: list[Removal] = []

        def add(path: str, remove: Callable[[], None]) -> None:
            changes.rows[FILES, os.path.relpath(path, self._folder.path).encode()] = None
            removals.append(Removal(self._first.pop(path, 0), changes.number, remove))

        for number in self.paths.keys() - used:
            path = self.paths.pop(number)
            changes.dropped.append(number)
            if (content := self._numbered.pop(number, None)) is not None:
                content.number = 0  # a later checkpoint that refers to it again has to save it again
            if path is not None:
                self._users[path] -= 1
                if not self._users[path]:
                    del self._users[path]
                    add(path, lambda path=path: self._let_go(path))
        for token in self.groups.keys() - tokens:
            changes.rows["groups", token] = None
            file = self.groups.pop(token)
            add(file.path, file.release)
        return removals

    def _let_go(self, path: str) -> None:
        if self._users[path]:
            return  # another content refers to it by now
        self._blocks.kept.discard(path)
        if path not in self._blocks.files:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


class Collected:
    """The changes of one checkpoint, as parts of the run add them."""

    def __init__(self, contents: Contents, changes: Transaction) -> None:
        self._contents = contents
        self._changes = changes
        self.used: set[int] = set()
        self.tokens: set[bytes] = set()

    def put(self, owner: str, key: bytes, value: bytes) -> None:
        """Store a row of a part of the run."""
        self._changes.rows[owner, key] = value

    def remove(self, owner: str, key: bytes) -> None:
        """Remove a row of a part of the run."""
        self._changes.rows[owner, key] = None

    def remove_all(self, owner: str) -> None:
        """Remove all rows of a part of the run, also those of this checkpoint."""
        self._changes.cleared.add(owner)
        for row in [row for row in self._changes.rows if row[0] == owner]:
            del self._changes.rows[row]

    def refer(self, block: Block) -> BlockReference:
        """Return what stands for a block in rows, and keep its content as long as the checkpoint needs it."""
        number = self._contents.number_of(block, self._changes)
        self.used.add(number)
        if block.token:
            self._contents.save_group(block.token, self._changes)
            self.tokens.add(block.token)
        return number, block.start, block.size, block.count, block.hold, block.weight, block.token


class CheckpointWriter:
    """Writes one checkpoint after the other, and syncs them in groups.

    ``on_written`` is called on the writer's thread with the number of the last checkpoint that is written, the number
    of the last one that would survive a power loss, and the error that ended the writing, if there is one. The loop's
    thread calls everything else.
    """

    def __init__(
        self, folder: CheckpointFolder, world: World, on_written: Callable[[int, int, Exception | None], None]
    ) -> None:
        self._folder = folder
        self._monotonic = world.clock.monotonic
        self._on_written = on_written
        self._changed = world.condition()
        self._next: Transaction | None = None
        self._is_writing = False
        self._is_closed = False
        self._is_urgent = False
        self._written = self._synced = 0
        self._error: Exception | None = None
        self._thread = world.start_thread(self._run, "luminosity-checkpoint")

    @property
    def is_busy(self) -> bool:
        """Whether the last checkpoint is still being written."""
        return self._next is not None or self._is_writing

    def submit(self, changes: Transaction) -> None:
        """Write a checkpoint. Call it only if the writer is not busy. Does not wait."""
        with self._changed:
            self._next = changes
            self._changed.notify_all()

    def wait_until_written(self) -> bool:
        """Wait until the writer is not busy, but not forever; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.is_busy or self._error is not None, _CLOSE_S)

    def finish(self) -> None:
        """Wait until everything is on the disk. Raises the error that ended the writing."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            is_done = self._changed.wait_for(
                lambda: self._error is not None or (not self.is_busy and self._synced == self._written), _CLOSE_S
            )
            self._is_urgent = False
        if self._error is not None:
            raise self._error
        if not is_done:
            raise TimeoutError(f"the checkpoint was not written within {_CLOSE_S:.0f} s: the disk is too slow")

    def close(self) -> None:
        """End the thread. What is not written yet is not written."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        synced_at = self._monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, self._seconds_to_sync(synced_at))
                if self._is_closed:
                    return
                changes, self._next = self._next, None
                self._is_writing = changes is not None
            try:
                if changes is not None:
                    self._folder.write(changes)
                    self._written = changes.number
                is_due = self._is_urgent or self._monotonic() - synced_at >= _SYNC_S
                if self._written > self._synced and (is_due or self._folder.must_sync):
                    self._folder.sync()
                    synced_at = self._monotonic()
                    self._synced = self._written
                    self._folder.shrink()
                    self._folder.keep_state()
                self._on_written(self._written, self._synced, None)
            except Exception as error:  # the loop ends the run with it
                self._error = error
                self._on_written(self._written, self._synced, error)
                return
            finally:
                with self._changed:
                    self._is_writing = False
                    self._changed.notify_all()

    def _has_work(self) -> bool:
        return self._is_closed or self._next is not None or (self._is_urgent and self._written > self._synced)

    def _seconds_to_sync(self, synced_at: float) -> float | None:
        if self._written == self._synced:
            return None
        return max(0.0, synced_at + _SYNC_S - self._monotonic())
