"""``TextClassifier``, texts to labels, and ``TokenClassifier``, named entities in texts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import Unpack

from luminosity.errors import InvalidArgument
from luminosity.inference.blocks import Block
from luminosity.inference.handler import HandlerOptions
from luminosity.inference.handlers.on_torch import Batch, Labels, Outputs, likely_labels, names_at
from luminosity.inference.handlers.padding import Array
from luminosity.inference.handlers.text.text_handler import TextHandler
from luminosity.inference.handlers.text.tokens import Lists, flat_values, list_array, offsets_of, texts_of, token_counts

__all__ = ["TextClassifier", "TokenClassifier"]


class TextClassifier(TextHandler[str]):
    """Turns texts into labels, with a sequence classification model of transformers.

    ::

        texts | RunInference(TextClassifier("distilbert-base-uncased-finetuned-sst-2-english"))

    A prediction is ``{"label": "POSITIVE", "score": 0.98, "scores": {"NEGATIVE": 0.02, "POSITIVE": 0.98}}``: the best
    label, its score, and all scores. Scores are probabilities that sum to one. If the model's configuration says
    ``problem_type: multi_label_classification``, or has only one label, each score is a separate probability, and
    ``labels`` lists those of at least ``threshold``. The scores of a regression are its outputs.

    Args:
        path: a folder, on any file system that Beam knows, or a name on the Hugging Face hub.
        threshold: the lowest probability of the labels in ``labels``.
        max_length: the number of tokens at which texts are cut. The default is the model's own.
        device: "auto" (the GPU if this process has one), "CPU", "GPU", "cuda:1" and so on.
        dtype: the type of the weights, such as "bfloat16".
        compile: compile the model, and pad to few different lengths.
        load_model_args: passed to ``from_pretrained`` of transformers.
        options: those of Beam's ``ModelHandler``: ``max_batch_size``, ``large_model``, ``env_vars`` and so on.

    The ``inference_args`` of RunInference are passed to the model.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threshold: float = 0.5,
        max_length: int | None = None,
        device: str = "auto",
        dtype: Any = None,
        compile: bool = False,
        load_model_args: Mapping[str, Any] | None = None,
        **options: Unpack[HandlerOptions],
    ) -> None:
        super().__init__(path, max_length, device, dtype, compile, load_model_args, **options)
        self._threshold = threshold

    @property
    def output_type(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A struct with the fields of a prediction."""
        labels = Labels.of(self.config)
        return self._table(np.zeros((0, len(labels.names)), np.float32), labels).type

    def load_model(self) -> Any:
        """Load the sequence classification model, compiled if ``compile`` is set."""
        return self.compiled(self.load("AutoModelForSequenceClassification"))

    def compute(self, model: Any, batch: Batch, inference_args: dict[str, Any]) -> Any:
        """Return the scores of all labels: softmax, sigmoid if multi-label, or a regression's outputs."""
        logits = self.call(model, batch, inference_args).logits.float()
        labels = Labels.of(model.config)
        return {"scores": labels.scores(logits), "labels": labels}

    def collect(self, outputs: Outputs) -> Block:
        """Return the best label and all scores of each text, with the list ``labels`` if multi-label."""
        return self._table(outputs.values["scores"].numpy(force=True), outputs.values["labels"])

    def _table(self, scores: Array, labels: Labels) -> Any:
        best = scores.argmax(axis=1)
        columns = {
            "label": names_at(labels.names, best),
            "score": pa.array(scores[np.arange(len(scores)), best], pa.float32()),
            "scores": pa.StructArray.from_arrays([pa.array(column) for column in scores.T], list(labels.names)),
        }
        if labels.are_several:
            columns["labels"] = likely_labels(labels.names, scores, self._threshold)
        return pa.StructArray.from_arrays(list(columns.values()), list(columns))


# Kinds of tokens: a special token, the first token of a word, a later token of a word.
_SPECIAL, _BEGINS, _GOES_ON = 0, 1, 2
_ENTITY = pa.struct(
    {"start": pa.int32(), "end": pa.int32(), "text": pa.string(), "label": pa.string(), "score": pa.float32()}
)
STRATEGIES = ("none", "simple", "first", "max", "average")
Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.floating[Any]]


