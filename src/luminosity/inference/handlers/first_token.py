"""The time from a request to the first token of its answer, where the model or its server can tell it."""

from __future__ import annotations

import time
from typing import Any

from luminosity._shared.kafka_metrics import bucket_name
from luminosity.core import InferenceMetrics
from luminosity.inference.handler import note

__all__ = ["FirstTokenClock", "note_first_token"]


def note_first_token(seconds: float, count: int = 1) -> None:
    """Count the time to the first token of so many answers, in buckets of which the run computes percentiles."""
    note(bucket_name(InferenceMetrics.FIRST_TOKEN, seconds * 1000), count)


class FirstTokenClock:
    """A logits processor for ``generate`` of transformers that only sees when the first scores are there.

    >>> clock = FirstTokenClock()
    >>> clock(None, 7), clock.seconds >= 0
    (7, True)
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.seconds: float | None = None
        """From the start of the batch to the scores of its first tokens; None before them."""

    def __call__(self, ids: Any, scores: Any) -> Any:
        """Return the scores of the next tokens unchanged."""
        if self.seconds is None:
            if getattr(scores, "is_cuda", False):
                scores[0, 0].item()  # wait for the device, once for each batch
            self.seconds = time.monotonic() - self._began
        return scores
