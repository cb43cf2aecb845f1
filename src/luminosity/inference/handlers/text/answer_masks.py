"""Masks of the tokens that a model may write next, so that its answer has a format."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from copy import copy
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from luminosity.errors import InvalidArgument
from luminosity.extras import require
from luminosity.inference.answer_format import AnswerFormat

__all__ = ["AnswerMasks", "AnswerMatcher", "Mask", "check_answer_format", "logits_processor", "masks_of"]

Mask = npt.NDArray[np.int32]
"""A bit for each token of the vocabulary, 32 in a number, the lowest first; 1 allows the token."""

_EXTRA = "prompts"
_BITS = 32
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Spaces as ``json.dumps`` writes them: small models that may write any number of spaces write nothing else."""
_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~ ")  # in a regular expression, with a backslash
_MOST_NUMBER = {"integer": 10**18 - 1, "number": 10**15}
"""Numbers fit into 64 bits, and a model that writes digits comes to an end."""
_DAY = (
    r"[12][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    r"|[12][0-9](0[48]|[2468][048]|[13579][26])-02-29|2000-02-29"
)
_DATES = {"date": _DAY, "date-time": f"({_DAY})T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z"}
_MOST_KEPT = 32  # compiled formats in a process: a pipeline has a few


class AnswerMatcher:
    """Follows the tokens of one answer."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._is_broken = False

    def fill(self, mask: Mask) -> None:
        """Set the bits of the tokens that may come next in one row of a mask, in place. The row is contiguous."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def accept(self, token: int) -> None:
        """Go on to the state after this token. One that the format does not allow ends the answer: it is incomplete.

        Such a token comes when something else ends the answer, such as a stop string, and padding follows.
        """
        if not self.stopped:
            self._is_broken = self._matcher.try_consume_tokens([token]) != 1  # `consume_token` prints a warning

    @property
    def stopped(self) -> bool:
        """Whether the answer has ended: no other token can follow."""
        return self._is_broken or self._matcher.is_stopped()

    @property
    def complete(self) -> bool:
        """Whether the tokens so far are a whole answer."""
        return not self._is_broken and self._matcher.is_accepting() and not self._matcher.is_error()


class AnswerMasks:
    """An answer format, compiled for the vocabulary of one tokenizer. Any thread may use it.

    Args:
        tokenizer: a fast tokenizer of transformers, or a ``PlainTokenizer``.
        answer_format: what an answer may be.
        vocabulary: the number of tokens for which the model computes scores.
        ends: the tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, answer_format: AnswerFormat, vocabulary: int, ends: Sequence[int]) -> None:
        library = require("llguidance", _EXTRA)
        check_answer_format(answer_format)
        if not ends:
            raise InvalidArgument(
                "the model has no token that ends a text, which an answer with a format needs",
                fix="pass generation_args={'eos_token_id': ...}",
            )
        self._vocabulary = vocabulary
        try:
            tokens = library.LLTokenizer(_rules_of(tokenizer), n_vocab=vocabulary, eos_token=list(ends))
        except ValueError as error:
            raise InvalidArgument(
                f"the tokenizer {type(tokenizer).__name__} can't be limited to an answer format: {error}",
                fix="use a model whose tokenizer works on bytes (BPE or SentencePiece)",
            ) from None
        self._first = library.LLMatcher(tokens, _grammar(answer_format))
        if self._first.is_error():
            raise InvalidArgument(f"the answer format can't be used with this model: {self._first.get_error()}")

    def matcher(self) -> AnswerMatcher:
        """Return a new matcher, for one answer."""
        return AnswerMatcher(self._first.deep_copy())

    def mask(self, rows: int) -> Mask:
        """Return masks for ``rows`` answers, which allow everything."""
        return np.full((rows, -(-self._vocabulary // _BITS)), -1, np.int32)

    def is_complete(self, tokens: Sequence[int]) -> bool:
        """Return whether these tokens are a whole answer: one that was cut is not."""
        matcher = self.matcher()
        for token in tokens:
            if matcher.stopped:
                break
            matcher.accept(token)
        return matcher.complete


def _rules_of(tokenizer: Any) -> str:
    """Return what a tokenizer does, as its file says it. Raises ``ValueError`` for one without such a file."""
    if not tokenizer.is_fast:
        raise ValueError("it is not a fast tokenizer")
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return backend.to_str()


def check_answer_format(answer_format: AnswerFormat) -> None:
    """Raise ``InvalidArgument`` if models in the process can't be limited to a format, before any is loaded."""
    matcher = require("llguidance", _EXTRA).LLMatcher
    problem = matcher.validate_grammar(_grammar(answer_format))
    if problem and not problem.startswith("WARNING"):
        reason = " ".join(problem.split())
        raise InvalidArgument(
            f"models in the process can't be limited to this {answer_format.kind.replace('_', ' ')}: {reason}",
            fix="write a simpler one: without look-around, back references and the keywords that are named above",
        )