class TokenClassifier(TextHandler[str]):
    """Finds named entities in texts, with a token classification model of transformers.

    ::

        texts | RunInference(TokenClassifier("dslim/bert-base-NER"))

    A prediction is a list of entities in the order of the text, each as
    ``{"start": 11, "end": 17, "text": "Geneva", "label": "LOC", "score": 0.99}``; start and end count characters.

    Args:
        path: a folder, on any file system that Beam knows, or a name on the Hugging Face hub.
        aggregation: how tokens become entities, as in transformers' own pipeline. "simple" joins neighbours with the
            same label. "first", "max" and "average" first choose one label for all tokens of a word: that of the first
            token, of the token with the highest score, or of the mean of all scores. "none" returns every token with
            its label.
        ignore: labels to leave out.
        max_length: the number of tokens at which texts are cut. The default is the model's own. The rest of the text
            has no entities.
        device: "auto" (the GPU if this process has one), "CPU", "GPU", "cuda:1" and so on.
        dtype: the type of the weights, such as "bfloat16".
        compile: compile the model, and pad to few different lengths.
        load_model_args: passed to ``from_pretrained`` of transformers.
        options: those of Beam's ``ModelHandler``: ``max_batch_size``, ``large_model``, ``env_vars`` and so on.
    """

    output_type = pa.list_(_ENTITY)

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        aggregation: Literal["none", "simple", "first", "max", "average"] = "simple",
        ignore: Sequence[str] = ("O",),
        max_length: int | None = None,
        device: str = "auto",
        dtype: Any = None,
        compile: bool = False,
        load_model_args: Mapping[str, Any] | None = None,
        **options: Unpack[HandlerOptions],
    ) -> None:
        super().__init__(path, max_length, device, dtype, compile, load_model_args, **options)
        if aggregation not in STRATEGIES:
            raise InvalidArgument(f"found aggregation={aggregation!r}, expected one of {', '.join(STRATEGIES)}")
        self._aggregation = aggregation
        self._ignore = tuple(ignore)

    def prepare(self, block: Block) -> Block:
        """Tokenise the texts, and keep each token's characters and kind."""
        texts = texts_of(block)
        encodings = self.tokenizer.encodings(texts)
        ids = list_array([encoding.ids for encoding in encodings], np.dtype(np.int32))
        total = len(ids.values)
        places = chain.from_iterable(chain.from_iterable(encoding.offsets for encoding in encodings))
        starts, ends = np.fromiter(places, np.int32, 2 * total).reshape(total, 2).T
        columns = {
            "ids": ids,
            "start": _lists_like(ids, starts),
            "end": _lists_like(ids, ends),
            "kind": _lists_like(ids, _kinds(encodings, ids)),
            "text": pa.array(texts, pa.string()),
        }
        return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))

    def tokens_of(self, prepared: Block) -> Lists:
        """Return the column of token ids."""
        return prepared.column("ids")

    def collate(self, prepared: Block) -> Batch:
        """Pad the token ids, and keep the prepared texts for ``collect``."""
        return replace(super().collate(prepared), host_data=prepared)

    def load_model(self) -> Any:
        """Load the token classification model, compiled if ``compile`` is set."""
        return self.compiled(self.load("AutoModelForTokenClassification"))

    def compute(self, model: Any, batch: Batch, inference_args: dict[str, Any]) -> Any:
        """Return the probabilities of the labels of each token, and the labels."""
        scores = self.call(model, batch, inference_args).logits.float().softmax(dim=-1)
        return {"scores": scores, "labels": list(Labels.of(model.config).names)}

    def collect(self, outputs: Outputs) -> Block:
        """Return the list of entities of each text, without ignored labels."""
        prepared, labels = outputs.batch.host_data, outputs.values["labels"]
        counts = token_counts(prepared.column("ids"))
        kinds = flat_values(prepared.column("kind"))
        own = kinds != _SPECIAL
        scores = outputs.values["scores"].numpy(force=True)
        scores = scores[np.arange(scores.shape[1]) < counts[:, np.newaxis]][own]
        words = words_of(
            np.repeat(np.arange(len(counts)), counts)[own],
            flat_values(prepared.column("start"))[own],
            flat_values(prepared.column("end"))[own],
            (kinds == _GOES_ON)[own],
            scores,
            self._aggregation,
        )
        entities, names = (words, labels) if self._aggregation == "none" else entities_of(words, labels)
        ignored = [index for index, name in enumerate(names) if name in self._ignore]
        return _as_lists(entities.where(~np.isin(entities.label, ignored)), names, prepared.column("text"))


