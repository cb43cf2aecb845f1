"""Finds out, within seconds, whether a model of the Hugging Face hub can be loaded.

transformers asks the hub for every file and repeats each request for half a minute if the network is down. So the hub
is asked once, with a short timeout, before transformers runs.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from luminosity._shared.text import first_line
from luminosity.errors import Fix, ModelUnavailable
from luminosity.extras import require
from luminosity.inference.files.local import near_path

__all__ = ["is_hub_name", "must_stay_offline"]

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_TIMEOUT_S = 5.0  # a hub that has not answered by then counts as unreachable
_REMEMBERED_S = 60.0  # how long an answer, or none, holds: loading a model asks for many files
_MOST_REMEMBERED = 64  # answers
_REASON_CHARACTERS = 200

_Question: TypeAlias = tuple[str, str | None, str | bool | None, str]  # name, revision, token, endpoint


@dataclass(frozen=True)
class _Answer:
    state: Literal["found", "missing", "unreachable"]
    reason: str = ""


_answers: dict[_Question, tuple[float, _Answer]] = {}  # with the time of each; threads may replace each other's


def is_hub_name(text: str) -> bool:
    """Return whether ``text`` can be a name on a hub: ``name`` or ``organisation/name``.

    >>> is_hub_name("org/encoder"), is_hub_name("models/encoder/"), is_hub_name("./encoder"), is_hub_name("a/b/c")
    (True, False, False, False)
    """
    return _NAME.fullmatch(text) is not None


def must_stay_offline(name: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether a model must be loaded from the local cache alone, because the hub can't be reached.

    ``arguments`` are those that transformers gets. Blocks for a few seconds at most. Raises ``ModelUnavailable`` if the
    cache does not have the model either, or the hub has no such model.
    """
    constants = require("huggingface_hub.constants", "transformers")
    caches = _caches(arguments.get("cache_dir"), constants)
    is_cached = any(_has_model(cache, name) for cache in caches)
    if arguments.get("local_files_only"):
        answer = _Answer("unreachable", "local_files_only=True forbids it")
    elif constants.HF_HUB_OFFLINE:
        answer = _Answer("unreachable", "HF_HUB_OFFLINE forbids it")
    else:
        answer = _ask((name, arguments.get("revision"), arguments.get("token"), constants.ENDPOINT))
    if is_cached or answer.state == "found":
        return answer.state == "unreachable"
    hub = (
        f"no model of this name at {constants.ENDPOINT}"
        if answer.state == "missing"
        else f"{constants.ENDPOINT} can't be reached"
    )
    near = near_path(name)
    raise ModelUnavailable(
        f"{name!r}: found no folder {os.path.abspath(name)!r}, no copy in the cache {caches[0]!r}, and {hub} "
        f"({answer.reason})",
        fix=near or _advice(name, answer),
    )


def _advice(name: str, answer: _Answer) -> Fix | str:
    if answer.state == "missing":
        return "check the spelling; a private model needs a token: hf auth login"
    return f"check the path, or fetch the model where there is a network: hf download {name}"


def _caches(chosen: Any, constants: Any) -> list[str]:
    """Return the folders in which transformers looks for models of the hub."""
    if chosen is not None:
        return [os.fspath(chosen)]
    older = os.environ.get("TRANSFORMERS_CACHE")
    return [constants.HF_HUB_CACHE, *([older] if older else [])]


def _has_model(cache: str, name: str) -> bool:
    snapshots = os.path.join(cache, f"models--{name.replace('/', '--')}", "snapshots")
    return any(files for _, _, files in os.walk(snapshots))


def _ask(question: _Question) -> _Answer:
    """Return the hub's answer, which may be a minute old."""
    asked_at, answer = _answers.get(question, (-_REMEMBERED_S, _Answer("unreachable")))
    if time.monotonic() - asked_at < _REMEMBERED_S:
        return answer
    answer = _ask_now(question)
    if len(_answers) >= _MOST_REMEMBERED:
        _answers.clear()
    _answers[question] = time.monotonic(), answer
    return answer


def _ask_now(question: _Question) -> _Answer:
    found: list[_Answer] = []

    def ask() -> None:
        found.append(_request(*question))

    # On its own thread: the timeout of an HTTP client does not bound how long it looks for the hub's address.
    thread = threading.Thread(target=ask, name="ask-the-hub", daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    return found[0] if found else _Answer("unreachable", f"no answer within {_TIMEOUT_S:.0f} s")


def _request(name: str, revision: str | None, token: str | bool | None, endpoint: str) -> _Answer:
    hub = require("huggingface_hub", "transformers")
    errors = require("huggingface_hub.errors", "transformers")
    try:
        hub.HfApi(endpoint=endpoint).model_info(name, revision=revision, token=token, timeout=_TIMEOUT_S)
    except errors.GatedRepoError:
        return _Answer("found")
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        return _Answer("missing", first_line(str(error), _REASON_CHARACTERS))
    except errors.HfHubHTTPError:
        return _Answer("found")  # the hub answers; what it says about single files is for transformers to explain
    except Exception as error:  # whichever HTTP library it uses
        return _Answer("unreachable", first_line(str(error), _REASON_CHARACTERS) or type(error).__name__)
    return _Answer("found")
