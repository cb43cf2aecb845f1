"""Text in, vectors out on one accelerator: the encoder alone, tokenising alone, sentence-transformers, a pipeline."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import _measure
import apache_beam as beam
import numpy as np
from _counters import print_counters
from _texts import LONGEST, MODEL, WORKLOADS, Texts
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import LuminosityRunner, RunInference
from luminosity.inference.handlers.text.embedder import SentenceEmbedder

_CORES = len(os.sched_getaffinity(0))
_BUDGETS = (65_536, 131_072, 524_288)  # tokens in a batch of the encoder alone
_BATCH_SIZES = (32, 256, 1024)  # of sentence-transformers
_ENCODED_AT_ONCE = 8192  # rows in a call of sentence-transformers, which sorts them by length
_SECONDS = 1.0  # to repeat each measurement
_TOKENISED_AT_ONCE = 1000
_ROWS_PER_SHARD = 4096
_PIPELINE_ROWS = {"32 tokens": 2_500_000, "128 tokens": 1_000_000, "skewed": 2_000_000}


def bare_encoder() -> dict[str, float]:
    """Rows per second of the encoder alone: token ids lie on the device, sorted by length, and vectors stay there."""
    import torch
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(MODEL, dtype=torch.bfloat16).to("cuda").eval()

    def rate(ids: list[list[int]], budget: int) -> float:
        batches = [_on_device(batch) for batch in _batches(ids, budget)]
        return _rate(len(ids), lambda: _encode_all(encoder, batches))

    def best_rate(workload: str) -> float:
        ids = _token_ids(_texts().make(workload, _rows(workload, tokens=4_000_000)))
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
    texts = _texts()
    with multiprocessing.get_context("spawn").Pool(_CORES) as pool:

        def rate(workload: str) -> float:
            rows = _rows(workload, tokens=1_000_000)
            batches = [texts.make(workload, rows, seed) for seed in range(_CORES)]
            return sum(pool.map(_tokenising_rate, batches, chunksize=1))

        pool.map(_token_ids, [["warm", "up"]] * _CORES, chunksize=1)
        return {workload: rate(workload) for workload in WORKLOADS}


def _tokenising_rate(batch: list[str]) -> float:
    start_s = time.perf_counter()
    _token_ids(batch)
    return len(batch) / (time.perf_counter() - start_s)


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


@cache
def _texts() -> Texts:
    return Texts.read(_tokenizer())


def sentence_transformers() -> dict[str, float]:
    """Rows per second of the usual way, in the same precision, with the best of some batch sizes."""
    import torch
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(MODEL), device="cuda", model_kwargs={"dtype": torch.bfloat16})

    def rate(batch: list[str], batch_size: int) -> float:
        return _rate(len(batch), lambda: encoder.encode(batch, batch_size=batch_size, show_progress_bar=False))

    def best_rate(workload: str) -> float:
        batch = _texts().make(workload, _ENCODED_AT_ONCE)
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


def pipeline() -> dict[str, float]:
    """Rows per second of texts that are read, tokenised, encoded and counted on all cores and the device.

    The rate without start-up is that of the rows that a long run has beyond a short one, in the time that it takes
    beyond it: processes, imports, CUDA and the load of the model are in both.
    """
    shards = _CORES
    _run("32 tokens", shards, rows_per_shard=16)  # What is done once per process, such as imports, does not count.
    rates: dict[str, float] = {}
    for workload, rows in _PIPELINE_ROWS.items():
        start_up_s = _run(workload, shards, rows_per_shard=16)
        seconds = _run(workload, rows // _ROWS_PER_SHARD, _ROWS_PER_SHARD)
        rows = rows // _ROWS_PER_SHARD * _ROWS_PER_SHARD
        rates[workload] = (rows - 16 * shards) / (seconds - start_up_s)
        rates[f"{workload}, whole"] = rows / seconds
        rates[f"{workload}, start-up"] = start_up_s
    return rates


def _run(workload: str, shards: int, rows_per_shard: int) -> float:
    make, dimension = _texts().make, 384
    embed = RunInference(SentenceEmbedder(str(MODEL), dtype="bfloat16"))
    built = beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off"]))
    vectors = (
        built
        | beam.Create(range(shards))
        | beam.Reshuffle()
        | "Texts" >> beam.FlatMap(lambda seed: make(workload, rows_per_shard, seed))
        | "Embed" >> embed.with_resource_hints(accelerator="type:any;count:1")
        | "Dimension" >> beam.Map(lambda result: len(result.inference))
    )
    _measure.check_count_and_sum(vectors, shards * rows_per_shard, shards * rows_per_shard * dimension)
    start_s = time.perf_counter()
    result = built.run()
    result.wait_until_finish()
    seconds = time.perf_counter() - start_s
    print_counters(f"{workload}, {shards * rows_per_shard:,} rows, {seconds:.1f} s", result.metrics())
    return seconds


def report(results: _measure.Results) -> None:
    ours = results["Luminosity"]
    print("rows per second; Luminosity's are those of a long run beyond a short one, so without start-up")
    _measure.print_table({side: {name: rates[name] for name in WORKLOADS} for side, rates in results.items()})
    for workload in WORKLOADS:
        rate, whole, start_up = ours[workload], ours[f"{workload}, whole"], ours[f"{workload}, start-up"]
        others = results["sentence-transformers"][workload]
        bare = results["bare encoder"][workload]
        print(
            f"{workload}: with its start-up ({start_up:.1f} s) {whole:,.0f} rows per second, {whole / bare:.2f} of bare"
        )
        _measure.print_figure(f"{workload}: share of the bare encoder", rate / bare, at_least=0.5)
        _measure.print_figure(f"{workload}: times sentence-transformers", rate / others, at_least=8)


def main() -> None:
    import torch

    if not torch.cuda.is_available():
        print("Nothing is measured: torch finds no CUDA device here.")
        return
    sides: dict[str, _measure.Side] = {
        "bare encoder": bare_encoder,
        "tokenising": tokenising,
        "sentence-transformers": sentence_transformers,
        "Luminosity": pipeline,
    }
    _measure.main(sides, report)
