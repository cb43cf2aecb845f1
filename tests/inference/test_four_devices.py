"""Models of texts and images on four simulated devices: a process each, and one of them is killed in the middle."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pytest

from luminosity import ImageClassifier, ImageRecipe, RunInference, SentenceEmbedder, TextClassifier, WorkerShare
from tests.inference.texts import save_with_tokenizer, tiny_bert_config
from tests.marks import first_time
from tests.runners import IS_REFERENCE, collect, new_pipeline

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does"),
    pytest.mark.usefixtures("leaves_nothing"),
]

_DEVICES = 4
_SHARDS, _ROWS_PER_SHARD = 64, 32  # more blocks than devices, however they are cut
_MEETING_S = 90.0  # for four processes to load a model each, on a busy machine
_HINTS = {"accelerator": "type:any;count:1", "max_active_bundles_per_worker": "1"}  # no device gets all bundles
_WORDS = ("dog", "house", "money", "river", "the", "under", "water", "year")


class Meeting:
    """Lets processes wait for each other at their first batch; one of them is killed there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def join(self) -> None:
        """Wait until a process of each device is here."""
        share = WorkerShare.current()
        Path(self._folder, share.devices[0].replace(":", "-")).write_text(str(os.getpid()))
        end = time.monotonic() + _MEETING_S
        while len(self.devices()) < _DEVICES:
            if time.monotonic() > end:
                raise TimeoutError(f"found processes of {self.devices()}, expected {_DEVICES} devices")
            time.sleep(0.01)
        if first_time(self._folder / "killed.once"):
            os.kill(os.getpid(), signal.SIGKILL)

    def devices(self) -> list[str]:
        """Return the devices whose processes are here."""
        return sorted(path.name for path in self._folder.iterdir() if "." not in path.name)

    def is_over(self) -> bool:
        """Return whether a process was killed."""
        return Path(self._folder, "killed.once").exists()


class _Meets:
    """Comes before a handler's class: its processes meet before they compute."""

    meeting: Meeting

    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        """Meet, then compute. Without a device, only compute: a CPU worker never gets here."""
        if WorkerShare.current().devices and batch.count > 1:  # not the example that warms up
            self.meeting.join()
        return super().predict(model, batch, inference_args)  # type: ignore[misc]  # of the handler's class


class _Embedder(_Meets, SentenceEmbedder): ...


class _TextClassifier(_Meets, TextClassifier): ...


class _ImageClassifier(_Meets, ImageClassifier): ...


def _text(row: int) -> str:
    return " ".join(_WORDS[(row >> bit) % len(_WORDS)] for bit in range(row % 5 + 1))


def _image(row: int) -> Any:
    return np.random.default_rng(row).integers(0, 256, (32, 32, 3), np.uint8)


def _embedder(folder: Path) -> Any:
    from transformers import BertModel

    return _Embedder(save_with_tokenizer(BertModel(tiny_bert_config()), folder))


def _text_classifier(folder: Path) -> Any:
    from transformers import BertForSequenceClassification

    return _TextClassifier(save_with_tokenizer(BertForSequenceClassification(tiny_bert_config()), folder))


class _Colours:
    """Makes a module without transformers: how red, green and blue an image is."""

    def __call__(self) -> Any:
        import torch

        class Mean(torch.nn.Module):
            def forward(self, pixels: Any) -> Any:
                return 100 * pixels.mean(dim=(2, 3))

        return Mean()


def _image_classifier(folder: Path) -> Any:
    return _ImageClassifier(model_class=_Colours(), labels=["red", "green", "blue"], recipe=ImageRecipe(size=(32, 32)))


def _numbers(prediction: Any) -> Any:
    """Return a vector, or the scores of labels in the order of their names."""
    if not isinstance(prediction, dict):
        return np.asarray(prediction)
    top: list[dict[str, Any]] = prediction.get("top", [prediction])
    return [each["score"] for each in sorted(top, key=lambda each: each["label"])]


@pytest.mark.parametrize(
    ("make_handler", "make_row"),
    [(_embedder, _text), (_image_classifier, _image), (_text_classifier, _text)],
    ids=["embedder", "images", "classifier"],
)
def test_every_row_is_answered_though_one_of_four_devices_fails(
    make_handler: Callable[[Path], Any], make_row: Callable[[int], Any], tmp_path: Path
) -> None:
    for name in ("model", "meeting", "results"):
        Path(tmp_path, name).mkdir()
    handler = make_handler(tmp_path / "model")
    handler.meeting = Meeting(tmp_path / "meeting")
    count = _SHARDS * _ROWS_PER_SHARD

    def build(pipeline: beam.Pipeline) -> Any:
        return (
            pipeline
            | beam.Create(range(_SHARDS))
            | beam.Reshuffle()
            | beam.FlatMap(lambda shard: [(row, make_row(row)) for row in range(shard, count, _SHARDS)])
            | RunInference(_keyed(handler)).with_resource_hints(**_HINTS)
            | beam.Map(lambda pair: (pair[0], pair[1].inference))
        )

    found = collect(build, tmp_path / "results", new_pipeline("--cpu_workers=2", f"--accelerators={_DEVICES}"))

    alone = [each.inference for each in handler.run_inference(list(map(make_row, range(count))), handler.load_model())]
    assert sorted(row for row, _ in found) == list(range(count))
    assert handler.meeting.is_over()
    assert len(handler.meeting.devices()) == _DEVICES
    for row, prediction in found:
        assert _numbers(prediction) == pytest.approx(_numbers(alone[row]), abs=1e-4)


def _keyed(handler: Any) -> Any:
    from apache_beam.ml.inference.base import KeyedModelHandler

    return KeyedModelHandler(handler)
