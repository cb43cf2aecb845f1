"""Images of all kinds are decoded once, by CPU workers; labels and vectors equal those of transformers."""

from __future__ import annotations

import io
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
import sklearn.datasets
from PIL import Image

from luminosity import Column, Enrich, ImageClassifier, ImageEmbedder, ImageRecipe, RunInference
from luminosity.errors import HandlerError, InvalidArgument, InvalidType, ModelUnavailable
from luminosity.inference.handlers.images.image_handler import decode
from luminosity.inference.handlers.images.recipe import TransformersRecipe, sample_image
from luminosity.inference.handlers.text.pretrained import Pretrained
from tests.inference.texts import MINILM
from tests.plans import break_between, explained, stage_with

PHOTOS = sorted(str(path) for path in (Path(sklearn.datasets.__file__).parent / "images").glob("*.jpg"))
LABELS = ["cat", "dog", "tree"]
ORANGE = (250, 130, 20)

# Scores of a batch: float32 is summed in another order than for one image.
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def saved(kind: str, folder: Path, **config: Any) -> str:
    """Make a small model with random weights, always the same, with an image processor of its kind."""
    import torch
    import transformers

    path = folder / f"{kind}{config.get('problem_type')}"
    if path.exists():
        return str(path)
    torch.manual_seed(0)
    names = {"id2label": dict(enumerate(LABELS)), "label2id": {label: i for i, label in enumerate(LABELS)}, **config}
    size: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    size |= {"intermediate_size": 64, "image_size": 32, "patch_size": 8, "initializer_range": 0.5}
    if kind == "ViT":
        model: Any = transformers.ViTForImageClassification(transformers.ViTConfig(**size, **names))
        processor: Any = transformers.ViTImageProcessorPil(size={"height": 32, "width": 32})
    elif kind == "CLIP":
        text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        model = transformers.CLIPModel(
            transformers.CLIPConfig(vision_config=size, text_config={**text, "vocab_size": 50}, projection_dim=16)
        )
        processor = transformers.CLIPImageProcessorPil(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        )
    else:
        model = transformers.ResNetModel(
            transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
        )
        processor = transformers.ConvNextImageProcessorPil(size={"shortest_edge": 32})
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return str(path)