def _grammar(answer_format: AnswerFormat) -> str:
    matcher = require("llguidance", _EXTRA).LLMatcher
    if answer_format.kind == "json_schema":
        return matcher.grammar_from_json_schema(json.dumps(_narrowed(answer_format.json_schema)), overrides=_COMPACT)
    if answer_format.kind == "regex":
        return matcher.grammar_from_regex(answer_format.text)
    return matcher.grammar_from_regex("|".join(map(_escaped, answer_format.choices)))


def _narrowed(schema: Any) -> Any:
    """Return a schema whose numbers fit into a column and have an end, and whose dates are in the calendar.

    >>> _narrowed({"type": "integer", "minimum": 0})
    {'type': 'integer', 'minimum': 0, 'maximum': 999999999999999999}
    """
    if isinstance(schema, list):
        return [_narrowed(each) for each in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    given = cast("dict[str, Any]", schema)
    if given.get("type") in ("integer", "number") and "enum" not in given:
        most = _MOST_NUMBER[given["type"]]
        bounds = {"minimum": ("exclusiveMinimum", -most), "maximum": ("exclusiveMaximum", most)}
        added = {name: value for name, (other, value) in bounds.items() if name not in given and other not in given}
        return {**given, **added}
    if given.get("type") == "string" and given.get("format") in _DATES:
        return {"type": "string", "pattern": f"^({_DATES[given['format']]})$"}
    return {name: value if name == "enum" else _narrowed(value) for name, value in given.items()}


def _escaped(text: str) -> str:
    r"""Return a regular expression for just this text.

    >>> _escaped("a+b")
    'a\\+b'
    """
    return "".join(f"\\{each}" if each in _SPECIAL else each for each in text)


_kept: OrderedDict[Any, tuple[Any, AnswerMasks]] = OrderedDict()
_lock = threading.Lock()


def masks_of(tokenizer: Any, answer_format: AnswerFormat, vocabulary: int, ends: Collection[int]) -> AnswerMasks:
    """Return the compiled format; it is compiled once for each tokenizer in this process."""
    key = id(tokenizer), answer_format, vocabulary, tuple(sorted(ends))
    with _lock:
        if key not in _kept:
            # The tokenizer is kept, too: its id is not given to another one.
            _kept[key] = tokenizer, AnswerMasks(tokenizer, answer_format, vocabulary, sorted(ends))
        _kept.move_to_end(key)
        while len(_kept) > _MOST_KEPT:
            _kept.popitem(last=False)
        return _kept[key][1]


def logits_processor(masks: AnswerMasks, ends: Collection[int], width: int) -> Any:
    """Return a ``LogitsProcessor`` of transformers for one call of ``generate`` on prompts of ``width`` tokens."""
    torch = require("torch", "torch")
    matchers: list[AnswerMatcher] = []
    first_end = min(ends)

    def process(input_ids: Any, scores: Any) -> Any:
        count = len(input_ids)
        if not matchers:
            matchers.extend(masks.matcher() for _ in range(count))
        elif input_ids.shape[1] > width:
            for matcher, token in zip(matchers, input_ids[:, -1].tolist(), strict=True):
                matcher.accept(token)
        mask = masks.mask(count)
        for matcher, row in zip(matchers, mask, strict=True):
            if matcher.stopped:  # The row is done; whatever follows its end is replaced by padding.
                row[:] = 0
                row[first_end // _BITS] = np.uint32(1 << (first_end % _BITS)).astype(np.int32)
            else:
                matcher.fill(row)
        bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, : scores.shape[1]]
        allowed = torch.from_numpy(bits).to(scores.device).bool()
        return scores.masked_fill(~allowed, -torch.inf)

    return process
