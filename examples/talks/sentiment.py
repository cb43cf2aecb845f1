"""The sentiment of reviews with RunInference: what `sentiment_by_hand.py` does, in a few lines.

TextClassifier tokenises, pads, and finds the device; RunInference makes batches of texts alike in length, halves those
that do not fit into memory, counts, and hands over what failed as dead letters::

    lum run examples/talks/sentiment.py
    python examples/talks/sentiment.py --runner=FnApiRunner
"""

from __future__ import annotations

from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import KeyedModelHandler

from luminosity import RunInference, TextClassifier


def classify(keyed_texts: Any, model: str) -> tuple[Any, Any]:
    """From pairs of a key and a text: `(key, label, score)` of the good ones, `(key, error)` of the others."""
    handler = KeyedModelHandler(TextClassifier(model, max_length=128))
    good, dead = keyed_texts | RunInference(handler).with_exception_handling()
    answers = good | beam.MapTuple(lambda key, result: (key, result.inference["label"], result.inference["score"]))
    errors = dead.failed_inferences | "Errors" >> beam.Map(lambda letter: (letter[0][0][0], letter[1][1]))
    return answers, errors


if __name__ == "__main__":
    from _sentiment_job import main

    main(classify)
