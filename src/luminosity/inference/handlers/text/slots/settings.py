"""What one row asks for: how many tokens, how they are chosen, where the text ends; and the answer to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from luminosity.inference.handlers.text.packed.families import Unfit

__all__ = ["Answer", "Matcher", "RowSettings", "defaults_of", "request_of", "settings_of"]

_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "assistant_early_exit": (0,),
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "diversity_penalty": (0.0,),
    "early_stopping": (False,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "guidance_scale": (1.0,),
    "length_penalty": (1.0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "min_p": (0.0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_logits": (False,),
    "output_scores": (False,),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "return_dict_in_generate": (False,),
    "suppress_tokens": ([],),
    "typical_p": (1.0,),
    "use_cache": (True,),
}
"""Arguments of transformers that change nothing with these values."""
_SAYS_NOTHING = {
    "_from_model_config",
    "bos_token_id",
    "max_length",
    "pad_token_id",
    "tokenizer",
    "transformers_version",
}
_ONLY_ASSISTED = ("assistant_", "num_assistant_", "target_lookbehind")  # settings of a second model, which none is
_DEFAULT_TOP_K = 50  # transformers' own, if sampling is asked for and neither the model nor the user says it


@dataclass(frozen=True)
class RowSettings:
    """The settings of a row."""

    limit: int
    """The most new tokens."""
    ends: frozenset[int]
    """The tokens that end a text."""
    is_sampled: bool = False
    temperature: float = 1.0
    top_k: int = 0
    """How many of the likeliest tokens are drawn from; 0 for all."""
    top_p: float = 1.0
    seed: int | None = None
    stops: tuple[str, ...] = ()
    """Texts that end a text."""
    penalty: float = 1.0
    """By which the scores of tokens are divided that the row has already; negative scores are multiplied."""


@dataclass(frozen=True)
class Answer:
    """The new tokens of a row."""

    tokens: list[int]
    prompt_tokens: int
    is_cut: bool
    """Whether the text ends because it may have no more tokens."""
    stops: tuple[str, ...] = ()
    """Texts of which one ends the text; empty if something else does."""
    is_of_slots: bool = True
    """Whether the slots have computed it, not transformers."""
    first_token_s: float | None = None
    """Seconds from the request to the first token; None if they are not known."""


def request_of(example: Any) -> tuple[Sequence[int], dict[str, Any]]:
    """Return the token ids of a prepared prompt, and its own arguments.

    >>> request_of([5, 6]), request_of({"ids": [5, 6], "arguments": '{"seed": 1}'})
    (([5, 6], {}), ([5, 6], {'seed': 1}))
    """
    if isinstance(example, Mapping):
        return example["ids"], json.loads(example["arguments"] or "{}")
    return example, {}


class Matcher(Protocol):
    """Tells which tokens may follow in one row; a grammar does so."""

    @property
    def stopped(self) -> bool:
        """Whether nothing may follow."""
        ...

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may follow: token 33 is bit 1 of the second number."""

    def accept(self, token: int) -> None:
        """Take the token that follows."""


def defaults_of(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments that a model's files set: ``generation_config.json``, else the ends of ``config.json``."""
    if generation is None:
        generation = {"eos_token_id": config.get("eos_token_id")}
    return {name: value for name, value in generation.items() if value is not None}


def settings_of(arguments: Mapping[str, Any]) -> RowSettings:
    """Return the settings that these arguments of ``generate`` mean. Raises ``Unfit`` if the slots don't know one.

    >>> settings_of({"max_new_tokens": 8, "eos_token_id": 2, "do_sample": True}).top_k
    50
    """
    left = {name: value for name, value in arguments.items() if value is not None and name not in _SAYS_NOTHING}
    try:
        limit, ends = int(left.pop("max_new_tokens")), left.pop("eos_token_id", [])
        is_sampled = bool(left.pop("do_sample", False))
        temperature, top_p = float(left.pop("temperature", 1.0)), float(left.pop("top_p", 1.0))
        top_k, seed = int(left.pop("top_k", _DEFAULT_TOP_K)), left.pop("seed", None)
        stops, penalty = left.pop("stop_strings", ()), float(left.pop("repetition_penalty", 1.0))
        ends = frozenset(int(end) for end in (ends if isinstance(ends, list | tuple) else [ends]))
    except (KeyError, TypeError, ValueError) as error:
        raise Unfit(f"the argument {error} is missing or of another type") from error
    for name, value in left.items():
        if not (value in _WITHOUT_EFFECT.get(name, ()) or name.startswith(_ONLY_ASSISTED)):
            raise Unfit(f"the slots don't know {name}={value!r}")
    if limit < 1 or penalty <= 0 or (is_sampled and (temperature <= 0 or not 0 < top_p <= 1 or top_k < 0)):
        raise Unfit("transformers explains what is wrong with an argument")
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    if not is_sampled:
        return RowSettings(limit, ends, stops=stops, penalty=penalty)
    seed = None if seed is None else int(seed)
    return RowSettings(limit, ends, True, temperature, top_k, top_p, seed, stops, penalty)