def predictions(handler: Any, examples: list[Any]) -> list[Any]:
    return [result.inference for result in handler.run_inference(examples, handler.load_model())]


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def png_of_size(width: int, height: int) -> bytes:
    """Return a PNG file of some bytes that says it has this size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def kinds_of_files() -> dict[str, bytes]:
    plain = Image.new("RGB", (6, 4), ORANGE)
    palette = plain.convert("P", palette=Image.Palette.ADAPTIVE)
    clear = plain.convert("RGBA")
    clear.putalpha(0)
    deep = Image.fromarray(np.full((4, 6), 40_000, np.uint16))
    turned = Image.new("RGB", (4, 6), ORANGE)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees to see it upright
    return {
        "PNG": encoded(plain, "PNG"),
        "palette": encoded(palette, "PNG"),
        "palette with transparency": encoded(palette, "PNG", transparency=b"\x10" * 256),
        "alpha": encoded(clear, "PNG"),
        "CMYK": encoded(plain.convert("CMYK"), "JPEG", quality=100),
        "16 bits": encoded(deep, "PNG"),
        "16 bits in TIFF": encoded(deep, "TIFF"),
        "EXIF": encoded(turned, "JPEG", quality=100, exif=exif),
        "animation": encoded(plain, "GIF", save_all=True, append_images=[Image.new("RGB", (6, 4), (0, 0, 255))]),
        "grey": encoded(plain.convert("L"), "PNG"),
        "WebP": encoded(plain, "WEBP", lossless=True),
    }


@pytest.mark.parametrize("kind", list(kinds_of_files()))
def test_every_kind_of_file_becomes_an_upright_rgb_image(kind: str) -> None:
    image = decode(kinds_of_files()[kind])

    assert (image.mode, image.size) == ("RGB", (6, 4))
    grey = {"16 bits": 156, "16 bits in TIFF": 156, "grey": 153}
    expected = [grey[kind]] * 3 if kind in grey else ORANGE
    assert np.abs(np.asarray(image).astype(int) - expected).max() <= 8


def test_paths_bytes_arrays_and_dicts_are_the_same_image(tmp_path: Path) -> None:
    file = tmp_path / "an image.png"
    file.write_bytes(encoded(sample_image(), "PNG"))
    content = file.read_bytes()
    examples = [file, str(file), file.as_uri(), content, np.asarray(sample_image())]
    examples += [{"bytes": content, "path": "of no use"}, {"bytes": None, "path": str(file)}]
    for example in examples:
        assert np.array_equal(np.asarray(decode(example)), np.asarray(sample_image()))


BAD_EXAMPLES: dict[str, tuple[Any, type[Exception], str]] = {
    "cut off": (
        encoded(Image.new("RGB", (600, 400), ORANGE), "JPEG")[:900],
        InvalidArgument,
        "can't be decoded: .*trunc",
    ),
    "empty": (b"", InvalidArgument, "an image of 0 bytes is no image"),
    "text": (b"Dear colleague, please find the photo attached", InvalidArgument, "is no image of a format that Pillow"),
    "bomb": (png_of_size(10_000, 10_000), InvalidArgument, "has 10,000 x 10,000 pixels, expected at most 89,478,485"),
    "large bomb": (png_of_size(60_000, 60_000), InvalidArgument, "is too large to decode: .*decompression bomb"),
    "floats": (encoded(Image.new("F", (4, 4)), "TIFF"), InvalidArgument, "has pixels of 32 bits .mode F"),
    "EPS": (encoded(Image.new("RGB", (4, 4)), "EPS"), InvalidArgument, "is an image of the format EPS, which is not"),
    "no file": ("/no/such/photo.jpg", InvalidArgument, "found no file '/no/such/photo.jpg', expected an image"),
    "NaN": (np.full((4, 4, 3), np.nan), InvalidType, "found an array of float64, expected uint8"),
    "vector": (np.zeros(4, np.uint8), InvalidArgument, r"found an array of the shape \(4,\)"),
    "number": (7, InvalidType, "found an example of type int, expected a path"),
    "nothing": ({"bytes": None, "path": None}, InvalidArgument, "expected a value in bytes or path"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("kind", list(BAD_EXAMPLES))
def test_an_image_that_can_not_be_decoded_says_why(kind: str) -> None:
    example, error, message = BAD_EXAMPLES[kind]
    with pytest.raises(error, match=message):
        decode(example)


@pytest.mark.parametrize("problem_type", [None, "multi_label_classification"])
def test_labels_are_those_of_transformers(problem_type: str | None, folder: Path) -> None:
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    path = saved("ViT", folder, problem_type=problem_type)
    handler = ImageClassifier(path, device="CPU", top_k=2, threshold=0.3)
    with_transformers = ImageClassifier(path, device="CPU", top_k=2, threshold=0.3)
    with_transformers.reads_processor_json = False
    assert (type(handler.recipe), type(with_transformers.recipe)) == (ImageRecipe, TransformersRecipe)

    found = predictions(handler, PHOTOS)

    model = AutoModelForImageClassification.from_pretrained(path).eval()
    inputs = AutoImageProcessor.from_pretrained(path, backend="pil")([Image.open(photo) for photo in PHOTOS])
    with torch.no_grad():
        logits = model(torch.from_numpy(np.stack(inputs["pixel_values"]))).logits
    scores = (logits.sigmoid() if problem_type else logits.softmax(dim=-1)).tolist()
    for ours, theirs in zip(found, scores, strict=True):
        best = sorted(zip(theirs, LABELS, strict=True), reverse=True)
        assert ours["label"] == best[0][1]
        assert ours["score"] == pytest.approx(best[0][0], abs=ROUNDING)
        assert [each["label"] for each in ours["top"]] == [label for _, label in best[:2]]
        assert [each["score"] for each in ours["top"]] == pytest.approx([score for score, _ in best[:2]], abs=ROUNDING)
        if problem_type:
            assert set(ours["labels"]) == {label for score, label in best if score >= 0.3}
    assert pa.array(found, handler.output_type).to_pylist() == found
    assert np.array_equal(handler.prepare(PHOTOS), with_transformers.prepare(PHOTOS))
    assert handler.prepare(PHOTOS).dtype == np.uint8


@pytest.mark.parametrize("kind", ["ViT", "CLIP", "ResNet"])
def test_vectors_are_those_of_transformers(kind: str, folder: Path) -> None:
    import torch
    from transformers import AutoImageProcessor, AutoModel

    path = saved(kind, folder)
    handler = ImageEmbedder(path, device="CPU")

    found = np.stack(predictions(handler, PHOTOS))

    model = AutoModel.from_pretrained(path).eval()
    inputs = AutoImageProcessor.from_pretrained(path, backend="pil")([Image.open(photo) for photo in PHOTOS])
    pixels = torch.from_numpy(np.stack(inputs["pixel_values"]))
    with torch.no_grad():
        if kind == "CLIP":
            expected = model.get_image_features(pixel_values=pixels).pooler_output
        elif kind == "ViT":
            expected = model(pixels).last_hidden_state[:, 0]
        else:
            expected = model(pixels).pooler_output.flatten(1)
    assert found == pytest.approx(expected.numpy(), abs=1e-3)
    assert found.dtype == np.float32
    assert handler.output_type == pa.list_(pa.float32(), found.shape[1])
    of_length_one = np.stack(predictions(ImageEmbedder(path, device="CPU", normalize=True), PHOTOS))
    assert np.linalg.norm(of_length_one, axis=1) == pytest.approx([1, 1])


@pytest.mark.parametrize("name", ["ViT", "CLIP", "Siglip", "Bit", "DeiT", "ConvNext", "EfficientNet"])
def test_images_are_prepared_as_the_processor_does(name: str, tmp_path: Path) -> None:
    """Those that an ImageRecipe can't describe are left to transformers, also with values that are not uint8."""
    import torch
    import transformers

    processor = getattr(transformers, f"{name}ImageProcessorPil")()
    processor.save_pretrained(tmp_path)
    source = Pretrained(str(tmp_path))
    whole = TransformersRecipe(source)
    plain = ImageRecipe.read(source.json("preprocessor_config.json"))

    assert (plain is None) == (name in ("ConvNext", "EfficientNet"))
    photo = decode(PHOTOS[0])
    expected = whole.whole(photo)
    for recipe in (whole, *([plain] if plain else [])):
        pixels = torch.from_numpy(np.array(recipe.pixels(photo)[None]))
        assert np.abs(recipe.normalised(pixels, torch.float32).numpy() - expected).max() < 1e-3
        assert pixels.dtype == (torch.float32 if name == "EfficientNet" else torch.uint8)
    assert plain is None or whole.is_close_to(plain)
    assert not whole.is_close_to(ImageRecipe(size=(8, 8)))


