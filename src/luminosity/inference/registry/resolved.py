"""The names of models in registries, and the version that a name stands for: where it is, its digest, its copy."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

from luminosity._shared.shared_files import file_digest
from luminosity.errors import InvalidArgument, ModelUnavailable
from luminosity.inference.files.local import local_copy

__all__ = ["FILE_SCHEME", "RegistryName", "ResolvedModel", "is_digest", "is_registry_name", "model_digest"]
MLFLOW_SCHEME = "models:/"
FILE_SCHEME = "registry://"
_HINTS = {
    MLFLOW_SCHEME: "models:/NAME@ALIAS or models:/NAME/VERSION, with #PATH for a file inside the model",
    FILE_SCHEME: "registry://FOLDER/NAME@ALIAS or registry://FOLDER/NAME@VERSION, such as "
    "registry://s3://bucket/models/sentiment@prod",
}
_VERSION = re.compile(r"\d+")


@dataclass(frozen=True)
class RegistryName:
    """A parsed name: the registry's kind, the model in it, and the alias or version.

    >>> RegistryName.parse("models:/reviews-sentiment@champion")
    RegistryName(kind='mlflow', model='reviews-sentiment', wanted='champion', is_fixed=False, inside='')
    >>> RegistryName.parse("registry://s3://bucket/models/sentiment@prod").model
    's3://bucket/models/sentiment'
    """

    kind: Literal["mlflow", "file"]
    model: str
    """MLflow's name of the model, or the address of the registry's file without ``.json``."""
    wanted: str
    """The alias or the version."""
    is_fixed: bool
    """Whether the name can only stand for one version."""
    inside: str = ""
    """The path of a file or folder inside the model; MLflow only."""

    @classmethod
    def parse(cls, text: str) -> RegistryName:
        """Return the parsed name. Raises ``InvalidArgument`` if a part is missing."""
        if text.startswith(FILE_SCHEME):
            model, at, wanted = text.removeprefix(FILE_SCHEME).rpartition("@")
            model = model.removesuffix(".json")
            if at and wanted and "/" not in wanted and model.rpartition("/")[2]:
                return cls("file", model, wanted, is_fixed=False)
            raise _malformed(text, FILE_SCHEME)
        if not text.startswith(MLFLOW_SCHEME):
            raise InvalidArgument(f"found {text!r}, expected a name that begins with models:/ or registry://")
        whole, _, inside = text.removeprefix(MLFLOW_SCHEME).strip("/").partition("#")
        name, at, alias = whole.rpartition("@")
        if at and name and alias and "/" not in whole:
            return cls("mlflow", name, alias, is_fixed=False, inside=inside)
        name, slash, version = whole.rpartition("/")
        if slash and name and "/" not in name and "@" not in whole and version:
            return cls("mlflow", name, version, is_fixed=_VERSION.fullmatch(version) is not None, inside=inside)
        raise _malformed(text, MLFLOW_SCHEME)

    @property
    def registry(self) -> str:
        """The address of the registry's file; empty for MLflow, whose server its own settings name."""
        return f"{self.model}.json" if self.kind == "file" else ""

    @property
    def label(self) -> str:
        """The last part of the model's name, for metrics."""
        return self.model.rpartition("/")[2]

    def uri(self, version: str) -> str:
        """Return the name of one version of this model, which ``PredictionResult.model_id`` shows.

        >>> RegistryName.parse("models:/sentiment@champion#model.pkl").uri("7")
        'models:/sentiment/7'
        >>> RegistryName.parse("registry:///models/sentiment@prod").uri("7")
        'registry:///models/sentiment@7'
        """
        if self.kind == "mlflow":
            return f"{MLFLOW_SCHEME}{self.model}/{version}"
        return f"{FILE_SCHEME}{self.model}@{version}"


def is_registry_name(path: object) -> bool:
    """Return whether a handler's path is the name of a model in a registry.

    >>> is_registry_name("models:/sentiment@champion"), is_registry_name("models/sentiment"), is_registry_name(None)
    (True, False, False)
    """
    return isinstance(path, str) and path.startswith((MLFLOW_SCHEME, FILE_SCHEME))


def _malformed(text: str, scheme: str) -> InvalidArgument:
    return InvalidArgument(f"found the model {text!r}, expected {_HINTS[scheme]}")


