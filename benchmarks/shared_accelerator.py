"""Two embedders and a classifier on one accelerator: all three over the same texts in one run, against each alone.

One process holds the device and the three models; each has its own batches. The figure is the time that the three take
one after another, each in a run of its own, divided by the time of the run that has them all: at 1 sharing costs
nothing. Start-up is left out: seconds are those that a long run takes beyond a short one.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import _measure
import apache_beam as beam
from _counters import print_counters
from _lengths import LONGEST
from _texts import MODEL, Texts
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import LuminosityRunner, RunInference, SentenceEmbedder, TextClassifier

os.environ["HF_HUB_OFFLINE"] = "1"

_CORES = len(os.sched_getaffinity(0))
_ROWS_PER_SHARD = 4096
_SHARDS = {"cuda": 320, "cpu": 1}
_SHORT_ROWS = 16  # of a shard, in a run that shows the start-up
_WORKLOAD = "skewed"


def small_embedder(folder: str, device: str) -> Any:
    return SentenceEmbedder(str(MODEL), device=device, dtype=_dtype(device))


def large_embedder(folder: str, device: str) -> Any:
    """The shape of BERT base, or on a CPU one that it can do; pooled as the small one is."""
    from transformers import AutoConfig, AutoModel

    path = _copy_of_the_small_one(folder, "large")
    large = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12} if device == "cuda" else {}
    config = AutoConfig.from_pretrained(MODEL, **large)
    AutoModel.from_config(config).save_pretrained(path)
    pooling = Path(path, "1_Pooling", "config.json")
    settings = json.loads(pooling.read_text())
    pooling.write_text(json.dumps({**settings, "word_embedding_dimension": config.hidden_size}))
    return SentenceEmbedder(path, device=device, dtype=_dtype(device))


def classifier(folder: str, device: str) -> Any:
    """Half as many layers as BERT base, and three labels."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    path = _copy_of_the_small_one(folder, "classifier")
    large = {"hidden_size": 768, "intermediate_size": 3072} if device == "cuda" else {}
    config = AutoConfig.from_pretrained(MODEL, num_labels=3, **large)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    return TextClassifier(path, device=device, dtype=_dtype(device))


MODELS: dict[str, Callable[[str, str], Any]] = {
    "small embedder": small_embedder,
    "large embedder": large_embedder,
    "classifier": classifier,
}


def _copy_of_the_small_one(folder: str, name: str) -> str:
    """Its tokenizer and its pooling; weights are drawn at random."""
    return shutil.copytree(MODEL, Path(folder, name), ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))


def _dtype(device: str) -> str | None:
    return "bfloat16" if device == "cuda" else None


def measured(names: Sequence[str], device: str) -> dict[str, float]:
    texts, shards = _texts(), _SHARDS[device]
    with tempfile.TemporaryDirectory() as folder:
        handlers = {name: MODELS[name](folder, device) for name in names}
        _run(handlers, texts, _CORES, _SHORT_ROWS)  # What is done once per process, such as imports, does not count.
        start_up_s = _run(handlers, texts, _CORES, _SHORT_ROWS)
        seconds = _run(handlers, texts, shards, _ROWS_PER_SHARD) - start_up_s
    rows = shards * _ROWS_PER_SHARD - _CORES * _SHORT_ROWS
    return {"seconds": seconds, "rows/s": rows / seconds, "start-up": start_up_s}


def _texts() -> Texts:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    return Texts.read(tokenizer)


def _run(handlers: dict[str, Any], texts: Texts, shards: int, rows_per_shard: int) -> float:
    make = texts.make
    pipeline = beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off"]))
    rows = (
        pipeline
        | beam.Create(range(shards))
        | beam.Reshuffle()
        | "Texts" >> beam.FlatMap(lambda seed: make(_WORKLOAD, rows_per_shard, seed))
    )
    for name, handler in handlers.items():
        ones = (
            rows
            | name >> RunInference(handler).with_resource_hints(accelerator="type:any;count:1")
            | f"One of {name}" >> beam.Map(lambda result: 1 if result.inference is not None else 0)
        )
        ones | f"Check {name}" >> _Check(shards * rows_per_shard)
    begun = time.perf_counter()
    result = pipeline.run()
    result.wait_until_finish()
    seconds = time.perf_counter() - begun
    print_counters(f"{shards * rows_per_shard:,} rows, {seconds:.1f} s", result.metrics())
    return seconds


class _Check(beam.PTransform):
    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def expand(self, input_or_inputs: Any) -> Any:
        _measure.check_count_and_sum(input_or_inputs, self._count, self._count)
        return input_or_inputs


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    alone = sum(results[name]["seconds"] for name in MODELS)
    ratio = alone / results["all three"]["seconds"]
    _measure.print_figure("time of each alone, summed / time of the three together", ratio, at_least=0.9)


def main() -> None:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        print("torch finds no CUDA device: small models on the CPU show that it runs, not what an accelerator would do")
    sides: dict[str, _measure.Side] = {name: partial(measured, [name], device) for name in MODELS}
    _measure.main({**sides, "all three": partial(measured, list(MODELS), device)}, report)


if __name__ == "__main__":
    main()
