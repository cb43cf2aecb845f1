"""Names of models in a registry, as handlers take them instead of a path."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from luminosity.errors import InvalidArgument

__all__ = ["FILE_SCHEME", "MLFLOW_SCHEME", "RegistryName", "is_registry_name"]

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
