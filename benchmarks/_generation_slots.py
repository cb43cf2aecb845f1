"""A language model in slots: behind a pipeline, and with prompts that begin alike."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from _accelerator_models import is_small
from _accelerator_run import run
from _generation_models import handler, requests, shape_of, text_of
from _measure import Figure, print_figures

from luminosity.core import InferenceMetrics
from luminosity.inference.continuous import answers_of

__all__ = ["prefix", "slots", "start"]

_REQUESTS, _PER_SHARD = (32, 8) if is_small() else (3_000, 375)
_FIRST = 8 if is_small() else 64  # requests, of which the first answer counts
_FIRST_S = 10.0  # what workers, torch, the weights and the first steps take
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


class _Timer:
    """Sums up how long the methods of the slots take, with the device's work."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def watch(self, kind: type, name: str) -> None:
        """Measure the calls of a method from now on."""
        import torch

        method = getattr(kind, name)

        def measured(*arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun
                self.calls[name] = self.calls.get(name, 0) + 1

        setattr(kind, name, measured)

    def __str__(self) -> str:
        return ", ".join(f"{name} {self.calls[name]} times, {each:.2f} s" for name, each in self.seconds.items())


def start() -> None:
    """Print how long a pipeline takes to its first answer, and each part of a start in this fresh process."""
    found = run({"Generate": handler()}, requests, _FIRST, _FIRST)
    bar = None if is_small() else _FIRST_S
    note = f"of {_FIRST} requests through a pipeline, whose processes start with it; {found.said}"
    figures = [Figure("seconds to the first answer", found.first_s, at_most=bar, note=note)]

    def timed(what: str, work: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        result = work()
        figures.append(Figure(f"seconds: {what}", time.perf_counter() - begun))
        return result

    torch = timed("import torch", lambda: importlib.import_module("torch"))
    made = handler()
    timed("tokenizer", lambda: made.tokenizer.limit)
    timed("the first use of the device", lambda: torch.zeros(1, device=made.device).sum().item())
    timer = _Timer()
    choice = importlib.import_module("luminosity.inference.handlers.text.slots.choice")
    device_slots = importlib.import_module("luminosity.inference.handlers.text.slots.device_slots")
    timer.watch(choice.DecoderWeights, "load")
    timer.watch(choice, "_is_same")  # pyright: ignore[reportArgumentType]
    timer.watch(device_slots.Slots, "_record")
    model = timed("load_model", made.load_model)
    figures[-1] = figures[-1]._replace(note=str(timer))
    timed("warm_up", lambda: made.warm_up(model))
    model.close()
    figures.append(Figure("transformers is imported (0: no)", float("transformers" in sys.modules), at_most=0))
    timed("for comparison: import transformers", lambda: importlib.import_module("transformers").AutoTokenizer)
    print_figures(figures)


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
        seconds = time.perf_counter() - begun
        kind = type(model.slots)
        timer = _Timer()
        methods = {name: getattr(kind, name) for name in ("read", "steps", "prefix_of")}
        for name in methods:
            timer.watch(kind, name)
        answers_of(model, prepared, arguments)
        for name, method in methods.items():
            setattr(kind, name, method)
        print(f"shared tokens {'once' if shares else 'each time'}: {timer}")
        return seconds, [answer.tokens for answer in answers]
    finally:
        model.close()
