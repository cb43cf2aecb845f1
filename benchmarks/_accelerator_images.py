"""A vision transformer on one accelerator: images as arrays and as JPEG files, and where their time goes.

The pipelines run first: the section's own process must not hold the device, nor have imported torch, while one starts.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from _accelerator_models import CLASSES, EDGE, be_quiet, is_small, path_of
from _accelerator_pipelines import best_rate, dtype_here
from _accelerator_run import Run, run
from _measure import Figure, print_figures

from luminosity import ImageClassifier
from luminosity.core import InferenceMetrics, usable_cores

__all__ = ["images"]

_ROWS = {"arrays": 24_576, "JPEG": 16_384}
_SMALL_ROWS, _PER_SHARD = 16, 4 if is_small() else 256
_BATCH = 4 if is_small() else 256  # of the other side
_ALONE_ROWS = 4 if is_small() else 4096
_PHOTO = (375, 500)  # pixels, as most photos of ImageNet have
_PHOTOS = 4 if is_small() else 32  # different ones
_THREADS = {  # of the device's process; each of them does one of these for one batch after the other
    "collate": InferenceMetrics.COLLATE,
    "copy to the device": InferenceMetrics.TRANSFER,
    "compute": InferenceMetrics.COMPUTE,
    "return": InferenceMetrics.RETURN,
}


def images() -> None:
    """Print images per second, beside loops with torch, and how long each stage takes for an image."""
    makers = {"arrays": arrays, "JPEG": photos}
    runs = {kind: run({"Classify": _handler()}, make, _rows(kind), _PER_SHARD) for kind, make in makers.items()}
    figures: list[Figure] = []
    alone = {"the handler alone": _handler_alone(), "the model alone": _model_alone()}
    others = {
        "arrays": ("a loop with torch over arrays in memory", alone["the model alone"]),
        "JPEG": (f"a loop with torch and a DataLoader of {usable_cores()} processes", _data_loader()),
    }
    for kind, done in runs.items():
        figures += list(_figures(kind, done, *others[kind]))
    figures += [Figure(f"{name}, arrays in memory: images/s", rate) for name, rate in alone.items()]
    print_figures(figures)


def _figures(kind: str, done: Run, name: str, other: float) -> Iterator[Figure]:
    seconds = done.done_s - done.first_s
    prepared_us = done.counter(InferenceMetrics.PREPARE) / done.rows
    busy = done.counter(InferenceMetrics.DEVICE_BUSY) / 1e6
    stages = ", ".join(f"{stage} {done.counter(counter) / done.rows:.0f}" for stage, counter in _THREADS.items())
    yield Figure(f"{kind}: images/s after the first result", done.rate, note=f"{done.rows:,} images; {done.said}")
    yield Figure(f"{kind}: images/s of the whole run", done.whole_rate, note=f"{done.whole_s:.1f} s")
    yield Figure(f"{kind}: seconds to the first result", done.first_s)
    yield Figure(f"{kind}: times {name}", done.rate / other, at_least=0.85, note=f"which does {other:,.0f} images/s")
    yield Figure(f"{kind}: share of the time in which the device computes", busy / seconds)
    note = f"{usable_cores()} cores prepare at most {usable_cores() * 1e6 / max(prepared_us, 1):,.0f} images/s"
    yield Figure(f"{kind}: microseconds to prepare an image", prepared_us, note=note)
    yield Figure(f"{kind}: microseconds of the device's process", sum(_per_image(done)), note=f"an image: {stages}")


def _per_image(done: Run) -> Iterator[float]:
    for counter in _THREADS.values():
        yield done.counter(counter) / done.rows


def _rows(kind: str) -> int:
    return _SMALL_ROWS if is_small() else _ROWS[kind]


def _handler() -> ImageClassifier:
    return ImageClassifier(path_of("images"), dtype=dtype_here(), top_k=CLASSES)


def arrays(rows: int, seed: int) -> list[Any]:
    """Return images of the model's size that differ, quickly made."""
    whole = np.random.default_rng(seed).integers(0, 256, (EDGE + rows, EDGE, 3), np.uint8)
    return [np.ascontiguousarray(whole[row : row + EDGE]) for row in range(rows)]


def photos(rows: int, seed: int) -> list[bytes]:
    """Return files of photos, of which some are equal."""
    from PIL import Image

    random, found = np.random.default_rng(seed), list[bytes]()
    height, width = _PHOTO
    for _ in range(min(rows, _PHOTOS)):
        rough = Image.fromarray(random.integers(0, 256, (height // 8, width // 8, 3), np.uint8))
        file = io.BytesIO()
        rough.resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
        found.append(file.getvalue())
    return [found[row % len(found)] for row in range(rows)]


# What the pipelines are compared with.


def _handler_alone() -> float:
    """Return the images per second of our handler, called for one batch after the other."""
    handler = _handler()
    model = handler.load_model()
    parts = _parts(arrays(_ALONE_ROWS, 0))

    def compute() -> None:
        begun = [handler.predict(model, handler.transfer(handler.collate(part))) for part in parts]
        for outputs in begun:
            handler.wait(outputs)
            handler.collect(outputs)

    return best_rate(_ALONE_ROWS, compute)


def _model_alone() -> float:
    """Return the images per second of a plain loop."""
    classify, parts = _classify(), _parts(arrays(_ALONE_ROWS, 0))
    return best_rate(_ALONE_ROWS, lambda: classify(map(np.stack, parts)))


def _parts(examples: list[Any]) -> list[list[Any]]:
    return [examples[start : start + _BATCH] for start in range(0, len(examples), _BATCH)]


@dataclass(frozen=True)
class _Photos:
    """Photos that are decoded and resized when they are asked for, as a DataLoader wants them."""

    files: list[bytes]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: int) -> Any:
        from PIL import Image

        image = Image.open(io.BytesIO(self.files[place])).convert("RGB")
        return np.asarray(image.resize((EDGE, EDGE), Image.Resampling.BILINEAR))


def _data_loader() -> float:
    """Return the images per second of a loop whose images are decoded by the processes of a DataLoader."""
    from torch.utils.data import DataLoader

    count = _SMALL_ROWS if is_small() else _ROWS["JPEG"]
    loader: Any = DataLoader(
        _Photos(photos(count, 0)),  # pyright: ignore[reportArgumentType]  # it has what a dataset needs
        batch_size=_BATCH,
        num_workers=usable_cores(),
        persistent_workers=True,
        collate_fn=np.stack,
    )
    classify = _classify()
    return best_rate(count, lambda: classify(loader))


def _classify() -> Callable[[Iterable[Any]], list[Any]]:
    """Return a function that computes the probabilities of batches of pixels, as one would write it with torch."""
    import torch
    from transformers import AutoModelForImageClassification

    be_quiet()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForImageClassification.from_pretrained(path_of("images"), dtype=dtype).to(device).eval()

    def one(batch: Any) -> Any:
        pixels = torch.from_numpy(batch).to(device)
        pixels = ((pixels.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5).to(dtype)
        return model(pixel_values=pixels).logits.float().softmax(-1).cpu()

    def all_of(batches: Iterable[Any]) -> list[Any]:
        with torch.inference_mode():
            return list(map(one, batches))

    return all_of
