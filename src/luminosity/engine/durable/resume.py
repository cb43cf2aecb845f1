"""Opens the checkpoint folder of a run, and decides whether the run begins, continues, or has nothing to do."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
from collections.abc import Callable, Generator
from typing import Any

from luminosity._shared.text import format_bytes
from luminosity.engine.durable.checkpointer import Checkpointer, SavedParts
from luminosity.engine.durable.comparison import Comparison, fit
from luminosity.engine.durable.copies.copied import CheckpointCopy
from luminosity.engine.durable.copies.opening import open_folder
from luminosity.engine.durable.names import Names
from luminosity.engine.durable.restoring import remove_other_files, restore, with_step
from luminosity.engine.durable.shape import describe
from luminosity.engine.durable.store import CheckpointFolder, Transaction
from luminosity.engine.durable.versions.migration import (
    META_KEY,
    Migration,
    load_migration,
    migrated_rows,
    migrated_shape,
)
from luminosity.engine.durable.versions.successor import continue_from, source_rows
from luminosity.engine.durable.writer import Contents
from luminosity.engine.options import EngineConfig
from luminosity.engine.plan.graph import Graph, Read, Stage
from luminosity.errors import CheckpointDamaged, CheckpointFailed
from luminosity.runs import run_ids

__all__ = ["Checkpoint", "Resumption"]

_LOGGER = logging.getLogger(__name__)

_STREAM_INTERVAL_S = 0.05  # results that wait for a checkpoint, such as those behind a Reshuffle, wait so long at most
_BATCH_INTERVAL_S = 10.0  # so much work is repeated after a kill


class Checkpoint:
    """The checkpoint folder of one run. The run calls :meth:`close` when it ends."""

    def __init__(
        self,
        folder: CheckpointFolder,
        meta: dict[str, str],
        copy: CheckpointCopy | None = None,
        *,
        is_drain: bool = False,
    ) -> None:
        """Look at what is in the folder. ``is_drain``: the plan of a drain follows, so keep where the sources are."""
        self.folder = folder
        self.copy = copy
        self.comparison = Comparison()
        self.is_finished = _has_finished(meta)
        # A start that was killed before its first checkpoint has left nothing but the pipeline's shape.
        self.is_resumed = "saved_at" in meta and not self.is_finished
        self._meta = meta
        self._is_drain = is_drain
        self._generation = int(meta.get("generation", 0)) + 1
        # Each start has a folder of its own, so that no two files have the same name.
        self.new_files = os.path.join(folder.blocks, f"{self._generation}")
        self._hook: Checkpointer | None = None

    def fit(self, plan: Callable[[frozenset[str]], Graph], config: EngineConfig) -> Graph:
        """Return a plan that can continue from the checkpoint. Raises :class:`CheckpointError` if none can."""
        if not self.is_resumed:
            return plan(frozenset())
        owners = self.folder.owners()
        shape = json.loads(self._meta["shape"])
        if config.migrate and self._meta.get(META_KEY) != config.migrate:
            shape = self._migrated(shape, config.migrate)
        graph, self.comparison = fit(plan, shape, config.renamed_steps, config.drop_state, owners)
        return graph

    def _migrated(self, shape: dict[str, Any], given: str) -> dict[str, Any]:
        """Set aside what the function ``given`` makes of the rows of state; return the shape that they have then."""
        migration = Migration(shape["steps"])
        load_migration(given)(migration)
        count = self.folder.set_aside(migrated_rows(self.folder, shape, migration))
        _LOGGER.warning("%s changes %s rows of state in %s", given, f"{count:,}", self.folder.path)
        return migrated_shape(shape, migration)

    def begin(self, graph: Graph, config: EngineConfig, script: str) -> None:
        """Note the pipeline and its script, and give the rows of changed steps to those that take them."""
        for note in self.comparison.notes:
            _LOGGER.warning("%s", note)
        self._names = Names(graph)
        shape = describe(graph)
        meta = {
            "state": "running",
            "generation": f"{self._generation}",
            "shape": json.dumps(shape),
            "pipeline": script,
            run_ids.META_KEY: config.checkpoint_run,  # the one of the checkpoint, unless the run begins anew
        }
        if config.migrate:  # also if there is nothing to migrate: what this version writes must not be, later
            meta[META_KEY] = config.migrate
        moves = dict(self.comparison.moves)
        # The keys of cells have the unique name of their step, which may change though its durable name does not.
        placed = {new for owners in moves.values() for new in owners}
        owners = {f"state/{self._names.of_step(new)}" for new in self.comparison.renamed.values()} - placed
        moves.update({owner: (owner,) for owner in owners})

        def key_of(owner: str, key: bytes) -> bytes:
            kind, _, step = owner.partition("/")
            return with_step(key, shape["steps"][step]["name"]) if kind == "state" else key

        self.folder.rearrange(moves, self.comparison.dropped, meta, key_of)

    def sends_impulse(self, stage: Stage, read: Read) -> bool:
        """Return whether the impulse of a stage's read is still to be sent. Call it after :meth:`begin`."""
        return not self.is_resumed or self._names.of_read(stage, read) in self.comparison.new_sources

    def attach(self, interval: float | None, parts: SavedParts) -> Checkpointer:
        """Fill the parts of a run from the checkpoint, if there is one, and return what saves them from now on."""
        names, clock = self._names, parts.world.clock
        contents = Contents(self.folder, self.new_files, parts.blocks, parts.state)
        if interval is None:
            is_stream = any(stage.plan.has_endless_input for stage in parts.stages)
            interval = _STREAM_INTERVAL_S if is_stream else _BATCH_INTERVAL_S
        for buffer in parts.buffers.values():
            buffer.track()
        for stage in parts.stages:
            if any(parts.buffers[read.buffer_id].grouping is not None for read in stage.plan.reads):
                # A bundle that takes all groups of a model's input would be repeated as a whole.
                stage.size.expect_large_elements()
        if not self.is_resumed:
            self._hook = Checkpointer(self.folder, contents, names, interval, parts, {}, self.copy)
            return self._hook
        started = clock.monotonic()
        with _without_garbage_collection():
            saved = restore(self.folder, contents, names, parts)
            if self._is_drain:
                rows = {(owner, b""): row for owner, row in source_rows(parts.stages, names)}
                self.folder.write(Transaction(0, rows=dict(rows)))
        self._hook = Checkpointer(self.folder, contents, names, interval, parts, saved, self.copy)
        kept = parts.blocks.kept | {file.path for file in contents.groups.values()}
        self.folder.sync(kept)  # Only then no start after a power loss needs the others.
        remove_other_files(self.folder, kept, self.new_files)
        age = max(0.0, clock.time() - float(self._meta.get("saved_at", clock.time())))
        if self._generation > 1:  # else :func:`continue_from` has told it
            self._tell(parts, age, clock.monotonic() - started)
        return self._hook

    def _tell(self, parts: SavedParts, age: float, seconds: float) -> None:
        waiting = sum(stage.queued + len(stage.delayed) for stage in parts.stages)
        _LOGGER.warning(
            "continuing the run in %s (start %d): checkpoint %s old, %s elements wait, %s of state; read in %.1f s",
            self.folder.path,
            self._generation,
            _age(age),
            f"{waiting:,}",
            format_bytes(parts.state.memory_bytes),
            seconds,
        )

    def tell_finished(self) -> None:
        """Say that there is nothing to do, and remove what the run has left if it failed or was killed at its end."""
        with contextlib.suppress(CheckpointFailed, OSError):  # the disk still fails: another start removes it
            self.folder.sync()  # only then no start after a power loss needs the files
            remove_other_files(self.folder, set(), self.new_files)
            self.folder.forget_kept_states()
        _LOGGER.warning(
            "the run in %s has %s already: nothing to do. Add --restart to run it again",
            self.folder.path,
            self._meta.get("state"),
        )

    def pause(self) -> CheckpointFolder:
        """Stop writing, and return the folder, which stays locked for another plan of the same run."""
        if self._hook is not None:
            self._hook.close()
            self._hook = None
        if self.copy is not None:
            self.copy.pause()
        return self.folder

    def close(self, *, has_failed: bool = False) -> None:
        """Stop writing, and release the folder. The last checkpoint of a run that has failed stays as it is.

        A run may fail after its end is saved: the disk could not sync it, or was too slow. It has finished all the
        same, and no rows are left from which a start could continue.
        """
        if self._hook is not None:
            self._hook.close()
        if self.copy is not None:
            self.copy.close()
        if has_failed:
            # The disk is full or damaged: what it has is that of a killed run.
            with contextlib.suppress(CheckpointFailed, CheckpointDamaged):
                if not _has_finished(self.folder.meta()):
                    self.folder.note(state="failed")
        self.folder.close()


