"""Opens the checkpoint folder of a run that has a copy, and restores the folder from a copy."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sqlite3
from dataclasses import replace
from typing import Any

from apache_beam.options.pipeline_options import PipelineOptions

from luminosity.engine.data.world import THIS_MACHINE
from luminosity.engine.durable.copies.bases import reader
from luminosity.engine.durable.copies.copied import CheckpointCopy, CopyNote
from luminosity.engine.durable.copies.fetching import Found, fetch, find
from luminosity.engine.durable.copies.lease import Lease, LeaseNote, read_lease
from luminosity.engine.durable.copies.places import Place, place_at
from luminosity.engine.durable.place import DATABASE
from luminosity.engine.durable.store import CheckpointFolder
from luminosity.engine.durable.upkeep.kept_states import KeptStates
from luminosity.engine.durable.upkeep.savepoints import begin_from
from luminosity.engine.options import EngineConfig
from luminosity.errors import CheckpointError
from luminosity.runner_options import LuminosityOptions

__all__ = ["note_restored_run", "open_folder"]

_LOGGER = logging.getLogger(__name__)


def open_folder(config: EngineConfig) -> tuple[CheckpointFolder, CheckpointCopy | None]:
    """Open the checkpoint folder of a run, restore it if that is asked for, and take the lease of its copy.

    A new folder begins with a savepoint if one is named. Raises :class:`CheckpointError` if another run holds the
    folder or the copy, or if the copy is damaged, and :class:`CopyError` if it can't be reached.
    """
    assert config.checkpoint_dir is not None
    if config.savepoint is not None:
        begin_from(config.checkpoint_dir, config.savepoint)
    note = CopyNote.read(config.checkpoint_dir) or CopyNote.new(THIS_MACHINE)
    restart = config.restart or (note.is_restoring and config.restore_from is not None)
    kept = KeptStates(config.checkpoint_dir, config.checkpoint_keep)
    folder = CheckpointFolder(config.checkpoint_dir, restart=restart, kept=kept)
    try:
        if note.is_restoring and not restart:
            raise _half_restored(folder.path, note.restored_from)
        if not config.checkpoint_copy and not config.restore_from:
            if note.is_restoring:
                replace(note, is_restoring=False).write(folder.path)
            return folder, None
        return folder, _Opening(config, folder, note).open()
    except BaseException:
        folder.close()
        raise


def note_restored_run(options: PipelineOptions) -> None:
    """Note in a pipeline's options the identity of the run that will be restored, for the steps that are being built.

    Reads a few small objects of the copy, once. Raises :class:`CheckpointError` if a run lives that writes it.
    """
    ours: Any = options.view_as(LuminosityOptions)
    if not ours.restore_from or not ours.checkpoint_dir or ours.restored_run is not None:
        return
    folder = os.path.abspath(os.path.expanduser(str(ours.checkpoint_dir)))
    note = CopyNote.read(folder)
    if (note is None or not note.is_restoring) and _has_checkpoint(folder):
        return
    place = place_at(str(ours.restore_from))
    lease = read_lease(place)
    if lease is not None and (note is None or lease.folder != note.folder):
        _refuse_if_held(place, lease)  # Now: what a run that lives has written may go while it is read.
    found = find(place, lease)
    ours.restored_run = found.manifest.run if found is not None else ""


def _has_checkpoint(folder: str) -> bool:
    """Return whether something was saved in a folder. What is wrong with it, its opening tells later."""
    if not os.path.exists(os.path.join(folder, DATABASE)):
        return False
    try:
        with contextlib.closing(reader(folder)) as rows:
            return rows.execute("SELECT 1 FROM meta WHERE key = 'saved_at'").fetchone() is not None
    except sqlite3.Error:
        return True


class _Opening:
    """What a start finds, in its folder and in the places of copies."""

    def __init__(self, config: EngineConfig, folder: CheckpointFolder, note: CopyNote) -> None:
        self._config = config
        self._folder = folder
        self._note = replace(note, is_restoring=False)
        self._has_checkpoint = "saved_at" in folder.meta()

    def open(self) -> CheckpointCopy | None:
        config, folder = self._config, self._folder
        source = place_at(config.restore_from) if config.restore_from else None
        target = place_at(config.checkpoint_copy) if config.checkpoint_copy else None
        if source is not None and target is not None and source.address == target.address:
            source = target
        must_restore = source is not None and not self._has_checkpoint
        is_known = source is None or source.address in (self._note.address, self._note.restored_from)
        if source is not None and self._has_checkpoint and not is_known:
            raise CheckpointError(
                f"--restore_from={source.address}: found a checkpoint of something else in {folder.path}, expected an "
                "empty folder",
                fix="choose a new --checkpoint_dir, or leave out --restore_from",
            )
        lease = None
        if target is not None:
            lease = self._take(target, may_take_over=config.restart or (must_restore and source is target))
        try:
            if must_restore and source is not None:
                self._restore(source, lease if source is target else None, may_be_missing=source is target)
            if lease is None or target is None:
                self._note.write(folder.path)
                return None
            self._note = replace(self._note, address=target.address, error="")
            self._note.write(folder.path, is_synced=True)
            return CheckpointCopy(target, lease, self._note, THIS_MACHINE)
        except BaseException:
            if lease is not None:
                lease.close()
            raise

    def _take(self, place: Place, *, may_take_over: bool) -> Lease:
        """Take the lease of a place that this run may write."""
        self._before = found = read_lease(place)
        if found is not None and found.folder != self._note.folder:
            _refuse_if_held(place, found)
            if not may_take_over:
                self._refuse_other(place, found.holder)
        elif found is None and not may_take_over:
            copy = find(place, None)
            if copy is not None and copy.manifest.folder != self._note.folder:
                self._refuse_other(place, "another run")
        self._note.write(self._folder.path, is_synced=True)  # The lease names the folder by the id in it.
        return Lease(place, self._note.folder, self._config.copy_lease, THIS_MACHINE)

    def _refuse_other(self, place: Place, holder: str) -> None:
        if self._note.address == place.address:
            raise CheckpointError(
                f"the run has gone on elsewhere: {holder} has taken over the copy in {place.address}, and what "
                f"{self._folder.path} has is older",
                fix=f"remove {self._folder.path}, and start with --restore_from={place.address} if this machine is to "
                "go on",
            )
        raise CheckpointError(
            f"--checkpoint_copy={place.address}: found the copy of another run ({holder}), expected an empty place",
            fix="choose another place, or add --restore_from with this one to continue that run in an empty folder",
        )

    def _restore(self, source: Place, lease: Lease | None, *, may_be_missing: bool) -> None:
        """Fetch the copy into the folder, which is empty."""
        before = self._before if lease is not None else read_lease(source)
        if lease is None and before is not None and before.folder != self._note.folder:
            _refuse_if_held(source, before)
        found = find(source, before)
        if found is None:
            if may_be_missing:
                _LOGGER.warning("there is no copy in %s yet: the run begins", source.address)
                return
            raise CheckpointError(
                f"--restore_from={source.address}: found no copy of a checkpoint there",
                fix="look whether the address is the one of --checkpoint_copy",
            )
        taken = Lease(source, self._note.folder, self._config.copy_lease, THIS_MACHINE) if lease is None else None
        try:
            self._note = replace(self._note, restored_from=source.address, is_restoring=True)
            self._note.write(self._folder.path, is_synced=True)
            self._fetch(source, found)
            self._note = replace(self._note, is_restoring=False)
            self._note.write(self._folder.path, is_synced=True)
        finally:
            if taken is not None:
                taken.close()

    def _fetch(self, source: Place, found: Found) -> None:
        began = THIS_MACHINE.clock.monotonic()
        fetched = fetch(source, found, self._folder)
        saved_at = float(self._folder.meta().get("saved_at", "nan"))
        _LOGGER.warning(
            "restored %s from %s, as it was %.1f s ago (%s, in %.1f s)",
            self._folder.path,
            source.address,
            THIS_MACHINE.clock.time() - saved_at,
            fetched,
            THIS_MACHINE.clock.monotonic() - began,
        )


def _refuse_if_held(place: Place, found: LeaseNote) -> None:
    seconds = found.free_in(THIS_MACHINE.clock.time())
    if seconds > 0:
        raise CheckpointError(
            f"the copy in {place.address} is in use by {found.holder}, which renewed its lease "
            f"{max(0.0, THIS_MACHINE.clock.time() - found.expires + found.length_s):.0f} s ago",
            fix=f"stop that run; if it does not live any more, try again in {math.ceil(seconds)} s",
        )


def _half_restored(folder: str, source: str) -> CheckpointError:
    return CheckpointError(
        f"the restore of {folder} from {source} was interrupted, and the folder is not complete",
        fix=f"add --restore_from={source}, which fetches it again, or --restart to begin anew",
    )
