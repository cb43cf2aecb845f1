"""Fills the parts of a run with what its last checkpoint has."""

from __future__ import annotations

import itertools
import marshal
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.data import wire
from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.saved_rows import BlockReference, SavedRows
from luminosity.engine.data.shard import Shard
from luminosity.engine.data.state import StateStore
from luminosity.engine.data.wire import StateKeys
from luminosity.engine.durable.checkpointer import FROM_UPSTREAM, SavedParts
from luminosity.engine.durable.names import Names
from luminosity.engine.durable.store import CheckpointFolder, StoredContent
from luminosity.engine.durable.writer import Contents
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.plan.codecs import TimerRecord
from luminosity.engine.plan.graph import Stage
from luminosity.engine.spill.diskmap import Cell
from luminosity.engine.spill.files import Chunk, SpillFile, StoredChunk

__all__ = [
    "RestoredRows",
    "remove_other_files",
    "restore",
    "restore_cells",
    "restore_metrics",
    "restore_timers",
    "with_step",
]

_ROWS_AT_ONCE = 10_000  # of state: bounds the memory beside the cells themselves, and how often memory is checked


class RestoredRows:
    """The rows of a checkpoint, and the blocks that they refer to. Call :meth:`close` once all parts have theirs.

    Parts of one block may be in several places, such as a bundle that ran and the queue that it came from. The first
    place may release its part before the second one asks for its own, so all data stays until then.
    """

    def __init__(self, folder: CheckpointFolder, contents: Contents, blocks: BlockStore, state: StateStore) -> None:
        self._folder = folder
        self._blocks = blocks
        self._state = state
        self._contents = contents
        self._stored: dict[int, StoredContent] = {}
        for stored in folder.contents():
            path = os.path.join(folder.path, stored.path) if stored.path is not None else None
            contents.note_restored(stored, path)
            self._stored[stored.id] = stored._replace(path=path)
        self._restored: dict[int, Callable[[int, int, int, int, int], Block]] = {}
        self._held: list[Block] = []  # one for each content
        self._users: dict[bytes, int] = {}  # of large groups, by token

    def rows(self, owner: str) -> Iterator[tuple[bytes, bytes]]:
        """Yield the keys and values of an owner's rows."""
        return self._folder.rows(owner)

    def block(self, reference: BlockReference) -> Block:
        """Return the block that a row refers to. The caller owns it."""
        number, start, size, count, hold, weight, token = reference
        if not number:
            return self._blocks.of_bytes(start, count, hold, weight=weight)
        if (make := self._restored.get(number)) is None:
            on_free = partial(self._drop_group, token) if token else None
            if token:
                self._users[token] = self._users.get(token, 0) + 1
            content = self._blocks.restored(self._stored[number], on_free, token)
            make = self._restored[number] = partial(self._blocks.block_of, content)
            self._held.append(make(0, 0, 0, 0, 0))
        return make(start, size, count, hold, weight)

    def restore_groups(self) -> None:
        """Serve the values of large groups."""
        for token, row in self._folder.rows("groups"):
            relative, places = marshal.loads(row)
            path = os.path.join(self._folder.path, relative)
            self._contents.groups[token] = file = SpillFile(os.path.dirname(path), restored_path=path)
            chunks: list[Chunk] = [StoredChunk(file, *place) for place in places]
            self._state.restore_group(token, chunks)

    def close(self) -> None:
        """Let go of data that no part has taken."""
        for block in self._held:
            block.release()
        self._held.clear()

    def _drop_group(self, token: bytes) -> None:
        self._users[token] -= 1
        if not self._users[token]:
            self._state.remove_group(token)