class Resumption:
    """Opens the checkpoint folder while a run is prepared. Call :meth:`close` if the run does not start."""

    def __init__(self) -> None:
        self.checkpoint: Checkpoint | None = None

    def fit(self, config: EngineConfig, plan: Callable[[frozenset[str]], Graph]) -> Graph:
        """Return a plan that can continue from the checkpoint of ``config``, if that has one."""
        if config.checkpoint_dir is None:
            return plan(frozenset())
        folder, copy = open_folder(config)
        try:
            if config.continue_from is not None and "saved_at" not in folder.meta():
                continue_from(folder, config.continue_from)
            checkpoint = Checkpoint(folder, folder.meta(), copy)
            if checkpoint.is_resumed:
                folder.check_files()
                folder.keep_state(at_start=True)
        except BaseException:
            if copy is not None:
                copy.close()
            folder.close()
            raise
        self.checkpoint = checkpoint
        return checkpoint.fit(plan, config)

    def close(self) -> None:
        """Release the folder."""
        if self.checkpoint is not None:
            self.checkpoint.close()


def _has_finished(meta: dict[str, str]) -> bool:
    return meta.get("state") in ("finished", "drained")


@contextlib.contextmanager
def _without_garbage_collection() -> Generator[None]:
    """Let Python not look for cycles while millions of objects are made that have none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _age(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"
