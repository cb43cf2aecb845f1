"""What differs between a run's manifest and this machine as it is now."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from luminosity._shared.text import format_bytes
from luminosity.runs.manifest import surroundings
from luminosity.runs.manifest.files import digest_files
from luminosity.runs.manifest.manifest import Manifest
from luminosity.runs.manifest.places import Place, Sealed, seal

__all__ = ["Difference", "compare_files", "compare_packages", "compare_places", "differences_from_now"]

_SHORT = 12  # characters of a digest or commit in a message

What = Literal["commit", "code", "package", "input", "model", "machine", "environment"]


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
