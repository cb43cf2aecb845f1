"""Keeps what models in the process have written, for all workers of a run and for later runs."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from luminosity._shared.model_sizes import RUN_FOLDER_VARIABLE
from luminosity.core import InferenceMetrics
from luminosity.errors import IncompleteAnswer
from luminosity.inference.answer_cache import AnswerCache, CacheSettings, open_cache
from luminosity.inference.handler import note

__all__ = ["KeepsTexts", "KeptTexts", "Text", "TextsInCache", "keeper_of", "kept_texts"]

Text: TypeAlias = "str | Exception"
"""What a model wrote for one prompt, or why it has no answer."""

_RUN_FOLDER = "answers"
_RUN_LIMIT = 200_000_000  # bytes of the run's own file, which may lie in memory
_FIRST_LOOK_S = 0.02  # short beside the time that a model takes for an answer
_LONGEST_LOOK_S = 0.5  # between two looks for the answer of another process


@runtime_checkable
class TextsInCache(Protocol):
    """A handler that keeps the answers to its requests itself, as one of a server does."""

    def with_cache(self, cache: CacheSettings) -> Any:
        """Return a copy of the handler with this cache."""
        ...


@runtime_checkable
class KeepsTexts(Protocol):
    """A handler whose texts may be kept: it knows everything that they depend on, besides the prompt."""

    def texts_version(self) -> str:
        """Return a text that differs for each version of the model and for all settings. Called once it is loaded."""
        ...


@dataclass(frozen=True)
class KeptTexts:
    """The texts of one model in a file that all processes of the machine may share."""

    settings: CacheSettings
    version: str
    """Of the model and its settings."""
    of_run: bool
    """Whether the file ends with the run."""

    def texts(
        self, prompts: Sequence[str], arguments: Mapping[str, Any], ask: Callable[[list[int]], list[Text]]
    ) -> list[Text]:
        """Return the text for each prompt; ``ask`` gets the places of those that no process has asked yet.

        What the model wrote is in the file before this returns. A prompt that another process asks is waited for.
        """
        cache = open_cache(self.settings)
        keys = [self._key(prompt, arguments) for prompt in prompts]
        places = {key: place for place, key in reversed([*enumerate(keys)])}
        found = self._known(cache, [*places])
        pause = _FIRST_LOOK_S
        while left := [key for key in places if key not in found]:
            mine = cache.claim(left)
            try:
                found |= self._known(cache, mine)  # another process may have had the claim until now
                asked = [key for key in mine if key not in found]
                if asked:
                    new = dict(zip(asked, ask([places[key] for key in asked]), strict=True))
                    cache.put({key: kept for key, text in new.items() if (kept := _packed(text)) is not None})
                    found |= new
            finally:
                cache.release(mine)
            if not mine:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_LOOK_S)
                found |= self._known(cache, left)
        return [found[key] for key in keys]

    def _known(self, cache: AnswerCache, keys: Sequence[bytes]) -> dict[bytes, Text]:
        found = {key: _unpacked(kept) for key, kept in cache.get(keys).items()}
        if found:
            note(InferenceMetrics.REPEATED_PROMPTS if self.of_run else InferenceMetrics.CACHED_ANSWERS, len(found))
        return found

    def _key(self, prompt: str, arguments: Mapping[str, Any]) -> bytes:
        parts = [self.version, repr(sorted(arguments.items())), prompt]
        raw = [part.encode("utf-8", "surrogatepass") for part in parts]
        return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in raw)).digest()


def kept_texts(handler: Any, cache: CacheSettings | None) -> KeptTexts | None:
    """Return where the texts of a loaded model are kept: in the cache, or in the run's folder; None if nowhere."""
    keeper = keeper_of(handler)
    if keeper is None:
        return None
    settings, folder = cache, os.environ.get(RUN_FOLDER_VARIABLE)
    if settings is None and folder and os.path.isdir(folder):
        settings = CacheSettings(os.path.join(folder, _RUN_FOLDER), _RUN_LIMIT)
    return None if settings is None else KeptTexts(settings, keeper.texts_version(), of_run=cache is None)


def keeper_of(handler: Any) -> KeepsTexts | None:
    """Return the handler, or the one that it wraps, if its texts may be kept."""
    inner = handler
    while inner is not None and not isinstance(inner, KeepsTexts):
        inner = getattr(inner, "wrapped", None)
    return inner


def _packed(text: Text) -> bytes | None:
    """Return what to keep; None for an error that may pass or that says nothing about the prompt.

    An answer that is cut is kept: the model would write the same again.
    """
    if isinstance(text, str):
        return json.dumps({"text": text}).encode()
    if isinstance(text, IncompleteAnswer) and not text.may_pass:
        return json.dumps({"incomplete": text.message, "fix": text.fix.python if text.fix else None}).encode()
    return None


def _unpacked(kept: bytes) -> Text:
    found = json.loads(kept)
    return found["text"] if "text" in found else IncompleteAnswer(found["incomplete"], fix=found["fix"])
