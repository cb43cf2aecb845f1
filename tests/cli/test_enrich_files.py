"""Tests of ``lum enrich`` on folders of files, with a real model of images."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from luminosity.cli.enrich.columns import ColumnRequest, parse_request
from luminosity.cli.main import main
from tests.warm import run_module

_IMAGES = 300
_CORRUPT = (17, 101, 222)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model of images with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(**size, image_size=32, patch_size=8)
    path = tmp_path_factory.mktemp("models") / "vit"
    transformers.ViTModel(config).save_pretrained(path)
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(path)
    return str(path)


def photos(folder: Path) -> None:
    """Write images into folders, of which some are cut off."""
    random = np.random.default_rng(0)
    for number in range(_IMAGES):
        path = folder / str(number % 4) / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (20, 30, 3), np.uint8)).save(path)
        if number in _CORRUPT:
            path.write_bytes(path.read_bytes()[:300])


def test_one_command_embeds_the_images_of_a_folder(tmp_path: Path, model: str) -> None:
    photos(tmp_path / "photos")
    columns = (f"--embed-images=vector:path={model}", f"--embed-images=same:bytes={model}")
    words = ("enrich", "photos/", "out.parquet", *columns)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = run_module("luminosity.cli.main", *words, "--run_dir=off", "--progress=off", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "3 rows, in out-dead-letters.parquet" in done.stdout
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    good = {f"photos/{n % 4}/{n:03}.png" for n in range(_IMAGES) if n not in _CORRUPT}
    assert {row["path"] for row in rows} == good
    assert all(row["bytes"] == (tmp_path / row["path"]).read_bytes() for row in rows)
    assert {len(row["vector"]) for row in rows} == {32}
    np.testing.assert_allclose([row["same"] for row in rows], [row["vector"] for row in rows], atol=1e-4)
    letters = pq.read_table(tmp_path / "out-dead-letters.parquet").to_pylist()
    assert {letter["path"] for letter in letters} == {f"photos/{n % 4}/{n:03}.png" for n in _CORRUPT}
    assert all("truncated" in letter["_reason"] for letter in letters)


def test_a_folder_without_files_is_an_error_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "photos").mkdir()
    arguments = ["enrich", str(tmp_path / "photos"), str(tmp_path / "out"), "--embed-images=path=some/model"]
    assert main(arguments) == 2
    assert "no table file matches" in capsys.readouterr().err


def test_options_for_images_have_names_and_defaults_like_those_for_texts() -> None:
    request = parse_request("classify-images", "path=google/vit")
    assert request == ColumnRequest("classify-images", "path_class", ("path",), "google/vit")
    assert str(request) == "--classify-images path=google/vit"
    assert str(parse_request("embed-images", "path=google/vit").output) == "list<item: float>"