def restore(folder: CheckpointFolder, contents: Contents, names: Names, parts: SavedParts) -> dict[str, bytes]:
    """Fill fresh parts of a run from its checkpoint. Returns the rows of queues and stages, by their owners."""
    saved = RestoredRows(folder, contents, parts.blocks, parts.state)
    saved.restore_groups()
    single: dict[str, bytes] = {}
    now, wall = parts.world.clock.monotonic(), parts.world.clock.time()
    for buffer_id, buffer in parts.buffers.items():
        buffer.restore(saved, names.of_buffer(buffer_id))
    for stage in parts.stages:
        name = names.of_stage(stage.plan)
        for _, row in saved.rows(owner := f"stage/{name}"):
            single[owner] = row
            stage.input_watermark, stage.output_watermark, stage.elements_done, stage.bundles_done = marshal.loads(row)
        for read in stage.plan.reads:
            for _, row in saved.rows(owner := f"queue/{names.of_read(stage.plan, read)}"):
                single[owner] = row
                for due, reference in marshal.loads(row):
                    block = saved.block(reference)
                    if due == FROM_UPSTREAM:
                        stage.add(read.transform_id, block)
                    else:
                        stage.restore_input(read.transform_id, block, now + max(0.0, due - wall) if due else None)
        if stage.gate is not None:
            stage.gate.restore(saved, names.of_gates(stage.plan))
        if stage.plan.is_stateful:
            restore_cells(stage, names, saved, parts.state, parts.check_memory)
            restore_timers(stage, names, saved)
    saved.close()
    restore_metrics(folder, names, [stage.plan for stage in parts.stages], parts.metrics)
    return single


def restore_metrics(folder: CheckpointFolder, names: Names, stages: Iterable[Stage], metrics: RunMetrics) -> None:
    """Put back the metrics of all stages."""
    for stage in stages:
        metrics.restore(stage.id, folder.rows(f"metrics/{names.of_stage(stage)}"))


def restore_cells(
    stage: StageRun, names: Names, saved: SavedRows, state: StateStore, check_memory: Callable[[], None]
) -> None:
    """Put back the state of a stage. Calls ``check_memory`` every few thousand cells."""
    total = len(stage.shards)
    for step in stage.plan.steps:
        cells: list[dict[bytes, Cell]] = [{} for _ in stage.shards]
        key_of, hash_of, load = StateKeys().read, wire.key_hash, marshal.loads
        rows = saved.rows(f"state/{names.of_step(step)}")
        while at_once := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            for cell_key, row in at_once:
                cells[hash_of(key_of(cell_key)) % total][cell_key] = load(row)
            for shard, of_shard in zip(stage.shards, cells, strict=True):
                if of_shard:
                    _put_cells(stage, shard, of_shard, state)
                    of_shard.clear()
            check_memory()


def with_step(cell_key: bytes, step: str) -> bytes:
    """Return the key of a cell of state after its step was renamed."""
    state_key = beam_fn_api_pb2.StateKey.FromString(cell_key)
    getattr(state_key, str(state_key.WhichOneof("type"))).transform_id = step
    return state_key.SerializeToString()


def _put_cells(stage: StageRun, shard: Shard, cells: dict[bytes, Cell], state: StateStore) -> None:
    state.restore(cells, shard)
    if stage.expiry is not None:
        shard.cell_expiry.note(cells, stage.expiry)


def restore_timers(stage: StageRun, names: Names, saved: SavedRows) -> None:
    """Put back the timers of a stage."""
    total = len(stage.shards)
    hash_of, load, record_of = wire.key_hash, marshal.loads, TimerRecord._make
    for family in stage.plan.timers:
        records: list[list[TimerRecord]] = [[] for _ in stage.shards]
        for _, row in saved.rows(f"timers/{names.of_step(family.transform_id)}/{family.family_id}"):
            record = record_of(load(row))
            records[hash_of(record.key) % total].append(record)
        for shard, own in zip(stage.shards, records, strict=True):
            shard.timers.restore(family.key, own)
            if stage.expiry is not None:
                shard.timers.note_windows(family.key, own)


def remove_other_files(folder: CheckpointFolder, keep: set[str], new_files: str) -> None:
    """Remove the files of earlier starts to which the checkpoint does not refer.

    Those in ``new_files`` stay: they have what was spilled while the checkpoint was read.
    """
    if not os.path.isdir(folder.blocks):
        return
    for generation in os.listdir(folder.blocks):
        path = os.path.join(folder.blocks, generation)
        if path == new_files:
            continue
        for name in os.listdir(path):
            if (file := os.path.join(path, name)) not in keep:
                os.unlink(file)
        if not os.listdir(path):
            shutil.rmtree(path, ignore_errors=True)
