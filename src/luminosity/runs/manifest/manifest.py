"""The manifest of a run: its data, its file beside the record, and how this machine differs from it now."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from luminosity._shared.shared_files import is_own_file, replace_file
from luminosity._shared.text import format_bytes
from luminosity.errors import RecordError
from luminosity.runs.manifest import surroundings
from luminosity.runs.manifest.files import digest_files
from luminosity.runs.manifest.places import Place, Sealed, seal
from luminosity.runs.manifest.surroundings import Commit

__all__ = [
    "FORMAT",
    "STARTED_BY",
    "Difference",
    "Manifest",
    "compare_files",
    "compare_packages",
    "compare_places",
    "compare_words",
    "differences_between",
    "differences_from_now",
    "load",
    "path_of",
    "save",
    "started_by",
]
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
    content = json.dumps(manifest.to_json(), separators=(",", ":"))  # an indent would make it ten times slower
    replace_file(path_of(folder, manifest.run), content, is_private=True)


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


_SHORT = 12  # characters of a digest or commit in a message
What = Literal["commit", "code", "package", "option", "input", "model", "machine", "environment"]


@dataclass(frozen=True)
class Difference:
    """One thing that is not as it was when a run began."""

    what: What
    name: str
    before: str
    now: str

    def __str__(self) -> str:
        return (
            f"{self.what} {self.name}: was {self.before}, is {self.now}"
            if self.name
            else f"{self.what}: was {self.before}, is {self.now}"
        )


def differences_from_now(manifest: Manifest, version: str) -> list[Difference]:
    """Return how commit, code, packages, inputs, models and machine differ from those of a run."""
    found: list[Difference] = []
    if manifest.commit is not None and (now := surroundings.commit(manifest.commit.root)) != manifest.commit:
        found.append(Difference("commit", "", _commit(manifest.commit), _commit(now)))
    found += compare_files("code", manifest.code)
    found += compare_packages({**manifest.packages, "luminosity": manifest.luminosity}, version)
    found += compare_places("input", manifest.inputs, in_full=manifest.is_full)
    found += compare_places("model", manifest.models, in_full=manifest.is_full)
    found += _compare("environment", _of_libraries(manifest.environment), _of_libraries(surroundings.environment()))
    found += _compare("machine", manifest.machine, surroundings.machine())
    return found


def differences_between(before: Manifest, after: Manifest) -> list[Difference]:
    """Return how commit, code, packages, options, inputs, models and machine differ between two runs."""
    found: list[Difference] = []
    if before.commit != after.commit:
        found.append(Difference("commit", "", _commit(before.commit), _commit(after.commit)))
    code = [{file: _short(digest) for file, digest in each.code.items()} for each in (before, after)]
    found += _compare("code", *code)
    found += _compare("package", *({**each.packages, "luminosity": each.luminosity} for each in (before, after)))
    found += compare_words(before.command, after.command)
    found += _compare("input", *({each.path: describe(each) for each in run.inputs} for run in (before, after)))
    found += _compare(
        "model", *({each.name or each.path: describe(each) for each in run.models} for run in (before, after))
    )
    found += _compare("environment", _of_libraries(before.environment), _of_libraries(after.environment))
    found += _compare("machine", before.machine, after.machine)
    return found


def compare_words(before: Iterable[str], after: Iterable[str]) -> list[Difference]:
    """Return how two commands differ, whose secrets are hidden: the options, and the other words by their place.

    >>> for each in compare_words(["job.py", "--rows=5", "--fast"], ["job.py", "--rows=9", "more"]):
    ...     print(each)
    option --fast: was given, is missing
    option --rows: was 5, is 9
    option argument 2: was missing, is more
    """
    return _compare("option", _options(before), _options(after))


def _options(words: Iterable[str]) -> dict[str, str]:
    """Return the values of options by their names. A word behind an option without ``=`` is its value."""
    found: dict[str, str] = {}
    name, place = "", 0
    for word in words:
        if word.startswith("-") and word != "-":
            name, mark, value = word.partition("=")
            found[name] = value if mark else "given"
            name = "" if mark else name
        elif name:
            found[name], name = word, ""
        else:
            place += 1
            found[f"argument {place}"] = word
    return found


def compare_files(what: What, digests: Mapping[str, str]) -> list[Difference]:
    """Return the files that have other digests now, or are gone."""
    found: list[Difference] = []
    for file, digest in digests.items():
        now = digest_files([file]).digest if os.path.isfile(file) else "gone"
        if now != digest:
            found.append(Difference(what, file, _short(digest), _short(now)))
    return found


def compare_packages(before: Mapping[str, str], version: str) -> list[Difference]:
    """Return the packages with other versions now; ``version`` is that of Luminosity."""
    return _compare("package", before, {**surroundings.packages(), "luminosity": version})


def compare_places(what: What, places: Iterable[Sealed], *, in_full: bool = False) -> list[Difference]:
    """Return the places whose bytes differ now. What was not known then is left out."""
    found: dict[Difference, None] = {}
    for each in places:
        if not each.digest or (each.kind == "model" and each.name):
            continue  # a version of a registry is fixed; the run that follows names the one that it takes
        now = seal(Place(each.step, each.path, each.kind, each.name), in_full=in_full)
        if now.digest != each.digest:
            found[Difference(what, each.path, describe(each), describe(now))] = None
    return list(found)


def describe(sealed: Sealed) -> str:
    """Say in a few words what a place holds: its digest and size, or why there is none."""
    if not sealed.digest:
        return sealed.note or "not known"
    size = f" ({format_bytes(sealed.size)})" if sealed.size else ""
    return f"{_short(sealed.digest)}{size}"


def _compare(what: What, before: Mapping[str, str], now: Mapping[str, str]) -> list[Difference]:
    names = sorted({*before, *now})
    return [
        Difference(what, name, before.get(name) or "missing", now.get(name) or "missing")
        for name in names
        if before.get(name) != now.get(name)
    ]


def _of_libraries(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are not ours: ours tell where things are, and differ from run to run."""
    return {name: value for name, value in variables.items() if not name.startswith("LUMINOSITY_")}


def _commit(commit: surroundings.Commit | None) -> str:
    if commit is None:
        return "no commit"
    return commit.id[:_SHORT] + {True: "", False: " with changes", None: ""}[commit.is_clean]


def _short(digest: str) -> str:
    kind, is_digest, value = digest.partition(":")
    return f"{kind}:{value[:_SHORT]}" if is_digest else digest
