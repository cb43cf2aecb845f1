"""The writer of manifests: a subscriber that writes down how a run came about, and seals what it has written.

The first part is gathered on the thread of the subscriber while the run starts, the digests of outputs on a thread of
their own after its end. Neither holds up the run, nor ``wait_until_finish``; the process ends when the manifest is
complete.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import count
from pathlib import Path

from luminosity.errors import LuminosityError
from luminosity.events import Event, RunEnded, RunStarted, Subscriber
from luminosity.runs import records
from luminosity.runs.manifest import manifest as manifests
from luminosity.runs.manifest import surroundings
from luminosity.runs.manifest.manifest import STARTED_BY, Manifest
from luminosity.runs.manifest.masking import mask_text
from luminosity.runs.manifest.places import Effects, Place, Sealed, seal

__all__ = ["ManifestWriter", "manifest_writer"]

_LOGGER = logging.getLogger(__name__)

_CLOCK_S = 2.0  # by which the times of files may be before the clock of the machine
_numbers = count(1)  # of the runs of this process


def manifest_writer(run_dir: str | None, detail: str, effects: Effects) -> Subscriber | None:
    """Return a writer of manifests to the folder of ``--run_dir``, or None if there shall be none."""
    number = next(_numbers)
    try:
        folder = records.folder(run_dir)
    except RuntimeError:
        return None  # the user has no home folder; the recorder says so
    return None if folder is None or detail == "off" else ManifestWriter(folder, detail, effects, number)


class ManifestWriter:
    """Writes the manifest of one run. If that fails, it warns once; the run goes on."""

    def __init__(self, folder: Path, detail: str, effects: Effects, number: int) -> None:
        self._folder = folder
        self._in_full = detail == "full"
        self._effects = effects
        self._number = number
        self._manifest: Manifest | None = None

    def __call__(self, event: Event) -> None:
        try:
            if isinstance(event, RunStarted):
                try:
                    self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                except OSError:
                    return  # the recorder, which writes to the same folder, says so
                self._manifest = self._begin(event)
                manifests.save(self._folder, self._manifest)
            elif isinstance(event, RunEnded) and self._manifest is not None:
                # Not a daemon thread: the manifest of a script's last run is complete when the script has ended.
                threading.Thread(
                    target=self._finish, args=[event.state], name="luminosity-manifest", daemon=False
                ).start()
        except (OSError, LuminosityError) as error:
            self._manifest = None
            _warn(error)

    def _begin(self, event: RunStarted) -> Manifest:
        effects = self._effects
        if effects.writes and "pyarrow" in sys.modules:
            # Their imports fail while Python ends, which may be when the outputs get their digests.
            import pyarrow.parquet  # noqa: F401  # pyright: ignore[reportUnusedImport]

            import luminosity.runs.manifest.contents  # noqa: F401  # pyright: ignore[reportUnusedImport]
        words = surroundings.command()
        script = (
            os.path.abspath(sys.argv[0]) if sys.argv and os.path.isfile(sys.argv[0]) else os.path.join(os.getcwd(), "")
        )
        return Manifest(
            run=event.run,
            started_at=event.started_at,
            state="running",
            number=self._number,
            command=words,
            folder=os.getcwd(),
            luminosity=version("luminosity"),
            commit=surroundings.commit(os.path.dirname(script)),
            is_full=self._in_full,
            started_by=os.environ.get(STARTED_BY, ""),
            code=surroundings.code(),
            packages=surroundings.packages(),
            # With all bytes it may take long: then at the end.
            inputs=() if self._in_full else self._sealed(_foreign(effects)),
            models=() if self._in_full else self._sealed(effects.models),
            unknown=effects.unknown,
            seeds={**surroundings.seeds(words), **dict(effects.seeds)},
            environment=surroundings.environment(),
            machine=surroundings.machine(),
        )

    def _finish(self, state: str) -> None:
        manifest = self._manifest
        assert manifest is not None
        try:
            if self._in_full:
                inputs, models = self._sealed(_foreign(self._effects)), self._sealed(self._effects.models)
                manifest = replace(manifest, inputs=inputs, models=models)
            since = manifest.started_at - _CLOCK_S
            outputs = (
                tuple(
                    _masked(seal(each, since=since, in_full=self._in_full, with_content=True))
                    for each in self._effects.writes
                )
                if state in ("done", "drained")
                else ()
            )
            manifests.save(self._folder, replace(manifest, state=state, outputs=outputs))
        except Exception as error:  # nobody else would hear of it
            _warn(error)

    def _sealed(self, places: Sequence[Place]) -> tuple[Sealed, ...]:
        return tuple(_masked(seal(each, in_full=self._in_full)) for each in places)


def _foreign(effects: Effects) -> list[Place]:
    """Return the places that a run reads and does not write itself."""
    written = [place.path for place in effects.writes]
    return [
        each
        for each in effects.reads
        if not any(each.path == path or each.path.startswith(path + os.sep) for path in written)
    ]


def _masked(sealed: Sealed) -> Sealed:
    return replace(sealed, path=mask_text(sealed.path))


def _warn(error: Exception) -> None:
    _LOGGER.warning("the run has no complete manifest: %s; --manifest=off writes none", error)
