"""A small JAX model, trained in seconds, that tells the tone of a review and whether it is good.

Each of 65,536 words has a vector of 16 numbers. Their sum over a review, divided by the square root of its length, is
the review's *tone*, and a plane separates the tones of good reviews from those of bad ones. So there are two models for
two columns: one turns texts into tones, the other turns tones into sentiments.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from cleaning import clean_text

from luminosity import JaxModelHandler

WIDTH = 16
_VOCABULARY = 1 << 16
_MOST_WORDS = 200
_LENGTHS = (32, _MOST_WORDS)  # Texts are padded to these lengths: few shapes, so that JAX compiles few times.
_ROWS = (128,)
_BATCH = 256
_EPOCHS = 2
_LEARNING_RATE = 0.05
_WORD = re.compile(r"[a-z']+")

Array = npt.NDArray[Any]
Parameters = dict[str, Any]
Table = Any  # a pyarrow.Table; pyarrow has no type annotations


class Tone(JaxModelHandler):
    """Turns texts into vectors, which are similar if reviews sound alike. ``prepare`` runs on CPU workers."""

    def __init__(self, parameters: Path) -> None:
        vector = pa.list_(pa.float32(), WIDTH)
        super().__init__(tone, parameters, ragged=True, masked=True, lengths=_LENGTHS, rows=_ROWS, output_type=vector)

    def prepare(self, block: Any) -> Any:
        return super().prepare([word_ids(str(text)) for text in block])


def sentiment_of_tone(parameters: Path) -> JaxModelHandler:
    """Return a handler that turns tones into numbers between 0 (bad) and 1 (good)."""
    return JaxModelHandler(sentiment, parameters, rows=_ROWS, output_type=pa.float32())


def tone(params: Parameters, words: Any, mask: Any) -> Any:
    """Return the tones of a batch of texts, given as padded word numbers."""
    import jax.numpy as jnp

    vectors = params["words"][words] * mask[..., None]
    return vectors.sum(axis=1) / jnp.sqrt(jnp.maximum(mask.sum(axis=1, keepdims=True), 1))


def sentiment(params: Parameters, tones: Any) -> Any:
    """Return the sentiments of a batch of tones."""
    import jax

    return jax.nn.sigmoid(tones @ params["weights"] + params["bias"])


def word_ids(text: str) -> list[int]:
    """Return a number for each of the first words. A checksum needs no vocabulary, and few words share a number."""
    words = _WORD.findall(text.lower())[:_MOST_WORDS]
    return [zlib.crc32(word.encode()) % _VOCABULARY for word in words] or [0]


def train(reviews: Table, path: Path, seed: int = 7) -> None:
    """Train on labelled reviews, and write the parameters to an ``.npz`` file."""
    import jax

    texts = [word_ids(clean_text(text)) for text in reviews["text"].to_pylist()]
    labels = reviews["label"].to_numpy().astype(np.float32)
    generator = np.random.default_rng(seed)
    params: Parameters = {
        "words": generator.normal(0, 0.1, (_VOCABULARY, WIDTH)).astype(np.float32),
        "weights": generator.normal(0, 0.3, WIDTH).astype(np.float32),
        "bias": np.zeros((), np.float32),
    }
    squares = jax.tree.map(np.zeros_like, params)
    step = jax.jit(_step)
    for _ in range(_EPOCHS):
        for rows in _batches([len(text) for text in texts], generator):
            words, mask = _padded([texts[row] for row in rows])
            params, squares = step(params, squares, words, mask, labels[rows])
    np.savez(path, words=params["words"], weights=params["weights"], bias=params["bias"])


def _step(params: Parameters, squares: Parameters, words: Any, mask: Any, labels: Any) -> tuple[Parameters, Parameters]:
    """Make one step of AdaGrad, which lets rare words learn quickly from their few occurrences."""
    import jax
    import jax.numpy as jnp

    def loss(params: Parameters) -> Any:
        logits = tone(params, words, mask) @ params["weights"] + params["bias"]
        return jnp.mean(jnp.logaddexp(0, logits) - labels * logits)

    gradients = jax.grad(loss)(params)
    squares = jax.tree.map(lambda square, gradient: square + gradient**2, squares, gradients)
    rates = jax.tree.map(lambda square: _LEARNING_RATE / (jnp.sqrt(square) + 1e-8), squares)
    return jax.tree.map(lambda value, rate, slope: value - rate * slope, params, rates, gradients), squares


def _batches(lengths: list[int], generator: np.random.Generator) -> Iterator[Array]:
    """Yield batches of rows with similar lengths, in random order.

    A last batch that is not full is left out: JAX would compile another shape for it.
    """
    order = generator.permutation(len(lengths))
    order = order[np.argsort(np.asarray(lengths)[order] > _LENGTHS[0], kind="stable")]
    starts = np.arange(0, max(1, len(order) - _BATCH + 1), _BATCH)
    for start in generator.permutation(starts):
        yield order[start : start + _BATCH]


def _padded(texts: list[list[int]]) -> tuple[Array, Array]:
    longest = max(len(text) for text in texts)
    width = next(length for length in _LENGTHS if length >= longest)
    words, mask = np.zeros((len(texts), width), np.int32), np.zeros((len(texts), width), np.bool_)
    for row, text in enumerate(texts):
        words[row, : len(text)], mask[row, : len(text)] = text, True
    return words, mask
