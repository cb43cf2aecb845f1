"""MLflow's model registry: ``models:/NAME@ALIAS``, through MLflow's own client."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from luminosity._shared.text import did_you_mean, first_line, list_some
from luminosity.errors import ModelUnavailable
from luminosity.extras import require
from luminosity.inference.files.local import cached_copy
from luminosity.inference.files.source import Source, SourceFile
from luminosity.inference.registry.resolved import RegistryName, ResolvedModel, is_digest

__all__ = ["check_reachable", "resolve_in_mlflow"]

_SHOWN = 5  # names in an error
_MOST_NAMES = 200  # registered models that are compared with a misspelt name
_REASON_CHARACTERS = 300
_DEEPEST = 32  # nested folders; more must be a loop
_ATTEMPTS = 3  # connections to a server, before it counts as away
_CONNECT_TIMEOUT_S = 5.0
_BETWEEN_ATTEMPTS_S = 1.0  # long enough for a server that restarts its socket
_PORTS = {"http": 80, "https": 443}
_DIGEST_TAG = "digest"
_NO_BAR = "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"
_LATEST = "latest"
_MISSING = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "NOT_FOUND")
_FLAVORS = {"sklearn": "pickled_model", "transformers": "model_binary", "onnx": "data", "xgboost": "data"}
"""MLflow's own layout of a model: the setting of each flavour that names the file or folder with the model."""


def resolve_in_mlflow(name: RegistryName, text: str) -> ResolvedModel:
    """Return the version that a name stands for now. Blocks while the server is asked.

    Raises ``MissingExtra`` if MLflow is not installed, and ``ModelUnavailable`` if the server does not answer or has no
    such model, alias or version.
    """
    mlflow = require("mlflow", "mlflow")
    check_reachable(mlflow.get_registry_uri())
    client = mlflow.MlflowClient()
    try:
        found = _version(client, name)
    except mlflow.MlflowException as error:
        raise _unavailable(client, name, text, error) from error
    version, digest = str(found.version), str((found.tags or {}).get(_DIGEST_TAG, ""))
    uri = name.uri(version)
    if digest and not is_digest(digest):
        raise ModelUnavailable(f"{uri}: found the tag {_DIGEST_TAG}={digest!r}, expected sha256: and 64 digits")
    try:
        location = _location(client, name.model, version)
    except mlflow.MlflowException as error:
        raise _unavailable(client, name, text, error) from error
    return ResolvedModel(
        name=text,
        version=version,
        uri=uri,
        label=f"{name.label}-{version}",
        path=location,
        digest=digest,
        inside=name.inside,
        fetch=_LocalCopy(uri),
        find_inside=_loadable,
    )


def _version(client: Any, name: RegistryName) -> Any:
    if name.is_fixed:
        return client.get_model_version(name.model, name.wanted)
    if name.wanted == _LATEST:
        newest = client.search_model_versions(f"name='{name.model}'", max_results=1, order_by=["version_number DESC"])
        if newest:
            return newest[0]
        client.get_registered_model(name.model)  # raises if there is none
    return client.get_model_version_by_alias(name.model, name.wanted)


def _location(client: Any, model: str, version: str) -> str:
    """Return where MLflow keeps the files of a version."""
    location = client.get_model_version_download_uri(model, version)
    if location.startswith("models:/"):  # since MLflow 3, a version may name a logged model by its id
        location = client.get_logged_model(location.removeprefix("models:/").strip("/")).artifact_location
    return location


