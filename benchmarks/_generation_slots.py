"""A language model in slots: behind a pipeline, and with prompts that begin alike."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from _accelerator_models import is_small
from _accelerator_run import run
from _generation_models import handler, requests, shape_of, text_of
from _measure import Figure, print_figures

from luminosity.core import InferenceMetrics
from luminosity.inference.continuous import answers_of

__all__ = ["prefix", "slots"]

_REQUESTS, _PER_SHARD = (32, 8) if is_small() else (3_000, 375)
_ROWS, _SHARED, _NEW = (16, 80, 4) if is_small() else (1_000, 500, 16)


def slots() -> None:
    """Print the useful tokens a second of requests through a pipeline."""
    found = run({"Generate": handler()}, requests, _REQUESTS, _PER_SHARD)
    tokens = found.counter(InferenceMetrics.NEW_TOKENS)
    busy_s = found.counter(InferenceMetrics.DEVICE_BUSY) / 1e6
    expected = sum(
        each["max_new_tokens"] for seed in range(_REQUESTS // _PER_SHARD) for each in requests(_PER_SHARD, seed)
    )
    if tokens != expected:
        raise ValueError(f"{tokens} new tokens, of {expected}")
    bar = None if is_small() else 15_000
    note = f"{found.rows:,} requests, {tokens:,} new tokens; {found.said}"
    print_figures(
        [
            Figure("useful tokens/s while there are requests", tokens / busy_s, at_least=bar, note=note),
            Figure("useful tokens/s after the first answer", tokens / (found.done_s - found.first_s)),
            Figure("seconds to the first answer", found.first_s),
            Figure("seconds of the whole run", found.whole_s),
        ]
    )


def prefix() -> None:
    """Print how much faster prompts are answered whose first tokens are computed once."""
    generator = np.random.default_rng(0)
    words = shape_of("1b")["vocab_size"]
    before = text_of(generator.integers(0, words, _SHARED))
    lengths = generator.integers(20, 60, _ROWS).tolist()
    prompts = [f"{before} {text_of(generator.integers(0, words, length))}" for length in lengths]
    passes: dict[bool, float] = {}
    answers: dict[bool, list[list[int]]] = {}
    for shares in (False, True):
        passes[shares], answers[shares] = _answered(shares, prompts)
    equal = np.mean([one == other for one, other in zip(answers[False], answers[True], strict=True)])
    note = f"{_ROWS} prompts that share {_SHARED} tokens, {_NEW} new tokens each; {equal:.0%} of the answers are equal"
    print_figures(
        [
            Figure("rows/s, each prompt whole", _ROWS / passes[False]),
            Figure("rows/s, shared tokens once", _ROWS / passes[True]),
            Figure("ratio", passes[False] / passes[True], at_least=None if is_small() else 2, note=note),
        ]
    )


def _answered(shares: bool, prompts: list[str]) -> tuple[float, list[list[int]]]:
    made = handler()
    made.shares_prefixes = shares
    model: Any = made.load_model()
    try:
        prepared = made.prepare(prompts).to_pylist()
        arguments = {"max_new_tokens": _NEW}
        answers_of(model, prepared[:8], arguments)  # libraries prepare themselves
        begun = time.perf_counter()
        answers = answers_of(model, prepared, arguments)
        return time.perf_counter() - begun, [answer.tokens for answer in answers]
    finally:
        model.close()
