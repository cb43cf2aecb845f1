"""Text in, vectors out on one accelerator: the encoder alone, tokenising alone, sentence-transformers."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import _measure
import numpy as np
from _texts import LONGEST, MODEL, WORKLOADS, texts

_CORES = len(os.sched_getaffinity(0))
_BUDGETS = (65_536, 131_072, 524_288)  # tokens in a batch of the encoder alone
_BATCH_SIZES = (32, 256, 1024)  # of sentence-transformers
_ENCODED_AT_ONCE = 8192  # rows in a call of sentence-transformers, which sorts them by length
_SECONDS = 1.0  # to repeat each measurement
_TOKENISED_AT_ONCE = 1000


def bare_encoder() -> dict[str, float]:
    """Rows per second of the encoder alone: token ids lie on the device, sorted by length, and vectors stay there."""
    import torch
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(MODEL, dtype=torch.bfloat16).to("cuda").eval()

    def rate(ids: list[list[int]], budget: int) -> float:
        batches = [_on_device(batch) for batch in _batches(ids, budget)]
        return _rate(len(ids), lambda: _encode_all(encoder, batches))

    def best_rate(workload: str) -> float:
        ids = _token_ids(texts(workload, _rows(workload, tokens=4_000_000)))
        return max(rate(ids, budget) for budget in _BUDGETS)

    return {workload: best_rate(workload) for workload in WORKLOADS}


def _encode_all(encoder: Any, batches: list[tuple[Any, Any]]) -> None:
    import torch

    with torch.inference_mode():
        for ids, mask in batches:
            states = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
            if mask is None:
                pooled = states.mean(1)
            else:
                pooled = (states * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
            torch.nn.functional.normalize(pooled, dim=1)
    torch.cuda.synchronize()


def _batches(ids: list[list[int]], budget: int) -> Iterator[list[list[int]]]:
    """Longest first, each as many as fit into the budget when all are padded to the first."""
    ordered = sorted(ids, key=len, reverse=True)
    start = 0
    while start < len(ordered):
        end = start + max(1, budget // len(ordered[start]))
        yield ordered[start:end]
        start = end


def _on_device(batch: list[list[int]]) -> tuple[Any, Any]:
    """The ids and, where any are padding, the mask."""
    import torch

    lengths = np.array([len(ids) for ids in batch])
    mask = np.arange(lengths[0]) < lengths[:, None]
    padded = np.zeros(mask.shape, dtype=np.int64)
    padded[mask] = np.concatenate(batch)
    return torch.from_numpy(padded).to("cuda"), None if mask.all() else torch.from_numpy(mask).to("cuda")


def tokenising() -> dict[str, float]:
    """Rows per second of tokenising alone, one process a core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # no threads of their own in the processes
    with multiprocessing.get_context("spawn").Pool(_CORES) as pool:

        def rate(workload: str) -> float:
            rows = _rows(workload, tokens=1_000_000)
            rates = pool.starmap(_tokenising_rate, [(workload, rows, seed) for seed in range(_CORES)], chunksize=1)
            return sum(rates)

        pool.map(_token_ids, [["warm", "up"]] * _CORES, chunksize=1)
        return {workload: rate(workload) for workload in WORKLOADS}


def _tokenising_rate(workload: str, rows: int, seed: int) -> float:
    batch = texts(workload, rows, seed)
    start_s = time.perf_counter()
    _token_ids(batch)
    return rows / (time.perf_counter() - start_s)


def _token_ids(batch: list[str]) -> list[list[int]]:
    tokenizer = _tokenizer()
    parts = (batch[start : start + _TOKENISED_AT_ONCE] for start in range(0, len(batch), _TOKENISED_AT_ONCE))
    return [encoding.ids for part in parts for encoding in tokenizer.encode_batch_fast(part)]


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    return tokenizer


def sentence_transformers() -> dict[str, float]:
    """Rows per second of the usual way, in the same precision, with the best of some batch sizes."""
    import torch
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(MODEL), device="cuda", model_kwargs={"dtype": torch.bfloat16})

    def rate(batch: list[str], batch_size: int) -> float:
        return _rate(len(batch), lambda: encoder.encode(batch, batch_size=batch_size, show_progress_bar=False))

    def best_rate(workload: str) -> float:
        batch = texts(workload, _ENCODED_AT_ONCE)
        return max(rate(batch, batch_size) for batch_size in _BATCH_SIZES)

    return {workload: best_rate(workload) for workload in WORKLOADS}


def _rows(workload: str, tokens: int) -> int:
    """About so many rows have so many tokens."""
    return int(tokens / WORKLOADS[workload](np.random.default_rng(0), 10_000).mean())


def _rate(rows: int, encode: Callable[[], Any]) -> float:
    """Rows per second of the best pass in some seconds, after a first that does not count."""
    encode()
    passes: list[float] = []
    while sum(passes) < _SECONDS:
        start_s = time.perf_counter()
        encode()
        passes.append(time.perf_counter() - start_s)
    return rows / min(passes)


def report(results: _measure.Results) -> None:
    print("rows per second")
    _measure.print_table(results)


def main() -> None:
    import torch

    if not torch.cuda.is_available():
        print("Nothing is measured: torch finds no CUDA device here.")
        return
    sides: dict[str, _measure.Side] = {
        "bare encoder": bare_encoder,
        "tokenising": tokenising,
        "sentence-transformers": sentence_transformers,
    }
    _measure.main(sides, report)


if __name__ == "__main__":
    main()