class _LocalCopy:
    """Returns a local copy of a version's files; a class, because it is pickled with the steps."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def __call__(self, path: str) -> str:
        parts = urlsplit(path)
        if parts.scheme in ("", "file"):
            return unquote(parts.path) if parts.scheme else path
        mlflow = require("mlflow", "mlflow")
        registry: Any = require("mlflow.store.artifact.artifact_repository_registry", "mlflow")
        try:
            return cached_copy(_source(registry.get_artifact_repository(path), path))
        except (mlflow.MlflowException, ImportError) as error:  # a bucket needs the library of its cloud
            reason = first_line(str(error), _REASON_CHARACTERS)
            raise ModelUnavailable(f"the files at {path} can't be fetched: {reason}", may_pass=True) from error


def _source(repository: Any, address: str) -> Source:
    name = address.rstrip("/").rpartition("/")[2] or "model"
    files = tuple(
        SourceFile(each.path, f"{name}/{each.path}", each.file_size or 0, 0.0)
        for each in sorted(_walk(repository, None, 0), key=lambda each: each.path)
    )
    if not files:
        raise ModelUnavailable(f"{address}: found no files, expected those of a model")

    @contextmanager
    def open_file(path: str) -> Generator[Any]:
        os.environ.setdefault(_NO_BAR, "false")
        with (
            tempfile.TemporaryDirectory(prefix="luminosity-mlflow-") as folder,
            open(repository.download_artifacts(path, folder), "rb") as file,
        ):
            yield file

    return Source(address, name, files, open_file)


def _walk(repository: Any, folder: str | None, depth: int) -> Iterator[Any]:
    if depth == _DEEPEST:
        raise ModelUnavailable(f"found folders {_DEEPEST} levels deep at {folder}, expected those of a model")
    for each in repository.list_artifacts(folder):
        if each.is_dir:
            yield from _walk(repository, each.path, depth + 1)
        else:
            yield each


def _loadable(folder: str) -> str:
    """Return the file or folder, inside a model in MLflow's own layout, that a handler loads; empty for all of it."""
    path = os.path.join(folder, "MLmodel")
    if not os.path.isfile(path):
        return ""
    with open(path, encoding="utf-8") as file:
        flavors: Any = require("yaml", "mlflow").safe_load(file).get("flavors", {})
    for flavor, setting in _FLAVORS.items():
        inside = flavors.get(flavor, {}).get(setting)
        if inside:
            return inside
    raise ModelUnavailable(
        f"{folder!r}: found a model of MLflow for {list_some(flavors, _SHOWN)}, expected one for "
        f"{list_some(_FLAVORS, len(_FLAVORS))}",
        fix="name the file inside the model: models:/NAME@ALIAS#PATH",
    )


def _unavailable(client: Any, name: RegistryName, text: str, error: Exception) -> ModelUnavailable:
    """Return the error for a name that the server does not know, or for a server that does not answer."""
    if getattr(error, "error_code", "") not in _MISSING:
        return _away(error)
    mlflow = require("mlflow", "mlflow")
    try:
        names = [each.name for each in client.search_registered_models(max_results=_MOST_NAMES)]
        known = client.get_registered_model(name.model).aliases if name.model in names else None
    except mlflow.MlflowException as second:
        return _away(second)
    if known is None:
        return ModelUnavailable(
            f"{text}: the MLflow server {_server()} has no model {name.model!r}; it has "
            f"{list_some(map(repr, names), _SHOWN) or 'none yet'}",
            fix=did_you_mean(name.model, names) or None,
        )
    kind = "version" if name.is_fixed else "alias"
    return ModelUnavailable(
        f"{text}: the model {name.model!r} has no {kind} {name.wanted!r}; its aliases are "
        f"{list_some((f'{alias!r} (version {version})' for alias, version in known.items()), _SHOWN) or 'none yet'}",
        fix=did_you_mean(name.wanted, known) or None,
    )


def check_reachable(address: str) -> None:
    """Raise ``ModelUnavailable`` if nothing listens at a server's address: MLflow would retry for minutes first."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return
    if parts.scheme in getproxies() and not proxy_bypass(parts.hostname):
        return  # the proxy knows
    for attempt in range(_ATTEMPTS):
        try:
            with socket.create_connection((parts.hostname, parts.port or _PORTS[parts.scheme]), _CONNECT_TIMEOUT_S):
                return
        except OSError as error:
            if attempt + 1 == _ATTEMPTS:
                raise _away(error) from error
            time.sleep(_BETWEEN_ATTEMPTS_S)


def _away(error: Exception) -> ModelUnavailable:
    reason = first_line(str(error), _REASON_CHARACTERS) or type(error).__name__
    return ModelUnavailable(
        f"the MLflow server {_server()} can't be reached: {reason}", fix="check MLFLOW_TRACKING_URI", may_pass=True
    )


def _server() -> str:
    """Return the address of the registry, without a password."""
    address = require("mlflow", "mlflow").get_registry_uri()
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl() if parts.netloc else address