class Brightness:
    """Makes a module of its own: how red, green and blue an image is."""

    def __call__(self) -> Any:
        import torch

        class Mean(torch.nn.Module):
            def forward(self, pixels: Any) -> Any:
                return pixels.mean(dim=(2, 3))

        return Mean()


def not_a_module() -> str:
    return "weights"


def test_a_module_of_your_own_needs_labels_and_a_recipe() -> None:
    recipe = ImageRecipe(size=(8, 8), scale=1.0)
    colours = ["red", "green", "blue"]
    own = ImageClassifier(model_class=Brightness(), labels=colours, recipe=recipe, device="CPU", top_k=3)
    orange = np.full((5, 5, 3), ORANGE, np.uint8)

    [label] = predictions(own, [orange])
    [vector] = predictions(ImageEmbedder(model_class=Brightness(), recipe=recipe, device="CPU"), [orange])

    assert [each["label"] for each in label["top"]] == colours
    assert vector.tolist() == list(ORANGE)
    assert own.model_id is None
    with pytest.raises(HandlerError, match=r"has the shape \(1, 3\) for 1 images and 2 labels"):
        predictions(ImageClassifier(model_class=Brightness(), labels=["a", "b"], recipe=recipe, device="CPU"), [orange])
    with pytest.raises(InvalidType, match=r"found a model of type str from model_class="):
        ImageEmbedder(model_class=not_a_module, recipe=recipe, device="CPU").load_model()
    with pytest.raises(InvalidArgument, match=r"found model_class= without recipe=, expected both"):
        ImageEmbedder(model_class=Brightness())
    with pytest.raises(InvalidArgument, match=r"found model_class= without labels=, expected both"):
        ImageClassifier(model_class=Brightness(), recipe=recipe)
    with pytest.raises(InvalidArgument, match=r"found neither of path and model_class="):
        ImageClassifier()
    with pytest.raises(InvalidArgument, match=r"found images of the sizes \[\(4, 4\), \(5, 5\)\] in one batch"):
        ImageEmbedder(model_class=Brightness(), recipe=ImageRecipe()).collate([orange, orange[:4, :4]])


