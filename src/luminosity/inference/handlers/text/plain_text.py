"""Messages whose content is text only: the special tokens of a model in it end no message and begin none."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from luminosity.inference.handlers.text.tokens import Lists, Tokenizer, list_array

__all__ = ["PlainTexts"]

_CUT = "\ue0c7\uf1d5\ue0c7"  # characters of private use that no text has; those in a text are removed


class PlainTexts:
    """Tokenises chats so that special tokens come from the chat template alone.

    A special token that is spelled in the content of a message is cut in two, and each part is tokenised as the text
    that it is. Every other text has exactly the tokens that the tokenizer makes of it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = sorted(filter(_is_long, map(str, tokenizer.whole.get_added_vocab())), key=len, reverse=True)
        # Looks ahead, so that each place where a token begins is found, also inside another one.
        self._begins = re.compile(f"(?=(?:{'|'.join(map(re.escape, added))}))", re.IGNORECASE) if added else None

    def marked(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the message with a mark inside each special token that its texts spell."""
        if self._begins is None:
            return message
        return {name: self._with_marks(value) for name, value in message.items()}

    def _with_marks(self, value: Any) -> Any:
        if isinstance(value, str):
            assert self._begins is not None
            text = value.replace(_CUT, "")
            places = [match.start() + 1 for match in self._begins.finditer(text)]
            if not places:
                return text
            ends = [*places, len(text)]
            return _CUT.join(text[start:end] for start, end in zip([0, *places], ends, strict=True))
        if isinstance(value, Mapping):
            return {name: self._with_marks(each) for name, each in value.items()}
        return [self._with_marks(each) for each in value] if isinstance(value, list) else value

    def ids(self, rendered: Sequence[str]) -> Lists:
        """Return the token ids of chats that the template has rendered from marked messages."""
        if not any(_CUT in text for text in rendered):
            return self._tokenizer.ids(rendered, special=False)
        lists = [list(chain.from_iterable(self._parts(text))) for text in rendered]
        limit = self._tokenizer.limit
        return list_array([ids if limit is None else ids[-limit:] for ids in lists], np.dtype(np.int32))

    def _parts(self, text: str) -> list[list[int]]:
        return self._tokenizer.ids(list(filter(None, text.split(_CUT))), special=False).to_pylist()


def _is_long(token: str) -> bool:
    return len(token) > 1  # one that is a single character can't be cut, and marks no role
