"""The manifest of a run as data, and its file beside the run's record."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from luminosity._shared.shared_folders import is_own_file
from luminosity.errors import RecordError
from luminosity.runs.manifest.places import Sealed
from luminosity.runs.manifest.surroundings import Commit

__all__ = ["FORMAT", "STARTED_BY", "Manifest", "load", "path_of", "save", "started_by"]

FORMAT = 1  # increases when an older version could not read a manifest
STARTED_BY = "LUMINOSITY_STARTED_BY"
"""The variable with which `lum rerun` and `lum run project.toml` recognise the runs of a process that they start."""

_MOST_PLACES = 1_000  # of one list in the file
_MOST_RUNS = 100  # the newest, among which those of a process are looked for
_SUFFIX = ".manifest.json"


@dataclass(frozen=True)
class Manifest:
    """Everything that is known about how a run came about, and the digests of what it has written.

    ``state`` is "running" until the run has ended and its outputs have digests.
    """

    run: str
    started_at: float
    state: str
    number: int  # of the run among those of its process, from 1
    command: tuple[str, ...]  # without secrets; empty if it can't be run again
    folder: str  # in which the command ran
    luminosity: str  # the version
    commit: Commit | None = None
    is_full: bool = False  # whether digests read all bytes
    started_by: str = ""
    code: dict[str, str] = field(default_factory=dict[str, str])  # digests by file
    packages: dict[str, str] = field(default_factory=dict[str, str])
    inputs: tuple[Sealed, ...] = ()
    models: tuple[Sealed, ...] = ()
    outputs: tuple[Sealed, ...] = ()
    unknown: tuple[str, ...] = ()  # steps that may read or write something that the plan does not name
    left_out: int = 0  # places beyond the most that the file holds
    seeds: dict[str, str] = field(default_factory=dict[str, str])
    environment: dict[str, str] = field(default_factory=dict[str, str])
    machine: dict[str, str] = field(default_factory=dict[str, str])

    def to_json(self) -> dict[str, Any]:
        """Return the manifest for ``json.dumps``, with at most a thousand places of a kind."""
        data: dict[str, Any] = {"format": FORMAT, **asdict(self)}
        for name in ("inputs", "models", "outputs", "unknown"):
            data["left_out"] += max(0, len(data[name]) - _MOST_PLACES)
            data[name] = data[name][:_MOST_PLACES]
        return data

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """Return the manifest that :meth:`to_json` turned into ``data``. Raises :class:`RecordError` for other data."""
        try:
            if data["format"] != FORMAT:
                raise RecordError(f"found format {data['format']}, expected {FORMAT}: another version wrote it")
            values: dict[str, Any] = _known(cls, data)
            for name in ("inputs", "models", "outputs"):
                values[name] = tuple(Sealed(**_known(Sealed, each)) for each in values[name])
            values["commit"] = Commit(**_known(Commit, values["commit"])) if values["commit"] else None
            for name in ("command", "unknown"):
                values[name] = tuple(values[name])
            return cls(**values)
        except (KeyError, TypeError, AttributeError) as error:
            raise RecordError(f"not a manifest of this version: {error!r}") from error


def path_of(folder: Path, run_id: str) -> Path:
    """Return the file of a run's manifest in the folder with the records."""
    return folder / f"{run_id}{_SUFFIX}"


def save(folder: Path, manifest: Manifest) -> None:
    """Write a manifest, in one step, for this user alone."""
    path = path_of(folder, manifest.run)
    unfinished = f"{path}.unfinished"
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w") as file:
        file.write(json.dumps(manifest.to_json(), separators=(",", ":")))  # an indent would make it ten times slower
    os.replace(unfinished, path)


def load(folder: Path, run_id: str, *, to_run: bool = False) -> Manifest:
    """Read the manifest of a run. Raises :class:`RecordError` if there is none, or if it can't be read.

    ``to_run``: its command will be run, so it must be this user's own: another user could have written any command.
    """
    path = path_of(folder, run_id)
    try:
        with open(path) as file:
            is_own = is_own_file(file.fileno())
            manifest = Manifest.from_json(json.loads(file.read()))
    except FileNotFoundError:
        raise RecordError(
            f"run {run_id} has no manifest: it ran with --manifest=off, or an older version recorded it",
            fix="run the pipeline again; every run writes a manifest now",
        ) from None
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} can't be read: {error}", fix="run the pipeline again") from error
    if to_run and not is_own:
        raise RecordError(
            f"{path} belongs to another user, who chooses the command in it; expected a manifest of your own",
            fix=f"read it with `lum show {run_id} --manifest`, and start its command yourself",
        )
    return manifest


def started_by(folder: Path, mark: str) -> list[Manifest]:
    """Return the manifests of the runs of processes that were started with this mark, in the order of the runs."""
    found: list[Manifest] = []
    for path in sorted(folder.glob(f"*{_SUFFIX}"), reverse=True)[:_MOST_RUNS]:
        try:
            manifest = load(folder, path.name.removesuffix(_SUFFIX))
        except RecordError:
            continue  # of another run, which is damaged or just removed
        if manifest.started_by == mark:
            found.append(manifest)
    return found[::-1]


def _known(kind: type[Any], data: Any) -> dict[str, Any]:
    """Return the fields of ``kind`` in ``data``; later versions may have more."""
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in data.items() if name in names}