def test_a_model_of_the_wrong_kind_is_refused(folder: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"found no preprocessor_config.json, expected a model of images"):
        ImageClassifier(MINILM).check_files()
    with pytest.raises(InvalidArgument, match=r"is a model of the type 'bert', which AutoModelForImageClassification"):
        ImageClassifier(MINILM, device="CPU").load_model()
    with pytest.raises(InvalidArgument, match=r"lacks weights that ViTModel needs: pooler"):
        ImageEmbedder(saved("ViT", folder), device="CPU", pooling="pooler").load_model()
    with pytest.raises(InvalidArgument, match=r"found pooling='mean', but .*CLIPNone' has features of images"):
        ImageEmbedder(saved("CLIP", folder), device="CPU", pooling="mean").load_model()


def test_images_that_fail_become_dead_letters_and_the_others_get_labels(folder: Path, tmp_path: Path) -> None:
    classifier = ImageClassifier(saved("ViT", folder), device="CPU")
    contents = [Path(photo).read_bytes() for photo in PHOTOS]
    table = pa.record_batch(
        {
            "id": range(5),
            "photo": pa.array([contents[0], contents[1][:20_000], None, b"text", contents[1]], pa.binary()),
            "path": [PHOTOS[0], PHOTOS[1], PHOTOS[0], PHOTOS[0], str(tmp_path / "gone.jpg")],
        }
    )
    enrich = Enrich(label=Column(classifier, "photo"), vector=Column(ImageEmbedder(saved("ViT", folder)), "path"))
    with pytest.raises(InvalidArgument, match=r"takes 'photo', which is not in the table"):
        enrich.check(pa.schema([("path", pa.string())]))
    with pytest.raises(InvalidType, match=r"takes 'photo': found int64, expected paths \(text\), images \(binary\)"):
        enrich.check(pa.schema([("photo", pa.int64()), ("path", pa.string())]))
    expected = predictions(classifier, PHOTOS)

    def check(parts: list[Any]) -> None:
        [(_, elements), (_, rows)] = sorted(parts)
        assert sorted(elements) == sorted(
            [(path, each["label"]) for path, each in zip(PHOTOS, expected, strict=True)]
            + [("/no/such.jpg", "InvalidArgument"), ("7", "InvalidType")]
        )
        failed = {row["id"]: (row["_model"], row["_reason"]) for row in rows if "_reason" in row}
        assert sorted(failed) == [1, 2, 3, 4]
        assert failed[1][0] == failed[3][0] == "label"
        assert re.search("20,000 bytes can't be decoded: .*truncated", failed[1][1], re.IGNORECASE)
        assert failed[2] == ("label", "ValueError: 'photo' is null")
        assert "no image of a format" in failed[3][1]
        assert failed[4][0] == "vector"
        assert "found no file" in failed[4][1]
        [good] = [row for row in rows if "_reason" not in row]
        assert (good["id"], good["label"]["label"], len(good["vector"])) == (0, expected[0]["label"], 32)

    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        results, failed = (
            pipeline | beam.Create([*PHOTOS, "/no/such.jpg", 7]) | RunInference(classifier).with_exception_handling()
        )
        named = results | "good" >> beam.Map(lambda result: (result.example, result.inference["label"]))
        letters = failed.failed_inferences | "bad" >> beam.Map(lambda each: (str(each[0][0]), each[1][0].__name__))
        elements = (named, letters) | "elements" >> beam.Flatten() | "all elements" >> beam.combiners.ToList()
        good, bad = pipeline | "table" >> beam.Create([table]) | enrich.with_exception_handling()
        rows = (good, bad) | beam.Flatten() | "rows" >> beam.FlatMap(lambda part: part.to_pylist())
        rows = rows | "all rows" >> beam.combiners.ToList() | "tag rows" >> beam.Map(lambda each: ("rows", each))
        elements = elements | "tag elements" >> beam.Map(lambda each: ("elements", each))
        _ = (elements, rows) | "both" >> beam.Flatten() | "list" >> beam.combiners.ToList() | beam.Map(check)


