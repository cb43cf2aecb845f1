"""Asks a model until its answers can be read, and each of several equal prompts once."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from apache_beam.ml.inference.base import PredictionResult

from luminosity._shared.text import shorten
from luminosity.core import InferenceMetrics
from luminosity.errors import AnswerError, HandlerError, IncompleteAnswer, ModelDied
from luminosity.inference.blocks import Block, rows, take
from luminosity.inference.continuous import ContinuousModel, outcomes_of
from luminosity.inference.handler import Handler, PartlyFailed, note
from luminosity.inference.prompts.answers import AnswerType
from luminosity.inference.prompts.kept import KeptTexts, Text
from luminosity.inference.prompts.template import Messages

__all__ = ["Answered", "Asking", "KnownAnswers", "has_seed", "is_sampled"]

_SHOWN_TEXT = 1000  # characters of an answer in its error: enough to see what the model did
_MOST_ANSWERS = 100_000  # that are remembered; with the limit below, a few hundred MB at most
_MOST_CHARACTERS = 64_000_000  # of all remembered answers
_WAIT_S = 60.0  # for another thread's answer to an equal prompt, before looking whether that thread still lives
_MOST_WAITS = 60  # then ask again: that thread may hang


@dataclass(frozen=True)
class Answered:
    """What became of one prompt: a plain value, or an error."""

    value: Any = None
    error: Exception | None = None
    size: int = 0
    """The number of characters of the model's text."""


