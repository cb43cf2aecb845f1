"""Models with random weights and texts of random words, both made here: nothing is downloaded.

The words are those of a WordPiece tokenizer that is saved with each model of texts.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import string
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from _lengths import FRAME, LONGEST, WORKLOADS

__all__ = [
    "CLASSES",
    "EDGE",
    "MODELS",
    "Texts",
    "be_quiet",
    "has_cuda",
    "is_small",
    "models",
    "path_of",
]

EDGE = 224  # pixels
CLASSES = 3
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_VOCABULARY = 30_522  # of BERT and MiniLM
_WORDS_OF_A_STREAM = 100_000
_NEW_EVERY = 20
"""One token of so many begins a number that was never there before, which is two tokens: without, whoever remembers
words would soon know all."""


@dataclass(frozen=True)
class Texts:
    """Texts cut out of one stream of words, each of which is one token."""

    words: tuple[str, ...]

    @classmethod
    def random(cls) -> Texts:
        """Return the same words each time."""
        return cls(tuple(random.Random(1).choices(_words(), k=_WORDS_OF_A_STREAM)))

    def make(self, workload: str, rows: int, seed: int = 0) -> list[str]:
        """Return the same texts for the same arguments."""
        generator = np.random.default_rng(seed)
        tokens = WORKLOADS[workload](generator, rows) - FRAME
        numbers = tokens // _NEW_EVERY
        starts = generator.integers(0, len(self.words) - LONGEST, size=rows)
        new = map(str, generator.integers(100_000, 1_000_000, size=numbers.sum()).tolist())
        ends = starts + tokens - 2 * numbers
        return [
            " ".join([*self.words[start:end], *itertools.islice(new, count)])
            for start, end, count in zip(starts.tolist(), ends.tolist(), numbers.tolist(), strict=True)
        ]


@cache
def _words() -> tuple[str, ...]:
    """Return as many random words as the vocabulary has place for."""
    chooser = random.Random(0)
    count = _VOCABULARY - len(_SPECIAL) - len(_pieces())
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(chooser.choices(string.ascii_lowercase, k=chooser.randint(3, 9)))] = None
    return tuple(found)


@cache
def _pieces() -> tuple[str, ...]:
    """Return the pieces of what is no word: letters, and three digits at once."""
    starts = [*string.ascii_lowercase, *string.digits, *(f"{number:03}" for number in range(1000))]
    return (*starts, *(f"##{piece}" for piece in starts), *string.punctuation)


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    vocabulary = {token: number for number, token in enumerate((*_SPECIAL, *_pieces(), *_words()))}
    built = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    built.normalizer = normalizers.BertNormalizer(clean_text=True, handle_chinese_chars=True, lowercase=True)
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    built.add_special_tokens(list(_SPECIAL))
    built.save(str(folder / "tokenizer.json"))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), _SPECIAL, strict=True))
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": LONGEST, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _save_recipe(folder: Path, width: int) -> None:
    """Save the files of sentence-transformers: the mean of tokens, normalised."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LONGEST, "do_lower_case": False}))
    for path in filter(None, kinds):
        (folder / path).mkdir()
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def _bert(width: int, layers: int, **more: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=_VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=12,
        intermediate_size=4 * width,
        **more,
    )


def _embedder(folder: Path, width: int, layers: int, dtype: Any) -> None:
    from transformers import AutoModel

    AutoModel.from_config(_bert(width, layers)).to(dtype).save_pretrained(folder)
    _save_tokenizer(folder)
    _save_recipe(folder, width)


def _classifier(folder: Path, width: int, layers: int, dtype: Any) -> None:
    from transformers import AutoModelForSequenceClassification

    config = _bert(width, layers, num_labels=CLASSES)
    AutoModelForSequenceClassification.from_config(config).to(dtype).save_pretrained(folder)
    _save_tokenizer(folder)


def _images(folder: Path, width: int, layers: int, dtype: Any) -> None:
    from transformers import AutoModelForImageClassification, ViTConfig

    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=6,
        intermediate_size=4 * width,
        image_size=EDGE,
        num_labels=CLASSES,
    )
    AutoModelForImageClassification.from_config(config).to(dtype).save_pretrained(folder)
    half = [0.5, 0.5, 0.5]
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": EDGE, "width": EDGE},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": half,
        "image_std": half,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


MODELS: dict[str, tuple[Callable[..., None], int, int]] = {
    "small": (_embedder, 384, 6),  # MiniLM's shape
    "large": (_embedder, 768, 12),  # that of BERT base
    "classifier": (_classifier, 768, 6),
    "images": (_images, 384, 12),  # that of ViT-S/16
}
"""How each model is made, its width and its layers."""


def _make_models(folder: str, is_small: bool) -> None:
    """Save all models below a folder: small ones for a try on a CPU, and then in float32."""
    import torch

    for name, (make, width, layers) in MODELS.items():
        path = Path(folder, name)
        path.mkdir()
        torch.manual_seed(0)
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        make(path, 96 if is_small else width, 2 if is_small else layers, dtype)


def path_of(name: str) -> str:
    """Return the folder of a model."""
    return os.path.join(os.environ["ACCELERATOR_MODELS"], name)


def models() -> None:
    """Print what runs here, and save all models."""
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    be_quiet()
    print(
        f"{device}, {len(os.sched_getaffinity(0))} cores, Python {sys.version.split()[0]}, torch {torch.__version__},"
    )
    print(f"transformers {transformers.__version__}; models with random weights, {'tiny' if is_small() else 'whole'}")
    _make_models(os.environ["ACCELERATOR_MODELS"], is_small())


def be_quiet() -> None:
    """Print no progress bars of transformers."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


@cache
def has_cuda() -> bool:
    """Whether there is a CUDA device, without torch."""
    try:
        found = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    except FileNotFoundError:
        return False
    return bool(found.stdout.strip())


def is_small() -> bool:
    """Whether sizes are tiny."""
    return bool(os.environ.get("ACCELERATOR_SMALL"))