def test_images_are_decoded_by_cpu_workers_and_the_device_gets_bytes(folder: Path) -> None:
    classifier = ImageClassifier(saved("ViT", folder))

    def build(pipeline: beam.Pipeline) -> None:
        _ = pipeline | beam.Create(PHOTOS) | "Model" >> RunInference(classifier)

    plan = explained(build, "--accelerators=1")

    assert stage_with(plan, "Model/Prepare").pool != stage_with(plan, "Model/Infer").pool
    assert "accelerator" in str(break_between(plan, "Model/Prepare", "Model/Infer"))
    prepared = classifier.prepare(PHOTOS)
    assert (prepared.shape, prepared.nbytes) == ((2, 32, 32, 3), 2 * 32 * 32 * 3)


def test_models_with_one_recipe_decode_once(folder: Path) -> None:
    first, second = ImageClassifier(saved("ViT", folder)), ImageEmbedder(saved("ViT", folder))
    assert first.prepare_key() == second.prepare_key() != ImageEmbedder(saved("CLIP", folder)).prepare_key()


def test_arrays_of_the_right_size_are_not_prepared_but_sent_as_they_are() -> None:
    images = [np.full((8, 6, 3), value, np.uint8) for value in (1, 200)]
    recipe = ImageRecipe(size=(8, 6), mean=(0.5,) * 3, std=(0.25, 0.5, 1.0))
    handler = ImageEmbedder(model_class=Brightness(), recipe=recipe, device="CPU")

    assert handler.prepare(images) is images
    assert handler.sums_costs
    assert handler.prepare([images[0], np.full((9, 6, 3), 1, np.uint8)]) is not images
    expected = [[(value / 255 - 0.5) / std for std in recipe.std] for value in (1, 200)]
    assert np.stack(predictions(handler, images)) == pytest.approx(np.array(expected), abs=1e-5)
    assert [int(image.min()) for image in images] == [1, 200]  # the user's own arrays are unchanged


@pytest.mark.parametrize(
    ("recipe", "shape", "is_kept"),
    [
        (ImageRecipe(), (5, 7, 3), True),
        (ImageRecipe(size=5), (5, 7, 3), True),
        (ImageRecipe(size=(5, 7)), (7, 5, 3), False),
        (ImageRecipe(size=5, crop=(5, 5)), (5, 7, 3), False),
        (ImageRecipe(size=5, crop=(5, 5)), (5, 5, 3), True),
        (ImageRecipe(), (5, 7), False),
        (ImageRecipe(), (5, 7, 4), False),
    ],
)
def test_what_a_recipe_keeps_is_what_it_would_make(recipe: ImageRecipe, shape: tuple[int, ...], is_kept: bool) -> None:
    image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    assert recipe.keeps(image) == is_kept
    assert np.array_equal(recipe.pixels(decode(image)), image) == is_kept
    assert not recipe.keeps(image.astype(np.float32))
