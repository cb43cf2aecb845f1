"""Registries that are one JSON file for each model, on any file system of Beam's: ``registry://FOLDER/NAME@ALIAS``.

::

    {
      "aliases": {"prod": "2", "canary": "3"},
      "versions": {
        "2": {"path": "sentiment/2", "digest": "sha256:0f3a…"},
        "3": {"path": "sentiment/3", "digest": "sha256:9c41…"}
      }
    }

A path is relative to the folder of the file, unless it is absolute or an address. The digest may be left out. Other
fields are ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from apache_beam.io.filesystem import BeamIOError, CompressionTypes
from apache_beam.io.filesystems import FileSystems

from luminosity._shared.shared_files import locked, replace_file
from luminosity._shared.text import did_you_mean, first_line, list_some
from luminosity.errors import InvalidArgument, ModelUnavailable
from luminosity.inference.files.local import local_copy
from luminosity.inference.registry.resolved import (
    FILE_SCHEME,
    RegistryName,
    ResolvedModel,
    is_digest,
    is_registry_name,
    model_digest,
)

__all__ = ["register_model", "resolve_in_file"]

_MOST_BYTES = 16_000_000  # a registry of tens of thousands of versions; more must be another kind of file
_SHOWN = 5  # names in an error
_REASON_CHARACTERS = 300
_LOCK_TIMEOUT_S = 60.0  # for another process that registers a version


@dataclass
class _Registry:
    """The contents of a registry's file."""

    aliases: dict[str, str] = field(default_factory=dict[str, str])
    versions: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    others: dict[str, Any] = field(default_factory=dict[str, Any])


def resolve_in_file(name: RegistryName, text: str) -> ResolvedModel:
    """Return the version that a name stands for now. Blocks while the file is read.

    Raises ``ModelUnavailable`` if the file is missing or broken, or has no such alias or version.
    """
    address = name.registry
    registry = _read(address)
    version = registry.aliases.get(name.wanted, name.wanted)
    found = registry.versions.get(version)
    if found is None:
        if version != name.wanted:
            known = list_some(map(repr, registry.versions), _SHOWN) or "none"
            raise ModelUnavailable(
                f"{address}: the alias {name.wanted!r} stands for the version {version!r}, which is not among the "
                f"versions ({known})",
                fix="let the alias point to a version that exists",
            )
        known = [*registry.aliases, *registry.versions]
        raise ModelUnavailable(
            f"{text}: {address} has no alias or version {name.wanted!r}; it has "
            f"{list_some(map(repr, known), _SHOWN) or 'none yet'}",
            fix=did_you_mean(name.wanted, known) or None,
        )
    path = _absolute(address, found["path"])
    return ResolvedModel(
        name=text,
        version=version,
        uri=name.uri(version),
        label=f"{name.label}-{version}",
        path=path,
        digest=found.get("digest") or "",
    )


def register_model(
    registry: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    version: str | None = None,
    aliases: Iterable[str] = (),
) -> str:
    """Add a version of a model to a registry file, with its digest, and return the version.

    The file appears at once, complete, also for pipelines that watch it. Write the model's own files first.

    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "first.pkl").write_bytes(b"a model")
    >>> register_model(folder / "sentiment.json", folder / "first.pkl", aliases=["prod"])
    '1'

    Args:
        registry: the file, on any file system of Beam's, with or without ``registry://`` and ``.json``. It is made if
            it does not exist. On a local file system several processes may register at once; elsewhere the last one
            to write wins.
        path: the model's file or folder. It is stored relative to the registry if it lies below its folder.
        version: the name of the version. The default is the next whole number.
        aliases: names that stand for this version from now on, such as "prod". Pass ``path`` as it is registered to
            move an alias only: a version with the same path and digest is not added twice.
    """
    address = os.fspath(registry).removeprefix(FILE_SCHEME).removesuffix(".json") + ".json"
    model = os.fspath(path)
    if is_registry_name(model):
        raise InvalidArgument(f"found path={model!r}, expected the file or folder of a model")
    wanted = [aliases] if isinstance(aliases, str) else list(aliases)
    if not all(each and not set("@/") & set(each) for each in [*wanted, "x" if version is None else version]):
        raise InvalidArgument(
            f"found version={version!r} and aliases={wanted!r}, expected names without @ and /, and not empty"
        )
    if FileSystems.get_scheme(address) is not None:
        return _add(address, model, version, wanted)
    Path(address).parent.mkdir(parents=True, exist_ok=True)
    with open(f"{address}.lock", "a") as lock, locked(lock.fileno(), _LOCK_TIMEOUT_S):
        return _add(address, model, version, wanted)


def _add(address: str, model: str, version: str | None, aliases: list[str]) -> str:
    registry = _read(address) if _exists(address) else _Registry()
    local = local_copy(model)
    if not os.path.exists(local):
        raise ModelUnavailable(
            f"found no file or folder {model!r} to register in {address}", fix="write the model's files first"
        )
    digest = model_digest(local)
    entry = {"path": _stored(address, model), "digest": digest}
    if version is None:
        same = [each for each, found in registry.versions.items() if entry.items() <= found.items()]
        numbers = [int(each) for each in registry.versions if each.isdecimal()]
        version = same[-1] if same else str(max(numbers, default=0) + 1)
    elif version in registry.versions and not entry.items() <= registry.versions[version].items():
        raise InvalidArgument(
            f"{address} has a version {version!r} with other files already, expected a new one",
            fix="leave version= out: the next number is taken",
        )
    registry.versions.setdefault(version, entry)
    shadowing = [alias for alias in aliases if alias in registry.versions and alias != version]
    if shadowing:
        raise InvalidArgument(
            f"found the alias {shadowing[0]!r} for the version {version!r}, but {address} has a version of this name",
            fix="choose another alias",
        )
    registry.aliases |= dict.fromkeys(aliases, version)
    _write(address, registry)
    return version


