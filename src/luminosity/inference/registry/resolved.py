"""The version of a model that a name stands for: where it is, its digest, and its local copy."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from luminosity.errors import ModelUnavailable
from luminosity.inference.files.local import local_copy
from luminosity.inference.registry.digests import check_digest, model_digest

__all__ = ["ResolvedModel"]


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
