"""The sentiment of reviews with your own DoFn: everything that a model in production needs, written by hand.

It loads the model, collects batches across elements, tokenises, sorts by length, pads, chooses the device, halves
batches that do not fit into memory, retries failures that may pass, counts, and returns the rest as dead letters.
`sentiment.py` does the same with RunInference, and `sentiment_compare.py` compares the two::

    lum run examples/talks/sentiment_by_hand.py
    python examples/talks/sentiment_by_hand.py --runner=FnApiRunner
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
from apache_beam import pvalue
from apache_beam.metrics import Metrics
from apache_beam.transforms.window import WindowedValue

LOGGER = logging.getLogger(__name__)

NAMESPACE = "sentiment"
DEAD = "dead"
MAX_LENGTH = 128
MAX_BATCH = 32
MAX_BUFFER = 512
LOAD_ATTEMPTS = 3
PREDICT_ATTEMPTS = 3
FIRST_WAIT_S = 0.5
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


@dataclass
class Waiting:
    """An element in the buffer, with its timestamp and window, which Beam needs to emit it later."""

    key: Any
    text: str
    token_ids: list[int]
    timestamp: Any
    window: Any


class ClassifySentiment(beam.DoFn):
    """Turns pairs of a key and a text into `(key, label, score)`, or `(key, error)` under the tag "dead"."""

    def __init__(self, model: str, max_batch: int = MAX_BATCH, max_length: int = MAX_LENGTH) -> None:
        self._model_path = model
        self._max_batch = max_batch
        self._max_length = max_length
        self._buffer: list[Waiting] = []
        self._model: Any = None
        self._classified = Metrics.counter(NAMESPACE, "classified")
        self._failed = Metrics.counter(NAMESPACE, "failed")
        self._retried = Metrics.counter(NAMESPACE, "retried")
        self._out_of_memory = Metrics.counter(NAMESPACE, "out_of_memory")
        self._tokens = Metrics.counter(NAMESPACE, "tokens")
        self._padding = Metrics.counter(NAMESPACE, "padding")
        self._batch_size = Metrics.distribution(NAMESPACE, "batch_size")
        self._batch_ms = Metrics.distribution(NAMESPACE, "batch_ms")
        self._load_ms = Metrics.distribution(NAMESPACE, "load_ms")

    def setup(self) -> None:
        import torch
        from transformers import AutoTokenizer

        self._device = self._pick_device(torch)
        self._tokenizer = AutoTokenizer.from_pretrained(self._model_path)
        self._model = self._load_with_retries()
        self._labels = self._model.config.id2label

    def _pick_device(self, torch: Any) -> Any:
        if torch.cuda.is_available():
            return torch.device("cuda")
        if torch.backends.mps.is_available():
            return torch.device("mps")
        return torch.device("cpu")

    def _load_with_retries(self) -> Any:
        from transformers import AutoModelForSequenceClassification

        wait_s = FIRST_WAIT_S
        for attempt in range(1, LOAD_ATTEMPTS + 1):
            begun = time.perf_counter()
            try:
                model = AutoModelForSequenceClassification.from_pretrained(self._model_path)
                model = model.to(self._device)
                model.eval()
                self._load_ms.update(int(1000 * (time.perf_counter() - begun)))
                return model
            except OSError as error:
                # The file system may be unavailable for a moment.
                if attempt == LOAD_ATTEMPTS:
                    raise
                LOGGER.warning("Loading %s failed (%s); trying again in %.1f s", self._model_path, error, wait_s)
                time.sleep(wait_s)
                wait_s *= 2
        raise AssertionError("the last attempt returns or raises")

    def start_bundle(self) -> None:
        self._buffer = []

    def process(
        self,
        element: tuple[Any, Any],
        timestamp: Any = beam.DoFn.TimestampParam,
        window: Any = beam.DoFn.WindowParam,
    ) -> Iterator[Any]:
        key, text = element
        if not isinstance(text, str):
            self._failed.inc()
            error = f"found {type(text).__name__}, expected a text"
            yield pvalue.TaggedOutput(DEAD, (key, error))
            return
        try:
            token_ids = self._tokenize(text)
        except Exception as error:
            self._failed.inc()
            yield pvalue.TaggedOutput(DEAD, (key, f"{type(error).__name__}: {error}"))
            return
        self._buffer.append(Waiting(key, text, token_ids, timestamp, window))
        if len(self._buffer) >= MAX_BUFFER:
            # process() may emit elements of other windows only as windowed values.
            yield from self._flush()

    def finish_bundle(self) -> Iterator[Any]:  # type: ignore[override]  # Beam accepts this, though it declares None
        yield from self._flush()

    def teardown(self) -> None:
        import torch

        self._model = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _tokenize(self, text: str) -> list[int]:
        encoded = self._tokenizer(text, truncation=True, max_length=self._max_length)
        return list(encoded["input_ids"])

    def _flush(self) -> Iterator[Any]:
        """Classify all waiting texts, sorted by length: a batch takes the time of its longest text."""
        waiting = sorted(self._buffer, key=lambda each: len(each.token_ids), reverse=True)
        self._buffer = []
        while waiting:
            batch, waiting = waiting[: self._max_batch], waiting[self._max_batch :]
            yield from self._classify(batch)

    def _classify(self, batch: list[Waiting]) -> Iterator[Any]:
        """Predict for a batch, or for its halves if it does not fit or one of its texts fails."""
        try:
            scores = self._predict_with_retries(batch)
        except Exception as error:
            if len(batch) == 1:
                self._failed.inc()
                yield self._windowed(batch[0], pvalue.TaggedOutput(DEAD, (batch[0].key, str(error))))
                return
            if self._is_out_of_memory(error):
                self._out_of_memory.inc()
                self._free_memory()
                # A batch that did not fit will not fit later.
                self._max_batch = max(1, len(batch) // 2)
            middle = len(batch) // 2
            yield from self._classify(batch[:middle])
            yield from self._classify(batch[middle:])
            return
        for each, row in zip(batch, scores, strict=True):
            best = max(range(len(row)), key=row.__getitem__)
            self._classified.inc()
            yield self._windowed(each, (each.key, self._labels[best], row[best]))

    def _predict_with_retries(self, batch: list[Waiting]) -> list[list[float]]:
        wait_s = FIRST_WAIT_S
        for attempt in range(1, PREDICT_ATTEMPTS + 1):
            try:
                return self._predict(batch)
            except RuntimeError as error:
                # Waiting does not free memory.
                if self._is_out_of_memory(error) or attempt == PREDICT_ATTEMPTS:
                    raise
                self._retried.inc()
                LOGGER.warning("A batch of %d failed (%s); trying again in %.1f s", len(batch), error, wait_s)
                time.sleep(wait_s)
                wait_s *= 2
        raise AssertionError("the last attempt returns or raises")

    def _predict(self, batch: list[Waiting]) -> list[list[float]]:
        import torch

        begun = time.perf_counter()
        token_ids, mask = self._pad([each.token_ids for each in batch])
        with torch.inference_mode():
            logits = self._model(
                input_ids=torch.tensor(token_ids, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
            ).logits
            scores = logits.float().softmax(dim=-1).cpu().tolist()
        self._batch_size.update(len(batch))
        self._batch_ms.update(int(1000 * (time.perf_counter() - begun)))
        return scores

    def _pad(self, all_ids: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
        longest = max(len(ids) for ids in all_ids)
        pad_id = self._tokenizer.pad_token_id or 0
        padded: list[list[int]] = []
        mask: list[list[int]] = []
        for ids in all_ids:
            missing = longest - len(ids)
            padded.append(ids + [pad_id] * missing)
            mask.append([1] * len(ids) + [0] * missing)
            self._tokens.inc(len(ids))
            self._padding.inc(missing)
        return padded, mask

    def _is_out_of_memory(self, error: Exception) -> bool:
        if isinstance(error, MemoryError):
            return True
        message = str(error).lower()
        return any(sign in message for sign in OUT_OF_MEMORY)

    def _free_memory(self) -> None:
        import gc

        import torch

        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _windowed(self, waiting: Waiting, value: Any) -> Any:
        """Add the element's own timestamp and window, which Beam does not know at the end of a bundle."""
        if isinstance(value, pvalue.TaggedOutput):
            inner = WindowedValue(value.value, waiting.timestamp, (waiting.window,))
            return pvalue.TaggedOutput(value.tag, inner)
        return WindowedValue(value, waiting.timestamp, (waiting.window,))


def classify(keyed_texts: Any, model: str) -> tuple[Any, Any]:
    """Turn pairs of a key and a text into `(key, label, score)`, or `(key, error)` for dead letters."""
    outputs = keyed_texts | beam.ParDo(ClassifySentiment(model)).with_outputs(DEAD, main="good")
    return outputs.good, outputs[DEAD]


if __name__ == "__main__":
    from _sentiment_job import main

    main(classify)
