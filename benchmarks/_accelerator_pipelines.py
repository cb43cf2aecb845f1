"""Pipelines with models of texts on one accelerator: embedders, several models, too little memory, a classifier.

A section runs its pipelines first. What they are compared with runs afterwards, in the section's own process, because
this process must not hold the device, nor have imported torch, while a pipeline starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from _accelerator_models import Texts, be_quiet, has_cuda, is_small, path_of
from _accelerator_run import Run
from _accelerator_run import run as run_pipeline
from _lengths import LONGEST
from _measure import Figure, print_figures

from luminosity import SentenceEmbedder, TextClassifier
from luminosity.core import InferenceMetrics

__all__ = ["best_rate", "classifier", "dtype_here", "out_of_memory", "pipeline", "three_models"]

_ROWS_PER_SHARD = 4096
_ROWS = {"32 tokens": 3_000_000, "128 tokens": 1_200_000, "skewed": 2_500_000}
_SMALL_ROWS, _SMALL_ROWS_PER_SHARD = 64, 16
_ALONE_ROWS = 16 if is_small() else 8192  # of the other side, which gets them at once
_BATCH_SIZES = (8,) if is_small() else (256, 1024)
_SECONDS = 0.2 if is_small() else 1.0  # to repeat the other side


def dtype_here() -> str | None:
    """Return the dtype of all models: half precision on a CUDA device, that of the files elsewhere."""
    return "bfloat16" if has_cuda() else None


@cache
def _texts() -> Texts:
    return Texts.random()


def _texts_of(workload: str) -> Callable[[int, int], list[str]]:
    make = _texts().make
    return lambda rows, seed: make(workload, rows, seed)


def _run_texts(handlers: Mapping[str, Any], workload: str, rows: int) -> Run:
    per_shard = _SMALL_ROWS_PER_SHARD if is_small() else _ROWS_PER_SHARD
    return run_pipeline(handlers, _texts_of(workload), _SMALL_ROWS if is_small() else rows, per_shard)


def best_rate(rows: int, call: Callable[[], Any]) -> float:
    """Return the rows per second of the best call, after a first that does not count."""
    call()
    passes: list[float] = []
    while sum(passes) < _SECONDS:
        start_s = time.perf_counter()
        call()
        passes.append(time.perf_counter() - start_s)
    return rows / min(passes)


# Sections.


def pipeline() -> None:
    """Print rows per second of texts that are read, tokenised, encoded and counted on all cores and the device."""
    _run_texts({"Embed": _small()}, "32 tokens", _ROWS_PER_SHARD)  # reads all libraries from the disk once
    runs = {workload: _run_texts({"Embed": _small()}, workload, rows) for workload, rows in _ROWS.items()}
    from _accelerator_encoder import bare_rates

    bare, others = bare_rates(), {workload: _best_of_others(workload) for workload in runs}
    figures: list[Figure] = []
    for workload, run in runs.items():
        rate, (name, other) = run.rate, others[workload]
        figures += [
            Figure(f"{workload}: rows/s after the first result", rate, note=f"{run.rows:,} rows; {run.said}"),
            Figure(f"{workload}: rows/s of the whole run", run.whole_rate, note=f"{run.whole_s:.1f} s"),
            Figure(f"{workload}: seconds to the first result", run.first_s, at_most=6),
            Figure(f"{workload}: share of the encoder alone", rate / bare[workload], at_least=0.85,
                   note=f"which does {bare[workload]:,.0f} rows/s"),
            Figure(f"{workload}: times {name}", rate / other, at_least=14, note=f"which does {other:,.0f} rows/s"),
        ]  # fmt: skip
    print_figures(figures)


def _small() -> Any:
    return SentenceEmbedder(path_of("small"), dtype=dtype_here())


def _best_of_others(workload: str) -> tuple[str, float]:
    """Return the usual way, and its rows per second with the best of some batch sizes."""
    texts = _texts().make(workload, _ALONE_ROWS)
    try:
        encode, name = _with_sentence_transformers(), "sentence-transformers"
    except ImportError:
        encode, name = _with_transformers("AutoModel", _mean), "transformers, sorted"
    return name, max(best_rate(len(texts), partial(encode, texts, size)) for size in _BATCH_SIZES)


@cache
def _with_sentence_transformers() -> Callable[[list[str], int], Any]:
    import torch
    from sentence_transformers import SentenceTransformer

    be_quiet()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kwargs = {"dtype": torch.bfloat16 if device == "cuda" else torch.float32}
    model = SentenceTransformer(path_of("small"), device=device, model_kwargs=kwargs)
    return lambda texts, size: model.encode(texts, batch_size=size, show_progress_bar=False)


def _with_transformers(kind: str, finish: Callable[[Any, Any], Any], folder: str = "small") -> Any:
    """Return a function that computes texts with transformers in batches of similar lengths."""
    import torch
    import transformers

    be_quiet()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = getattr(transformers, kind).from_pretrained(path_of(folder), dtype=dtype).to(device).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path_of(folder))

    def encode(texts: list[str], size: int) -> list[Any]:
        ids = tokenizer(texts, truncation=True, max_length=LONGEST)["input_ids"]
        order = sorted(range(len(ids)), key=lambda row: -len(ids[row]))
        found: list[Any] = []
        with torch.inference_mode():
            for start in range(0, len(order), size):
                part = {"input_ids": [ids[row] for row in order[start : start + size]]}
                batch = tokenizer.pad(part, return_tensors="pt").to(device)
                found.append(finish(model(**batch), batch["attention_mask"]).cpu())
        return found

    return encode


def _mean(output: Any, mask: Any) -> Any:
    mask = mask.unsqueeze(-1)
    return ((output.last_hidden_state * mask).sum(1) / mask.sum(1)).float()


def three_models() -> None:
    """Print the time of three models over the same texts in one run, beside the times of each alone."""
    handlers: dict[str, Callable[[], Any]] = {
        "small embedder": _small,
        "large embedder": lambda: SentenceEmbedder(path_of("large"), dtype=dtype_here()),
        "classifier": lambda: TextClassifier(path_of("classifier"), dtype=dtype_here()),
    }
    rows = 200_000
    alone = {name: _run_texts({name: make()}, "skewed", rows) for name, make in handlers.items()}
    together = _run_texts({name: make() for name, make in handlers.items()}, "skewed", rows)
    # What is left when all models are loaded: before, some would have the device for themselves.
    begun_s = max(together.firsts.values())
    left = {name: together.left_at(name, begun_s) for name in handlers}
    expected_s = sum(left[name] / run.rate for name, run in alone.items())
    figures = [
        Figure(f"{name} alone: rows/s after the first result", run.rate, note=run.said) for name, run in alone.items()
    ]
    share = sum(left.values()) / (together.rows * len(handlers))
    note = f"{share:.0%} of all results were left then; {together.said}"
    figures += [
        Figure("all three: seconds from the last model's first result", together.done_s - begun_s, note=note),
        Figure("the same results, each model alone: seconds", expected_s),
        Figure(
            "time of each alone, summed / time of all three", expected_s / (together.done_s - begun_s), at_least=0.95
        ),
    ]
    print_figures(figures)


_LARGE_BATCH = 64 if is_small() else 32_768  # tokens
_LEFT_BYTES = 64 << 20  # of the device's memory; less than such a batch takes


class CrampedEmbedder(SentenceEmbedder):
    """An embedder whose process gets no more memory after the first large batch."""

    is_cramped = False

    def compute(self, model: Any, batch: Any, inference_args: dict[str, Any]) -> Any:
        """Take the memory away before a large batch; without a device, fail as if it were away."""
        import torch

        is_large = batch.count > 1 and len(batch.inputs["ids"]) >= _LARGE_BATCH
        if not torch.cuda.is_available():
            if is_large:
                raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
        elif is_large and not self.is_cramped:
            self.is_cramped = True
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + _LEFT_BYTES) / whole)
        return super().compute(model, batch, inference_args)


def out_of_memory() -> None:
    """Print how often batches did not fit into memory in a run in which all rows were answered."""
    rows = 400_000
    run = _run_texts({"Embed": CrampedEmbedder(path_of("small"), dtype=dtype_here())}, "skewed", rows)
    count = run.counter(InferenceMetrics.OUT_OF_MEMORY)
    print_figures(
        [
            Figure("rows answered / rows", run.counter(InferenceMetrics.EXAMPLES) / run.rows, at_least=1),
            Figure("batches out of memory", count, at_least=1, note="" if has_cuda() else "simulated"),
            Figure("rows/s after the first result", run.rate, note=run.said),
        ]
    )


def classifier() -> None:
    """Print rows per second of a classifier of texts, beside a loop with transformers."""
    run = _run_texts({"Classify": TextClassifier(path_of("classifier"), dtype=dtype_here())}, "skewed", 300_000)
    encode = _with_transformers("AutoModelForSequenceClassification", _probabilities, "classifier")
    texts = _texts().make("skewed", _ALONE_ROWS)
    other = max(best_rate(len(texts), partial(encode, texts, size)) for size in _BATCH_SIZES)
    _print_beside(run, other, "a loop with transformers, sorted")


def _probabilities(output: Any, _: Any) -> Any:
    return output.logits.float().softmax(-1)


def _print_beside(run: Run, other: float, name: str) -> None:
    print_figures(
        [
            Figure("rows/s after the first result", run.rate, note=f"{run.rows:,} rows; {run.said}"),
            Figure("rows/s of the whole run", run.whole_rate),
            Figure("seconds to the first result", run.first_s),
            Figure(f"times {name}", run.rate / other, at_least=1, note=f"which does {other:,.0f} rows/s"),
        ]
    )