def _kinds(encodings: Sequence[Any], ids: Lists) -> np.ndarray[Any, np.dtype[np.int8]]:
    total = len(ids.values)
    words = chain.from_iterable(encoding.word_ids for encoding in encodings)
    word = np.fromiter((-1 if word is None else word for word in words), np.int32, total)
    special = chain.from_iterable(encoding.special_tokens_mask for encoding in encodings)
    is_special = np.fromiter(special, np.bool_, total)
    goes_on = np.zeros(total, np.bool_)
    goes_on[1:] = (word[1:] == word[:-1]) & (word[1:] >= 0)
    goes_on[ids.offsets.to_numpy()[:-1][token_counts(ids) > 0]] = False  # word numbers start again in each text
    return np.where(is_special, _SPECIAL, np.where(goes_on, _GOES_ON, _BEGINS)).astype(np.int8)


def _lists_like(lists: Lists, values: Any) -> Lists:
    return pa.ListArray.from_arrays(lists.offsets, pa.array(values))


def _as_lists(entities: Entities, names: Sequence[str], texts: Any) -> Lists:
    """Return the list of entities of each text."""
    places = zip(entities.text.tolist(), entities.start.tolist(), entities.end.tolist(), strict=True)
    whole = texts.to_pylist()
    columns = {
        "start": pa.array(entities.start, pa.int32()),
        "end": pa.array(entities.end, pa.int32()),
        "text": pa.array([whole[text][start:end] for text, start, end in places], pa.string()),
        "label": pa.array(names, pa.string()).take(pa.array(entities.label, pa.int64())),
        "score": pa.array(entities.score, pa.float32()),
    }
    offsets = offsets_of(np.bincount(entities.text, minlength=len(texts)).tolist(), len(texts))
    structs = pa.StructArray.from_arrays(list(columns.values()), fields=list(_ENTITY))
    return pa.ListArray.from_arrays(pa.array(offsets), structs)


@dataclass(frozen=True)
class Entities:
    """Sections of texts as arrays, one item per section, ordered by text and position."""

    text: Ints
    """The index of its text."""
    start: Ints
    end: Ints
    label: Ints
    score: Floats

    def where(self, chosen: npt.NDArray[np.bool_]) -> Entities:
        """Return the sections for which ``chosen`` is true."""
        return Entities(self.text[chosen], self.start[chosen], self.end[chosen], self.label[chosen], self.score[chosen])


def words_of(text: Ints, start: Ints, end: Ints, goes_on: npt.NDArray[np.bool_], scores: Floats, how: str) -> Entities:
    """Return tokens, or words, with their best labels.

    "none" and "simple" return tokens; the other strategies choose one label for all tokens of a word. ``goes_on`` is
    true for a token that continues the word of the token before it.
    """
    if how in ("none", "simple") or not len(text):
        return Entities(text, start, end, scores.argmax(axis=1), scores.max(axis=1, initial=0))
    first = np.flatnonzero(~goes_on | _changes(text))
    last = np.append(first[1:], len(text)) - 1
    if how == "average":
        scores = np.add.reduceat(scores, first, axis=0) / (last - first + 1)[:, np.newaxis]
    else:
        scores = scores[first if how == "first" else _best_token(scores, first, last)]
    return Entities(text[first], start[first], end[last], scores.argmax(axis=1), scores.max(axis=1))


def entities_of(words: Entities, labels: Sequence[str]) -> tuple[Entities, list[str]]:
    """Join neighbours of the same kind, unless a label starts with B-; also return the names of the kinds."""
    kinds = sorted({_kind(label) for label in labels})
    kind_of = np.array([kinds.index(_kind(label)) for label in labels])
    begins = np.array([label.startswith("B-") for label in labels])
    if not len(words.text):
        return words, kinds
    kind = kind_of[words.label]
    first = np.flatnonzero(_changes(words.text) | _changes(kind) | begins[words.label])
    last = np.append(first[1:], len(kind)) - 1
    score = np.add.reduceat(words.score, first) / (last - first + 1)
    return Entities(words.text[first], words.start[first], words.end[last], kind[first], score), kinds


def _kind(label: str) -> str:
    """Return the label without its B- or I- prefix.

    >>> _kind("B-PER"), _kind("I-PER"), _kind("O")
    ('PER', 'PER', 'O')
    """
    return label[2:] if label.startswith(("B-", "I-")) else label


def _changes(values: Ints) -> npt.NDArray[np.bool_]:
    """Return where a value differs from the one before it; the first value counts as different.

    >>> _changes(np.array([1, 1, 2]))
    array([ True, False,  True])
    """
    return np.concatenate([[True], values[1:] != values[:-1]])


def _best_token(scores: Floats, first: Ints, last: Ints) -> Ints:
    """Return for each word the token with the highest score, the earlier one if scores are equal."""
    word = np.repeat(np.arange(len(first)), last - first + 1)
    order = np.lexsort((np.arange(len(scores)), -scores.max(axis=1), word))
    return order[first]
