"""Resolves names of models to versions, with an upper bound on the time that a registry may take."""

from __future__ import annotations

import logging
import threading

from luminosity.errors import ModelUnavailable
from luminosity.inference.registry.file_registry import resolve_in_file
from luminosity.inference.registry.mlflow_registry import resolve_in_mlflow
from luminosity.inference.registry.resolved import RegistryName, ResolvedModel

__all__ = ["resolve"]

_CLIENTS_LOGGER = logging.getLogger("urllib3.connectionpool")
_THREAD = "resolve-model"
_TIMEOUT_S = 60.0  # a registry that has not answered by then counts as away; MLflow retries for minutes


def resolve(name: str, timeout_s: float = _TIMEOUT_S) -> ResolvedModel:
    """Return the version of a model that a name stands for now. Blocks for ``timeout_s`` seconds at most.

    Raises ``ModelUnavailable`` if the registry is away, does not know the name or is broken, ``MissingExtra`` if its
    client is not installed, and ``InvalidArgument`` if the name lacks a part.
    """
    RegistryName.parse(name)
    with _lock:
        request = _requests.get(name)
        if request is None:
            request = _requests[name] = _Request(name)
            request.start()
    request.join(timeout_s)
    if request.is_alive():
        raise ModelUnavailable(
            f"{name}: the registry has not answered within {timeout_s:.0f} s", fix="check its address", may_pass=True
        )
    if request.error is not None:
        raise request.error
    assert request.found is not None
    return request.found


class _Request(threading.Thread):
    """Asks a registry on its own thread: clients retry for minutes, and look addresses up without a limit.

    A name has at most one: a call that comes while an earlier one still waits for the registry waits for its answer.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=_THREAD, daemon=True)
        self._model = name
        self.found: ResolvedModel | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Keep the answer, or the error."""
        _CLIENTS_LOGGER.addFilter(_is_other_thread)  # once: a logger keeps a filter only once
        try:
            self.found = _resolve_now(self._model)
        except BaseException as error:  # the calling thread raises it
            self.error = error
        finally:
            with _lock:
                del _requests[self._model]


def _is_other_thread(record: logging.LogRecord) -> bool:
    """Return whether a record is not about the retries of a request to a registry, of which its error tells."""
    return record.threadName != _THREAD


_lock = threading.Lock()
"""Protects the requests."""
_requests: dict[str, _Request] = {}
"""Those that run, by name."""


def _resolve_now(name: str) -> ResolvedModel:
    parsed = RegistryName.parse(name)
    return resolve_in_mlflow(parsed, name) if parsed.kind == "mlflow" else resolve_in_file(parsed, name)
