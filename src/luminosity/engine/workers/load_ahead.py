"""Loads models in workers that start for them alone, before the first element reaches them.

Beam sets a step up with its first bundle. By then other workers have started, read and prepared elements, which takes
seconds in which the device would have nothing to do.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import threading
from collections.abc import Iterable

from apache_beam.internal import pickler
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2

from luminosity.core import LOADS_MODELS

__all__ = ["save", "start"]

_LOGGER = logging.getLogger(__name__)


def save(path: str, stages: Iterable[Iterable[beam_runner_api_pb2.PTransform]], *, is_device: bool) -> bool:
    """Write the DoFns of a pool's stages that load models to the private file ``path``.

    Returns False, and writes nothing, if there are none, or if the pool has no device and a stage without a model: its
    workers may never need the models.
    """
    found = [[_dofn(transform) for transform in stage if _loads_models(transform)] for stage in stages]
    payloads = [payload for stage in found for payload in stage] if is_device or all(found) else []
    if payloads:
        with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            pickle.dump(payloads, file)
    return bool(payloads)


def _loads_models(transform: beam_runner_api_pb2.PTransform) -> bool:
    return LOADS_MODELS in transform.annotations and transform.spec.urn == common_urns.primitives.PAR_DO.urn


def _dofn(transform: beam_runner_api_pb2.PTransform) -> bytes:
    return beam_runner_api_pb2.ParDoPayload.FromString(transform.spec.payload).do_fn.payload


def start(path: str) -> None:
    """Call ``load_ahead`` of the DoFns in a file that :func:`save` wrote, on a thread of its own. Does not wait."""
    threading.Thread(target=_load, args=(path,), name="luminosity-load-ahead", daemon=True).start()


def _load(path: str) -> None:
    gc.disable()  # libraries make little garbage while they are imported; looking for it takes a tenth of the time
    try:
        with open(path, "rb") as file:
            payloads = pickle.load(file)
        for payload in payloads:
            pickler.loads(payload)[0].load_ahead()
    except Exception:
        # The same error arises when Beam sets the step up, and is reported then with the step's name.
        _LOGGER.debug("could not load models ahead of the first element", exc_info=True)
    finally:
        gc.freeze()  # imported objects stay: later collections need not look at them
        gc.enable()