def is_sampled(handler: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether the user asks for answers that differ from time to time: equal prompts are then all asked."""
    given = _given(handler, arguments)
    temperature = given.get("temperature")
    if given.get("do_sample") is False:
        return False
    return bool(given.get("do_sample")) or (temperature is not None and temperature > 0)


def has_seed(handler: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether the user gives a seed: sampled answers to equal prompts are then equal."""
    return _given(handler, arguments).get("seed") is not None


def _given(handler: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {**(getattr(handler, "answer_arguments", None) or {}), **arguments}


@dataclass(frozen=True)
class Asking:
    """Asks one model, and asks again after an answer that can't be read."""

    handler: Handler[Any, Any, Any]
    model: Any
    answers: AnswerType
    retries: int
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    kept: KeptTexts | None = None
    """Where the model's texts are kept; None if nowhere."""

    def ask(self, chats: Sequence[Messages], prepared: Block | None) -> list[Answered]:
        """Return the answer to each chat; ``prepared`` are the chats as the handler has prepared them, if it was."""
        found = self._round(chats, prepared)
        for _ in range(self.retries):
            again = [place for place, each in enumerate(found) if isinstance(each, _Unreadable)]
            if not again:
                break
            longer = [[*chats[place], *_complaint(found[place])] for place in again]
            for place, each in zip(again, self._round(longer, None), strict=True):
                found[place] = each
        return [each.answered() if isinstance(each, _Unreadable) else each for each in found]

    def _round(self, chats: Sequence[Messages], prepared: Block | None) -> list[Answered | _Unreadable]:
        found: list[Answered | _Unreadable] = []
        for text in self._texts(chats, prepared):
            found.append(self._read(text) if isinstance(text, str) else Answered(error=text))
        return found

    def _read(self, text: str) -> Answered | _Unreadable:
        try:
            return Answered(self.answers.parse(text), size=len(text))
        except (ValueError, OverflowError) as error:
            return _Unreadable(text, str(error))

    def _texts(self, chats: Sequence[Messages], prepared: Block | None) -> list[Text]:
        if self.kept is None:
            return self._asked(chats, prepared)

        def ask(places: list[int]) -> list[Text]:
            part = None if prepared is None else take(prepared, np.array(places, np.int64))
            return self._asked([chats[place] for place in places], part)

        return self.kept.texts([json.dumps(chat, ensure_ascii=False) for chat in chats], self.arguments, ask)

    def _asked(self, chats: Sequence[Messages], prepared: Block | None) -> list[Text]:
        if prepared is None:
            prepared = self.handler.prepare(list(chats))
        if not self.handler.self_batching:
            return self._compute(prepared)
        return [text for place in range(len(chats)) for text in self._alone(_one(prepared, place))]

    def _alone(self, prepared: Block) -> list[Text]:
        try:
            return self._compute(prepared)
        except IncompleteAnswer as error:
            if error.may_pass:
                raise
            return [error]  # The same prompt gets the same answer.

    def _compute(self, prepared: Block) -> list[Text]:
        handler = self.handler
        if isinstance(self.model, ContinuousModel) and handler.submits(self.arguments):
            outcomes = outcomes_of(self.model, rows(prepared), self.arguments)
            return [text for each in outcomes for text in self._collected(each)]
        outputs = handler.predict(self.model, handler.transfer(handler.collate(prepared)), self.arguments)
        handler.wait(outputs)
        return self._read_texts(outputs)

    def _collected(self, outcome: Any) -> list[Text]:
        """Return the text of one example of a model that takes them as they come, or its error."""
        if isinstance(outcome, ModelDied):
            raise outcome
        return [outcome] if isinstance(outcome, Exception) else self._read_texts([outcome])

    def _read_texts(self, outputs: Any) -> list[Text]:
        handler = self.handler
        found = handler.collect(outputs)
        values, errors = (found.values, found.errors) if isinstance(found, PartlyFailed) else (found, {})
        return [errors.get(place) or _text_of(each, handler) for place, each in enumerate(rows(values))]


@dataclass(frozen=True)
class _Unreadable:
    text: str
    reason: str

    def answered(self) -> Answered:
        """Return the error of the row, with the text that came."""
        shown = shorten(self.text, _SHOWN_TEXT)
        fix = "ask for less in one prompt, add examples=, or use a larger model"
        return Answered(error=AnswerError(f"the model answered {shown!r}: {self.reason}", fix=fix), size=len(shown))


def _complaint(unreadable: Any) -> Messages:
    """Return the messages that ask again, with the text that came and the reason why it is no answer."""
    asking = f"This is not a valid answer: {unreadable.reason}. Answer again, correctly."
    said = [("assistant", unreadable.text), ("user", asking)]
    # What UTF-8 can't hold can be in no prompt.
    return [{"role": role, "content": text.encode("utf-8", "replace").decode()} for role, text in said]


def _one(prepared: Block, place: int) -> Block:
    return prepared[place : place + 1]


def _text_of(value: Any, handler: Any) -> str:
    text = value.inference if isinstance(value, PredictionResult) else value
    if not isinstance(text, str):
        raise HandlerError(
            f"found an answer of type {type(text).__name__} from {handler}, expected a text",
            fix="use a TextGenerator, HttpModelHandler.chat or another handler that returns texts",
        )
    return text


class KnownAnswers:
    """Remembers the answers to the prompts that one model got in this process, the newest ones.

    Any thread may call it. A prompt that another thread asks at the same time is not asked, but waited for.
    """

    def __init__(self, most: int = _MOST_ANSWERS, most_characters: int = _MOST_CHARACTERS) -> None:
        self._most = most
        self._most_characters = most_characters
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._characters = 0

    def answers(self, keys: Sequence[bytes], ask: Callable[[list[int]], list[Answered]]) -> list[Answered]:
        """Return the answer to each prompt; ``ask`` gets the places of those that nobody has asked yet.

        Raises what ``ask`` raises; another thread that waits for the same prompt then asks itself.
        """
        first: dict[bytes, int] = {}
        for place, key in enumerate(keys):
            first.setdefault(key, place)
        found: dict[bytes, Answered] = {}
        asked = 0
        while left := [key for key in first if key not in found]:
            mine, others = self._claim(left)
            asked += len(mine)
            found |= self._ask(mine, [first[key] for key in mine], ask)
            for key, entry in others.items():
                if not entry.wait():
                    self._forget({key: entry})
                elif entry.answered is not None:
                    found[key] = entry.answered
        note(InferenceMetrics.REPEATED_PROMPTS, len(keys) - asked)
        return [found[key] for key in keys]

    def _claim(self, keys: Sequence[bytes]) -> tuple[dict[bytes, _Entry], dict[bytes, _Entry]]:
        """Return the entries of prompts that the caller must ask, and those that are known or asked by others."""
        mine, others = dict[bytes, _Entry](), dict[bytes, _Entry]()
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is None:
                    mine[key] = self._entries[key] = _Entry()
                else:
                    others[key] = entry
                    self._entries.move_to_end(key)
        return mine, others

    def _ask(
        self, mine: dict[bytes, _Entry], places: list[int], ask: Callable[[list[int]], list[Answered]]
    ) -> dict[bytes, Answered]:
        if not mine:
            return {}
        try:
            found = dict(zip(mine, ask(places), strict=True))
            with self._lock:
                for key, entry in mine.items():
                    entry.answered = found[key]
                    # A thread that waited too long may have forgotten the entry, and may ask itself.
                    if self._entries.setdefault(key, entry) is entry:
                        self._characters += found[key].size
                self._shrink()
            return found
        except BaseException:
            self._forget(mine)
            raise
        finally:
            for entry in mine.values():
                entry.settled.set()

    def _forget(self, entries: Mapping[bytes, _Entry]) -> None:
        with self._lock:
            for key, entry in entries.items():
                if self._entries.get(key) is entry and entry.answered is None:
                    del self._entries[key]

    def _shrink(self) -> None:
        """Forget the answers that were used least recently; the caller holds the lock."""
        for key in list(self._entries):
            if len(self._entries) <= self._most and self._characters <= self._most_characters:
                return
            answered = self._entries[key].answered
            if answered is not None:
                self._characters -= answered.size
                del self._entries[key]


@dataclass(eq=False)
class _Entry:
    settled: threading.Event = field(default_factory=threading.Event)
    answered: Answered | None = None
    owner: threading.Thread = field(default_factory=threading.current_thread)

    def wait(self) -> bool:
        """Wait until the thread that asks has an answer or has failed; return False if it seems to hang."""
        for _ in range(_MOST_WAITS):
            if self.settled.wait(_WAIT_S):
                return True
            if not self.owner.is_alive():
                break
        return self.settled.is_set()