@dataclass(frozen=True)
class ResolvedModel:
    """One version of a model in a registry. It is pickled with the steps that use it.

    Two resolutions are the same version if :attr:`identity` is equal, however often the registry was asked.
    """

    name: str
    """The name that the handler was given, such as ``models:/sentiment@champion``."""
    version: str
    uri: str
    """The name of this version, such as ``models:/sentiment/7``."""
    label: str
    """A short name for metrics, such as ``sentiment-7``."""
    path: str
    """The model's files: a local path, or an address on any file system of Beam's or MLflow's."""
    digest: str = ""
    """As the registry says, or as computed when the run started; empty if it is not known yet."""
    inside: str = ""
    """The file or folder inside ``path`` that the handler loads; empty for all of it."""
    local: str = ""
    """The copy of ``path`` whose digest was checked before the run, if that happened on this machine."""
    fetch: Callable[[str], str] = local_copy
    """Returns a local copy of ``path``; blocks while it is fetched."""
    find_inside: Callable[[str], str] | None = None
    """Returns ``inside`` for a local copy, if the layout of the registry's models says what a handler loads."""

    @property
    def identity(self) -> tuple[str, str, str]:
        """What differs between two versions: a version whose files were registered anew is another one."""
        return self.uri, self.path, self.digest

    def checked(self) -> ResolvedModel:
        """Return the model with its local copy and its digest. Blocks while the files are fetched and read.

        Raises ``ModelUnavailable`` if the files are missing, or if their digest is not the registered one.
        """
        local = self._fetched()
        if self.digest:
            check_digest(local, self.digest, self.uri)
            return replace(self, local=local)
        return replace(self, local=local, digest=model_digest(local))

    def local_path(self) -> str:
        """Return what the handler loads, on this machine. Blocks while the files are fetched.

        The digest is checked, unless the process that started the run has checked the same copy.
        """
        local = self.local
        if not (local and os.path.exists(local)):
            local = self._fetched()
            if self.digest:
                check_digest(local, self.digest, self.uri)
        inside = self.inside or ("" if self.find_inside is None else self.find_inside(local))
        if not inside:
            return local
        whole = os.path.join(local, inside)
        if not os.path.exists(whole):
            raise ModelUnavailable(
                f"{self.uri}: found no {inside!r} in the model at {local!r}", fix="check the part after #"
            )
        return whole

    def to_json(self) -> dict[str, Any]:
        """Return what a run records."""
        return {"name": self.name, "version": self.version, "path": self.path, "digest": self.digest}

    def _fetched(self) -> str:
        try:
            local = self.fetch(self.path)
        except ModelUnavailable as error:
            raise ModelUnavailable(f"{self.uri}: {error.message}", fix=error.fix, may_pass=error.may_pass) from error
        if not os.path.exists(local):
            raise ModelUnavailable(
                f"{self.uri}: found no file or folder {local!r}, which the registry names",
                fix="restore the files, or let the alias point to another version",
            )
        return local


_AT_ONCE = 4  # files; hashing releases Python's lock
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    """Return whether ``text`` is a digest as :func:`model_digest` returns it."""
    return _DIGEST.fullmatch(text) is not None


def model_digest(path: str | os.PathLike[str]) -> str:
    """Return the digest of a model on this machine: ``sha256:`` and 64 hexadecimal digits.

    For a file it is the SHA-256 of its bytes. For a folder it is the SHA-256 of what ``sha256sum`` prints for all files
    in it: a line with digest, two spaces and relative path for each file, sorted by path. Links to files are
    followed; links to folders and empty folders do not count.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "config.json").write_text("{}")
    ...     model_digest(folder)[:15], model_digest(f"{folder}/config.json")[:15]
    ('sha256:f0c39c91', 'sha256:44136fa3')
    """
    path = os.fspath(path)
    if not os.path.isdir(path):
        return f"sha256:{file_digest(path)}"
    names = sorted(_files_in(path), key=os.fsencode)
    if not names:
        raise ModelUnavailable(f"{path!r}: found an empty folder, expected a model")
    with ThreadPoolExecutor(min(_AT_ONCE, len(names)), "digest-model") as threads:
        digests = threads.map(file_digest, (os.path.join(path, name) for name in names))
        whole = hashlib.sha256()
        for name, digest in zip(names, digests, strict=True):
            whole.update(digest.encode() + b"  " + os.fsencode(name) + b"\n")
    return f"sha256:{whole.hexdigest()}"


def check_digest(path: str, expected: str, name: str) -> None:
    """Raise ``ModelUnavailable`` if the model ``name`` at ``path`` has not the expected digest."""
    found = model_digest(path)
    if found != expected:
        raise ModelUnavailable(
            f"{name}: the files at {path!r} have the digest {found}, expected {expected}, as the registry says; they "
            "have changed since the version was registered",
            fix="restore the files, or register them as a new version",
        )


def _files_in(folder: str) -> list[str]:
    return [
        os.path.relpath(os.path.join(parent, name), folder) for parent, _, names in os.walk(folder) for name in names
    ]
