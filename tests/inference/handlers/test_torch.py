"""TorchModelHandler: images, padded sequences, dicts, and all kinds of model files."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pytest
import torch
from apache_beam.ml.inference.base import RunInference
from apache_beam.ml.inference.pytorch_inference import make_tensor_model_fn

from luminosity.core import WorkerShare
from luminosity.inference.handlers import on_torch
from luminosity.inference.handlers.torch import TorchModelHandler


class TinyConvNet(torch.nn.Module):
    """Turns images into three scores."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, channels, 3, padding=1),
            torch.nn.BatchNorm2d(channels),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(channels, 3),
        )

    def forward(self, images: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.layers(images) * scale

    def doubled(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images) * 2


class TinyTagger(torch.nn.Module):
    """Returns a label per token. It has attention, so padding changes the result if the mask is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        self.labels = torch.nn.Linear(16, 5)

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        vectors = self.embedding(ids)
        mixed, _ = self.attention(vectors, vectors, vectors, key_padding_mask=attention_mask == 0)
        weights = attention_mask[..., None] / attention_mask.sum(dim=1)[:, None, None]
        return {"logits": self.labels(mixed), "mean": (mixed * weights).sum(dim=1)}


@pytest.fixture
def weights(tmp_path: Path) -> str:
    torch.manual_seed(0)
    torch.save(TinyConvNet(channels=8).state_dict(), tmp_path / "weights.pt")
    return str(tmp_path / "weights.pt")


def images(count: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).random((count, 3, 16, 16), dtype=np.float32))


def predictions(handler: TorchModelHandler, examples: list[Any], **inference_args: Any) -> list[Any]:
    model = handler.load_model()
    return [result.inference for result in handler.run_inference(examples, model, inference_args)]


def conv_net(weights: str, **options: Any) -> TorchModelHandler:
    return TorchModelHandler(weights, TinyConvNet, {"channels": 8}, "CPU", **options)


def expected_scores(weights: str, examples: list[np.ndarray]) -> np.ndarray:
    net = TinyConvNet(channels=8)
    net.load_state_dict(torch.load(weights, weights_only=True))
    with torch.no_grad():
        return net.eval()(torch.from_numpy(np.stack(examples))).numpy()


def test_images_as_arrays_and_as_tensors(weights: str) -> None:
    examples = images(5)
    expected = expected_scores(weights, examples)

    found = predictions(conv_net(weights), examples)
    tensors = predictions(conv_net(weights, output="torch"), [torch.from_numpy(example) for example in examples])

    assert all(isinstance(each, np.ndarray) for each in found)
    assert np.stack(found) == pytest.approx(expected, abs=1e-6)
    assert torch.stack(tensors).numpy() == pytest.approx(expected, abs=1e-6)
    assert np.stack(predictions(conv_net(weights), examples, scale=3.0)) == pytest.approx(3 * expected, abs=1e-5)


def test_the_same_from_every_kind_of_file(weights: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    examples = images(4)
    expected = expected_scores(weights, examples)
    state = torch.load(weights, weights_only=True)
    net = TinyConvNet(channels=8)
    net.load_state_dict(state)
    net.eval()
    save_file(state, tmp_path / "weights.safetensors")
    torch.jit.trace(net, torch.zeros(1, 3, 16, 16)).save(str(tmp_path / "script.pt"))
    exported = torch.export.export(net, (torch.zeros(2, 3, 16, 16),), dynamic_shapes=({0: torch.export.Dim("n")},))
    torch.export.save(exported, tmp_path / "exported.pt2")

    handlers = [
        conv_net(str(tmp_path / "weights.safetensors")),
        TorchModelHandler(torch_script_model_path=str(tmp_path / "script.pt"), device="CPU"),
        TorchModelHandler(exported_model_path=str(tmp_path / "exported.pt2"), device="CPU"),
        TorchModelHandler(model_class=lambda: net, device="CPU"),
    ]

    for handler in handlers:
        assert np.stack(predictions(handler, examples)) == pytest.approx(expected, abs=1e-5)
    assert handlers[1].model_id == str(tmp_path / "script.pt")
    assert handlers[3].model_id is None


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"code": Path}, tmp_path / "weights.pt")

    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        conv_net(str(tmp_path / "weights.pt")).load_model()


def test_sequences_of_different_length_are_padded_and_masked() -> None:
    torch.manual_seed(0)
    tagger = TinyTagger()
    handler = TorchModelHandler(model_class=lambda: tagger, device="CPU", mask="attention_mask", pad_value=49)
    examples = [np.arange(length) for length in (3, 7, 1, 7)]

    together = predictions(handler, examples)
    alone = [value for example in examples for value in predictions(handler, [example])]
    as_dicts = predictions(handler, [{"ids": example} for example in examples])

    for example, ours, single, keyed in zip(examples, together, alone, as_dicts, strict=True):
        length = len(example)
        assert ours["logits"].shape == (7, 5)
        assert ours["logits"][:length] == pytest.approx(single["logits"], abs=1e-5)
        assert ours["mean"] == pytest.approx(single["mean"], abs=1e-5)
        assert keyed["mean"] == pytest.approx(ours["mean"], abs=1e-6)
    assert handler.cost(handler.prepare(examples)).tolist() == [3, 7, 1, 7]


def test_shapes_that_cannot_be_padded_are_named(weights: str) -> None:
    with pytest.raises(ValueError, match=r"\(3, 16, 16\) and \(3, 8, 8\) in one batch, expected that only the first"):
        predictions(conv_net(weights), [*images(1), np.zeros((3, 8, 8), np.float32)])


def test_an_output_that_is_not_one_per_example_is_named() -> None:
    handler = TorchModelHandler(model_class=lambda: _Sum(), device="CPU")

    with pytest.raises(ValueError, match=r"the model's output is a ndarray of shape \(\), expected 2 rows"):
        predictions(handler, [np.ones(2), np.ones(2)])


class _Sum(torch.nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.sum()


def test_tuples_and_lists_of_outputs() -> None:
    class Pair(torch.nn.Module):
        def forward(self, values: torch.Tensor, as_list: bool = False) -> Any:
            return [{"sum": row.sum()} for row in values] if as_list else (values + 1, values.sum(dim=1))

    handler = TorchModelHandler(model_class=Pair, device="CPU")
    examples = [np.array([1, 2]), np.array([3, 4])]

    assert [(row.tolist(), int(total)) for row, total in predictions(handler, examples)] == [([2, 3], 3), ([4, 5], 7)]
    assert [int(each["sum"]) for each in predictions(handler, examples, as_list=True)] == [3, 7]


def test_beams_inference_functions_fit(weights: str) -> None:
    examples = images(3)

    found = predictions(conv_net(weights, inference_fn=make_tensor_model_fn("doubled")), examples)

    assert np.stack(found) == pytest.approx(2 * expected_scores(weights, examples), abs=1e-6)


def test_dtype_memory_and_new_weights(weights: str, tmp_path: Path) -> None:
    handler = conv_net(weights, dtype=torch.bfloat16)
    model = handler.load_model()
    full = sum(tensor.nbytes for tensor in conv_net(weights).load_model().state_dict().values())

    found = predictions(handler, images(2))
    torch.save(torch.load(weights, weights_only=True), tmp_path / "next.pt")
    handler.update_model_path(str(tmp_path / "next.pt"))

    assert found[0].dtype == np.float32
    assert np.stack(found) == pytest.approx(expected_scores(weights, images(2)), abs=0.05)
    assert full / 2 <= (handler.memory(model) or 0) <= full / 2 + 8  # plus one counter of 8 bytes
    assert handler.model_id == str(tmp_path / "next.pt")
    with pytest.raises(ValueError, match="found dtype='half_float', expected the name of a torch dtype"):
        conv_net(weights, dtype="half_float").load_model()


def test_a_compiled_module_sees_few_lengths() -> None:
    handler = TorchModelHandler(model_class=TinyTagger, device="CPU", mask="attention_mask", compile=True)

    widths = {handler.collate([np.ones(n, int), np.ones(1, int)]).inputs[0][0].shape[1] for n in range(2, 200)}

    assert widths == {2, 4, 8, 16, 32, 64, 128, 192, 256}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_module_predicts_the_same() -> None:
    torch.manual_seed(0)
    tagger = TinyTagger()
    plain = TorchModelHandler(model_class=lambda: tagger, device="CPU", mask="attention_mask")
    compiled = TorchModelHandler(model_class=lambda: tagger, device="CPU", mask="attention_mask", compile=True)
    model = compiled.load_model()

    for length in (5, 9, 33):
        examples = [np.arange(length), np.arange(2)]
        found = [result.inference["mean"] for result in compiled.run_inference(examples, model)]
        expected = [each["mean"] for each in predictions(plain, examples)]
        assert np.stack(found) == pytest.approx(np.stack(expected), abs=1e-5)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_torch._usable_gpus.cache_clear()
    on_torch._warn_of_missing_gpu.cache_clear()
    yield
    on_torch._usable_gpus.cache_clear()


@pytest.mark.usefixtures("no_gpu")
def test_a_gpu_that_is_not_there_is_the_cpu_and_said_once(weights: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            handler = TorchModelHandler(weights, TinyConvNet, {"channels": 8}, device="GPU")
            assert len(predictions(handler, images(1))) == 1

    said = "requests the device 'GPU', but this process can use 0 GPUs"
    assert [record.levelname for record in caplog.records if said in record.getMessage()] == ["WARNING"]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("device", "warnings"), [("gpu:0", 1), ("declared:0", 0)])
def test_a_device_that_torch_can_not_use_is_said_once(
    device: str, warnings: int, weights: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = WorkerShare("device", cores=1.0, ram_bytes=1 << 30, devices=(device,), workers=1)
    for name, value in share.to_environment().items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert len(predictions(TorchModelHandler(weights, TinyConvNet, {"channels": 8}), images(1))) == 1
    assert len([r for r in caplog.records if "has the device gpu:0, but torch" in r.getMessage()]) == warnings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "found none of them"),
        ({"state_dict_path": "weights.pt"}, "found none of them"),
        ({"model_class": TinyConvNet, "torch_script_model_path": "a"}, "found model_class and torch_script_model_path"),
        ({"state_dict_path": "a", "torch_script_model_path": "b"}, "holds the weights, too"),
        ({"model_class": TinyConvNet, "output": "list"}, "found output='list', expected 'numpy' or 'torch'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchModelHandler(**arguments)


def test_in_a_pipeline_of_beams_own_run_inference(weights: str) -> None:
    examples = images(6)
    scores = expected_scores(weights, examples)
    expected = {example.tobytes(): row for example, row in zip(examples, scores, strict=True)}

    def check(results: list[Any]) -> None:
        assert len(results) == 6
        for result in results:
            assert result.inference == pytest.approx(expected[result.example.tobytes()], abs=1e-6)
            assert result.model_id == weights

    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        results = pipeline | beam.Create(examples) | RunInference(conv_net(weights, max_batch_size=4))
        results | beam.combiners.ToList() | beam.Map(check)
