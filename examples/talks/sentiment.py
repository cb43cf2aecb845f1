"""The sentiment of reviews with RunInference: the same as `sentiment_by_hand.py`, in a few lines.

TextClassifier tokenises, pads and chooses the device. RunInference makes batches of texts of similar length, halves
batches that do not fit into memory, counts, and returns failures as dead letters::

    lum run examples/talks/sentiment.py
    python examples/talks/sentiment.py --runner=FnApiRunner
"""

from __future__ import annotations

from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import KeyedModelHandler

from luminosity import RunInference, TextClassifier


def classify(keyed_texts: Any, model: str) -> tuple[Any, Any]:
    """Turn pairs of a key and a text into `(key, label, score)`, or `(key, error)` for dead letters."""
    handler = KeyedModelHandler(TextClassifier(model, max_length=128))
    good, dead = keyed_texts | RunInference(handler).with_exception_handling()
    answers = good | beam.MapTuple(lambda key, result: (key, result.inference["label"], result.inference["score"]))
    errors = dead.failed_inferences | "Errors" >> beam.Map(lambda letter: (letter[0][0][0], letter[1][1]))
    return answers, errors


if __name__ == "__main__":
    from _sentiment_job import main

    main(classify)
