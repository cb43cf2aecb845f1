"""What transformers does with the same requests: in batches, by its own continuous batching, and one by one."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from _accelerator_models import be_quiet, has_cuda, is_small
from _generation_models import handler, ids_of, path_of, requests
from _measure import Figure, print_figures

from luminosity.inference.continuous import answers_of

__all__ = ["batches", "continuous", "equality"]

_BATCH, _BATCHED = (4, 8) if is_small() else (128, 256)
_CONTINUOUS = 8 if is_small() else 512
_COMPARED, _COMPARED_TOKENS = (6, 8) if is_small() else (48, 32)
_PATIENCE_S = 60.0


def _model(name: str, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    be_quiet()
    model: Any = AutoModelForCausalLM.from_pretrained(path_of(name), dtype=getattr(torch, dtype))
    return model.to("cuda" if has_cuda() else "cpu").eval()


def _dtype() -> str:
    return "bfloat16" if has_cuda() else "float32"


def batches() -> None:
    """Print the useful tokens a second of batches in which all rows wait for the longest."""
    import torch

    model, asked = _model("1b", _dtype()), requests(_BATCHED, 0)

    def generate(part: list[dict[str, Any]]) -> None:
        rows = [ids_of(each["prompt"]) for each in part]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
        limit = max(each["max_new_tokens"] for each in part)
        model.generate(ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, pad_token_id=0)

    with torch.inference_mode():
        generate([{**each, "max_new_tokens": 4} for each in asked[:_BATCH]])
        begun = time.perf_counter()
        for start in range(0, len(asked), _BATCH):
            generate(asked[start : start + _BATCH])
        seconds = time.perf_counter() - begun
    tokens = sum(each["max_new_tokens"] for each in asked)
    note = f"{len(asked)} requests in batches of {_BATCH}, {tokens:,} new tokens"
    print_figures([Figure("useful tokens/s, `generate` of transformers", tokens / seconds, note=note)])


def continuous() -> None:
    """Print the useful tokens a second of transformers' own continuous batching."""
    what = "useful tokens/s, continuous batching of transformers"
    if not has_cuda():
        print_figures([Figure(what, None, note="needs a CUDA device")])
        return
    from transformers import GenerationConfig

    model, asked = _model("1b", _dtype()), requests(_CONTINUOUS, 0)
    settings = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=-1, max_new_tokens=512)
    manager = model.init_continuous_batching(generation_config=settings)
    manager.start()
    try:
        _finish(manager, [{**each, "max_new_tokens": 8} for each in asked[:16]])
        begun = time.perf_counter()
        tokens = _finish(manager, asked)
        seconds = time.perf_counter() - begun
    finally:
        manager.stop(block=True, timeout=5)
    note = f"{len(asked)} requests, {tokens:,} new tokens"
    print_figures([Figure(what, tokens / seconds, note=note)])


def _finish(manager: Any, asked: list[dict[str, Any]]) -> int:
    """Have all requests answered, and return the number of new tokens."""
    for each in asked:
        manager.add_request(ids_of(each["prompt"]), max_new_tokens=each["max_new_tokens"])
    done = tokens = 0
    until = time.monotonic() + _PATIENCE_S
    while done < len(asked):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            done += 1
            tokens += len(result.generated_tokens)
        if time.monotonic() > until:
            raise TimeoutError(f"{done} of {len(asked)} requests were done after {_PATIENCE_S:.0f} s")
    return tokens


def equality() -> None:
    """Print which share of answers is the same as that of `generate` one by one."""
    figures: list[Figure] = []
    for dtype in ("float32", "bfloat16") if has_cuda() else ("float32",):
        share, begin = _equal_share(dtype)
        bar = 1.0 if dtype == "float32" else None
        note = f"{begin:.1f} of {_COMPARED_TOKENS} tokens are equal before the first difference"
        figures.append(Figure(f"{dtype}: share of equal answers", share, at_least=bar, note=note))
    print_figures(figures)


def _equal_share(dtype: str) -> tuple[float, float]:
    import torch

    rows = [ids_of(each["prompt"]) for each in requests(_COMPARED, 1)]
    words = 512 if is_small() else 32_000
    rows = [[token % words for token in row] for row in rows]
    rows[1::3] = [rows[0][:-8] + row[-12:] for row in rows[1::3]]  # some begin alike
    made = handler("equal", dtype)
    slots: Any = made.load_model()
    try:
        answers = answers_of(slots, rows, {"max_new_tokens": _COMPARED_TOKENS})
    finally:
        slots.close()
    model = _model("equal", dtype)
    same: list[int] = []
    with torch.inference_mode():
        for row, answer in zip(rows, answers, strict=True):
            ids = torch.tensor([row], device=model.device)
            mask = torch.ones_like(ids)
            found = model.generate(
                ids, attention_mask=mask, max_new_tokens=_COMPARED_TOKENS, do_sample=False, pad_token_id=0
            )
            expected = found[0, len(row) :].tolist()
            different = [
                place for place, pair in enumerate(zip(expected, answer.tokens, strict=True)) if len({*pair}) > 1
            ]
            same.append(different[0] if different else _COMPARED_TOKENS)
    return float(np.mean([each == _COMPARED_TOKENS for each in same])), float(np.mean(same))