def _exists(address: str) -> bool:
    try:
        return bool(FileSystems.exists(address))  # not match, to which a name such as model[2] is a pattern
    except (BeamIOError, OSError, ValueError) as error:
        raise _away(address, error) from error


def _read(address: str) -> _Registry:
    try:
        # Otherwise Beam decompresses by the file's suffix.
        with FileSystems.open(address, compression_type=CompressionTypes.UNCOMPRESSED) as file:
            content = file.read(_MOST_BYTES + 1)
    except Exception as error:  # each file system has its own errors
        if _is_missing(address):
            raise ModelUnavailable(
                f"found no registry {address!r}", fix=did_you_mean(address, _neighbours(address)) or None
            ) from error
        raise _away(address, error) from error
    if len(content) > _MOST_BYTES:
        raise _broken(address, f"found more than {_MOST_BYTES:,} bytes")
    try:
        data: Any = json.loads(content)
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
        raise _broken(address, first_line(str(error), _REASON_CHARACTERS)) from None
    return _parsed(address, data)


def _parsed(address: str, data: Any) -> _Registry:
    if not isinstance(data, dict):
        raise _broken(address, f"found a {type(data).__name__}, expected an object")
    whole = cast("dict[str, Any]", data)
    aliases, versions = whole.get("aliases", {}), whole.get("versions")
    if not isinstance(versions, dict):
        raise _broken(address, "found no object 'versions'")
    if not isinstance(aliases, dict):
        raise _broken(address, "found 'aliases' that is not an object of aliases and their versions")
    for name, found in cast("dict[str, Any]", versions).items():
        path: Any = cast("dict[str, Any]", found).get("path") if isinstance(found, dict) else None
        if not (isinstance(path, str) and path):
            raise _broken(address, f"the version {name!r} has no 'path'")
        digest: Any = found.get("digest")
        if digest is not None and not (isinstance(digest, str) and is_digest(digest)):
            raise _broken(address, f"the version {name!r} has the digest {digest!r}, expected sha256: and 64 digits")
    for alias, version in cast("dict[str, Any]", aliases).items():
        if isinstance(version, bool) or not isinstance(version, str | int):
            raise _broken(address, f"the alias {alias!r} stands for {version!r}, expected a version")
    return _Registry(
        {alias: str(version) for alias, version in cast("dict[str, Any]", aliases).items()},
        dict(cast("dict[str, Any]", versions)),
        {key: value for key, value in whole.items() if key not in ("aliases", "versions")},
    )


def _write(address: str, registry: _Registry) -> None:
    content = {**registry.others, "aliases": registry.aliases, "versions": registry.versions}
    encoded = (json.dumps(content, indent=2) + "\n").encode()
    if FileSystems.get_scheme(address) is not None:
        with FileSystems.create(address, compression_type=CompressionTypes.UNCOMPRESSED) as file:
            file.write(encoded)
        return
    replace_file(address, encoded, is_synced=True)


def _absolute(address: str, path: str) -> str:
    if FileSystems.get_scheme(path) is not None or path.startswith("/"):
        return path
    folder = _folder(address)
    if FileSystems.get_scheme(address) is not None:
        return f"{folder}/{path}"
    return os.path.normpath(os.path.join(os.path.abspath(folder or "."), path))


def _stored(address: str, model: str) -> str:
    """Return the path as the registry keeps it: relative if the model lies below the folder of the registry."""
    if FileSystems.get_scheme(model) is None and FileSystems.get_scheme(address) is None:
        folder, model = os.path.abspath(os.path.dirname(address) or "."), os.path.abspath(model)
    else:
        folder = _folder(address)
    model = model.rstrip("/")
    return model[len(folder) + 1 :] if model.startswith(f"{folder}/") else model


def _folder(address: str) -> str:
    return address.rpartition("/")[0]


def _is_missing(address: str) -> bool:
    try:
        return not FileSystems.exists(address)
    except Exception:  # the file system does not answer, so nothing is known
        return False


def _neighbours(address: str) -> list[str]:
    try:
        found = FileSystems.match([f"{_folder(address) or '.'}/*.json"])[0].metadata_list
    except Exception:  # only a suggestion is lost
        return []
    return [each.path.removeprefix("./") for each in found]


def _away(address: str, error: Exception) -> ModelUnavailable:
    reason = first_line(str(error), _REASON_CHARACTERS) or type(error).__name__
    return ModelUnavailable(f"the registry {address} can't be read: {reason}", may_pass=True)


def _broken(address: str, reason: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"the registry {address} is broken: {reason}",
        fix='write it again, as {"aliases": {"prod": "1"}, "versions": {"1": {"path": "model.pt"}}}',
    )
