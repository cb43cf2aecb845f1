"""Tiny models of random weights that write bytes, with a chat template whose marks are special tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]
TEXT = 'the good film is good and the bad film is bad. user assistant system {"stars": 5, "title": null} true false'
MORE = 8  # scores of tokens that the tokenizer does not have: models round their vocabulary up


def save_writer(folder: Path, kind: str = "LlamaForCausalLM") -> str:
    """Save a model and its tokenizer, and return the folder."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT] * 3, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<pad>", chat_template=CHAT
    )
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.5}
    size = len(tokenizer) + MORE
    torch.manual_seed(0)
    if kind == "LlamaForCausalLM":
        layers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        config: Any = transformers.LlamaConfig(**layers, vocab_size=size, max_position_embeddings=512, **tokens)
    else:
        config = transformers.GPT2Config(vocab_size=size, n_embd=32, n_layer=2, n_head=2, n_positions=512, **tokens)
    getattr(transformers, kind)(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
