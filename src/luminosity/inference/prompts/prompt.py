"""``Prompt``: a model of chats that takes the rows of a table and returns values of a type."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from apache_beam.ml.inference.base import KeyedModelHandler, MaybeKeyedModelHandler, ModelHandler, PredictionResult

from luminosity._shared.shown_prompts import keep_prompt, prompts_wanted
from luminosity.errors import InvalidArgument, InvalidType
from luminosity.inference.adapting.adapt import adapt, check_handler, without_functions
from luminosity.inference.adapting.wrapping import WrappedHandler
from luminosity.inference.answer_cache import CacheSettings
from luminosity.inference.answer_format import FormatsAnswers
from luminosity.inference.blocks import Block, rows, take
from luminosity.inference.continuous import ContinuousModel
from luminosity.inference.handler import Handler, PartlyFailed
from luminosity.inference.prompts.answers import AnswerType
from luminosity.inference.prompts.asking import Answered, Asking, KnownAnswers, has_seed, is_sampled
from luminosity.inference.prompts.examples import Examples, example_messages
from luminosity.inference.prompts.kept import KeptTexts, TextsInCache, keeper_of, kept_texts
from luminosity.inference.prompts.pictures import is_picture_type, picture_part
from luminosity.inference.prompts.template import Messages, NullValue, Template, check_columns, check_type

__all__ = ["Prompt", "PromptModel"]

_CHAT, _COST, _PREPARED = "chat", "cost", "prepared"
_TEXTS = (pa.string(), pa.large_string(), pa.string_view())
_NO_CHAT: Messages = [{"role": "user", "content": "-"}]  # of a row that is not asked


@dataclasses.dataclass(frozen=True, eq=False)
class PromptModel:
    """A loaded model, and what it has answered in this process."""

    inner: Any
    known: KnownAnswers = dataclasses.field(default_factory=KnownAnswers)
    kept: KeptTexts | None = None
    """Where its texts are kept for other processes and runs."""


class Prompt(WrappedHandler):
    """Asks a model about each row of a table; the answers are values of a type.

    ::

        chat = HttpModelHandler.chat("http://localhost:8000", "llama-3.1-8b")
        table | Enrich(mood=Prompt(chat, "Is this review good or bad? {text}", returns=Literal["good", "bad"]))

    A model in the process can write nothing but such a value; a server is asked for it, and what it sends is checked.
    An answer that can't be read is asked for again, with the reason. If the next one can't be read, either, the row
    fails with ``AnswerError``, which has the text. Equal prompts are asked once, unless you ask for a temperature above
    zero. In ``RunInference``, examples are rows: dicts, Beam Rows, named tuples or dataclasses.

    Args:
        handler: a ``TextGenerator``, ``HttpModelHandler.chat``, or another handler whose examples are lists of
            messages and whose predictions are texts.
        template: the text of the user's message, with the names of columns in braces; ``{{`` and ``}}`` are braces. Or
            a list of messages with roles: ``[{"role": "user", "content": "Classify: {text}"}]``.
        returns: the type of an answer: ``str``, ``int``, ``float``, ``bool``, a ``Literal``, an Enum, a date, a
            dataclass, a TypedDict, a pydantic model, a list of these, one of these or None, a compiled regular
            expression, or a JSON schema as a dict. ``Annotated`` sets bounds.
        system: the text of a message to put before all others.
        examples: rows with their answers, which are shown to the model: a list of pairs of a dict and an answer; or a
            table, or the path of one, whose ``answer_column`` holds the answers.
        answer_column: the column of ``examples`` with the answers, if they are a table.
        retries: how often to ask again after an answer that can't be read.
        nulls: "fail" makes a row fail if a column of the template is null in it; with "keep", its answer is null.
        explain: whether to add a sentence to the first message of the user that says which answers are allowed. The
            default is to do so, unless the examples show every choice.
        pictures: the columns with pictures, as paths or bytes, which follow the text of the last message. Only servers
            of chats take them.
        max_picture_bytes: the largest picture that is sent; larger ones fail, as those do that can't be decoded.
        cache: a folder on each worker's disk that keeps the model's answers, so that no later run asks for them again.
        cache_limit: how much the folder may hold; then the answers that were not used for longest are removed.
    """

    def __init__(
        self,
        handler: ModelHandler[Any, Any, Any],
        template: str | Sequence[Mapping[str, str]],
        *,
        returns: Any = str,
        system: str | None = None,
        examples: Examples | None = None,
        answer_column: str | None = None,
        retries: int = 1,
        nulls: Literal["fail", "keep"] = "fail",
        explain: bool | None = None,
        pictures: Sequence[str] = (),
        max_picture_bytes: int = 20_000_000,
        cache: str | os.PathLike[str] | None = None,
        cache_limit: str | int = "10GB",
    ) -> None:
        check_handler(handler)
        _check_takes_chats(handler)
        if retries < 0:
            raise InvalidArgument(f"found retries={retries}, expected 0 or more")
        if nulls not in ("fail", "keep"):
            raise InvalidArgument(f"found nulls={nulls!r}, expected 'fail' or 'keep'")
        self._answers = AnswerType(returns)
        self._pictures = _checked_pictures(pictures, max_picture_bytes, handler)
        self._max_picture_bytes = max_picture_bytes
        self._template = Template(template, system, has_pictures=bool(self._pictures))
        self._examples: Messages = []
        if examples is not None:
            self._examples = example_messages(examples, answer_column, self._template, self._answers)
        elif answer_column is not None:
            raise InvalidArgument(f"found answer_column={answer_column!r} without examples=")
        if explain is None:
            explain = not self._answers.shown_by(each["content"] for each in self._examples)
        self._instruction = self._answers.instruction if explain else ""
        self._retries = retries
        wanted = self._answers.format
        if wanted is not None and isinstance(handler, FormatsAnswers):
            handler = cast("ModelHandler[Any, Any, Any]", handler.with_answer_format(wanted))
        self._cache = CacheSettings.of(cache, cache_limit)
        if self._cache is not None and isinstance(handler, TextsInCache):
            handler, self._cache = cast("ModelHandler[Any, Any, Any]", handler.with_cache(self._cache)), None
        super().__init__(adapt(handler))
        if self._cache is not None:
            _check_keeps(self._inner, {})
        self.columnar = False
        self.takes_nulls = nulls == "keep"
        # Of a server, so that one process knows what all workers have asked. Ask the class: others import torch for it.
        self.prefers_one_copy = getattr(type(self._inner), "device", None) == "remote"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the prompt takes: those of the template, and those with pictures."""
        return tuple(dict.fromkeys([*self._template.columns, *self._pictures]))

    @property
    def output_type(self) -> pa.DataType:  # type: ignore[override]
        """The Arrow type of the answers."""
        return self._answers.arrow

    def __str__(self) -> str:
        return f"Prompt({self._inner})"

    def validate_inference_args(self, inference_args: dict[str, Any] | None) -> None:
        """Raise if the handler does not take these ``inference_args``, or its answers can't be kept with them."""
        super().validate_inference_args(inference_args)
        if self._cache is not None:
            _check_keeps(self._inner, inference_args or {})

    def check_input_type(self, kind: pa.DataType) -> None:
        """Raise unless a table with these columns has those of the template, and each can be put into a text."""
        if pa.types.is_struct(kind):
            there = [field.name for field in kind]
            check_columns(self.columns, there)
            for name in self.columns:
                self._check_column(name, kind.field(there.index(name)).type)
        else:
            self._check_column(self._only_column(kind), kind)

    def _check_column(self, name: str, kind: pa.DataType) -> None:
        if name in self._template.columns:
            check_type(name, kind)
        elif not is_picture_type(kind):
            raise InvalidType(
                f"the prompt takes pictures of {name!r}, which holds {kind}, expected paths (text) or bytes (binary)"
            )

    def prepare_key(self) -> None:
        """Return None: no other handler prepares rows with this template."""

    def prepare(self, block: Block) -> Block:
        """Return the chat of each row as JSON, its cost, and what the handler has prepared, if Arrow can hold that."""
        chats = [self._chat_of(each) for each in rows(block)]
        prepared = self._inner.prepare([_NO_CHAT if chat is None else chat for chat in chats])
        texts = [None if chat is None else json.dumps(chat, ensure_ascii=False) for chat in chats]
        costs = np.asarray(self._inner.cost(prepared), np.float64)
        columns = {_CHAT: pa.array(texts, pa.string()), _COST: pa.array(costs)}
        if isinstance(prepared, pa.Array):
            columns[_PREPARED] = prepared
        return pa.RecordBatch.from_pydict(columns)

    def cost(self, prepared: Block) -> npt.NDArray[Any]:
        """Return the handler's cost of each prompt."""
        return prepared.column(_COST).to_numpy()

    def collate(self, prepared: Block) -> Block:
        """Return the prompts unchanged: only those that were not asked before are collated."""
        return prepared

    def transfer(self, batch: Block) -> Block:
        """Return the prompts unchanged."""
        return batch

    def load_model(self) -> PromptModel:
        """Load the handler's model."""
        inner = self._inner.load_model()
        model = PromptModel(inner, kept=kept_texts(self._inner, self._cache))
        if isinstance(model.inner, ContinuousModel):  # its thread holds it: it ends with what holds it here
            weakref.finalize(model, model.inner.close).atexit = False
        return model

    def predict(self, model: PromptModel, batch: Block, inference_args: dict[str, Any] | None = None) -> list[Answered]:
        """Ask the prompts that were not asked before, and again those whose answers can't be read."""
        arguments = inference_args or {}
        texts: list[str | None] = batch.column(_CHAT).to_pylist()
        asked = [place for place, text in enumerate(texts) if text is not None]
        asks_each = is_sampled(self._inner, arguments)
        is_kept = not asks_each or (self._cache is not None and has_seed(self._inner, arguments))
        kept = model.kept if is_kept else None
        asking = Asking(self._inner, model.inner, self._answers, self._retries, arguments, kept)

        def ask(places: list[int]) -> list[Answered]:
            chosen = [asked[place] for place in places]
            chats = [cast("Messages", json.loads(cast("str", texts[place]))) for place in chosen]
            is_prepared = _PREPARED in batch.schema.names
            prepared = take(batch.column(_PREPARED), np.array(chosen, np.int64)) if is_prepared else None
            return asking.ask(chats, prepared)

        if asks_each and not is_kept:
            answered = ask(list(range(len(asked)))) if asked else []
        else:
            suffix = repr(sorted(arguments.items()))
            keys = [_digest(f"{texts[place]}{suffix}") for place in asked]
            answered = model.known.answers(keys, ask)
        found = [Answered()] * len(texts)
        for place, each in zip(asked, answered, strict=True):
            found[place] = each
        self._keep_some(texts, found)
        return found

    def _keep_some(self, texts: Sequence[str | None], found: Sequence[Answered]) -> None:
        """Keep some prompts and answers for the end of the run, if the user wants to see them."""
        kind = self._template.kind
        some = [(text, each) for text, each in zip(texts, found, strict=True) if text is not None]
        for text, each in some[: prompts_wanted(kind)]:
            messages = cast("Messages", json.loads(text))
            # Examples and the system's message are the same for all rows: what the user says comes last.
            answer = str(each.value) if each.error is None else f"{type(each.error).__name__}: {each.error}"
            keep_prompt(kind, _shown(messages[-1]["content"]), answer)

    def wait(self, outputs: Any) -> None:
        """Do nothing: ``predict`` has read the answers."""

    def collect(self, outputs: list[Answered]) -> Any:
        """Return the answers as an Arrow array, and the errors of prompts without one."""
        values = pa.array([each.value for each in outputs], self.output_type)
        errors = {place: each.error for place, each in enumerate(outputs) if each.error is not None}
        return PartlyFailed(values, errors) if errors else values

    def result(self, example: Any, value: Any, model_id: str | None, drop_example: bool) -> PredictionResult:
        """Return the answer as a value of the type that ``returns`` names."""
        return PredictionResult(None if drop_example else example, self._answers.typed(value), model_id)

    def run_inference(
        self, batch: Sequence[Any], model: PromptModel, inference_args: dict[str, Any] | None = None
    ) -> list[PredictionResult]:
        """Call all hooks in order, as Beam's own RunInference needs it."""
        found = Handler[Any, Any, Any].run_inference(self, batch, model, inference_args)
        return [self.result(each.example, each.inference, each.model_id, False) for each in found]

    def warm_up(self, model: PromptModel) -> None:
        """Warm up the handler's model."""
        self._inner.warm_up(model.inner)

    def memory(self, model: PromptModel) -> int | None:
        """Return the bytes that the handler's model takes, or None to let the host measure."""
        return self._inner.memory(model.inner)

    def abandon(self, model: PromptModel) -> None:
        """Stop what the handler's model still computes."""
        self._inner.abandon(model.inner)

    def num_examples(self, collated: Any, count: int) -> int:
        """Return the number of rows."""
        return count

    def get_num_bytes(self, batch: Any) -> int:
        """Return the bytes of the prompts, for the metrics."""
        return int(batch.nbytes) if isinstance(batch, pa.RecordBatch) else super().get_num_bytes(batch)

    def _chat_of(self, example: Any) -> Messages | None:
        """Return the messages for a row; None if a column is null and that is kept."""
        row = _row_of(example)
        row = {self._only_column(example): example} if row is None else row
        try:
            messages = self._template.messages(row)
            pictures = self._pictures_of(row)
        except NullValue:
            if self.takes_nulls:
                return None
            raise
        if self._examples:
            before = [each for each in messages if each["role"] in ("system", "developer")]
            messages = [*before, *self._examples, *(each for each in messages if each not in before)]
        messages = self._explained(messages)
        if pictures:
            last = messages[-1]
            parts = [{"type": "text", "text": last["content"]}, *pictures]
            messages = [*messages[:-1], {**last, "content": cast("Any", parts)}]
        return messages

    def _pictures_of(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the pictures of a row as parts of a message. Raises ``NullValue`` if one is null."""
        check_columns(self._pictures, row)
        for name in self._pictures:
            if row[name] is None:
                raise NullValue(f"the prompt takes a picture of {name!r}, which is null", fix="pass nulls='keep'")
        return [picture_part(row[name], name, self._max_picture_bytes) for name in self._pictures]

    def _explained(self, messages: Messages) -> Messages:
        """Return the messages with the sentence about the answers at the end of the first one of the user."""
        if not self._instruction:
            return messages
        place = next(place for place, each in enumerate(messages) if each["role"] == "user")
        first = {"role": "user", "content": f"{messages[place]['content']}\n\n{self._instruction}"}
        return [*messages[:place], first, *messages[place + 1 :]]

    def _only_column(self, example: Any) -> str:
        if len(self.columns) != 1:
            raise InvalidType(
                f"found an example of type {type(example).__name__}, expected a row with the columns "
                f"{', '.join(self.columns)}: a dict, a Beam Row, a named tuple or a dataclass"
            )
        return self.columns[0]


def _check_takes_chats(handler: ModelHandler[Any, Any, Any]) -> None:
    """Raise if the handler has settings without a meaning for the chats of a prompt."""
    if isinstance(without_functions(handler), KeyedModelHandler | MaybeKeyedModelHandler):
        raise InvalidArgument(
            "found a handler of examples with keys, but the chats of a Prompt have none",
            fix="put the KeyedModelHandler around the Prompt",
        )
    if list(handler.get_preprocess_fns()) or list(handler.get_postprocess_fns()):
        raise InvalidArgument(
            f"{type(without_functions(handler)).__name__} has functions before or after it (with_preprocess_fn, "
            "with_postprocess_fn), which a Prompt can't run",
            fix="call with_preprocess_fn or with_postprocess_fn of the Prompt",
        )
    made: pa.DataType | None = getattr(without_functions(handler), "output_type", None)
    if made is not None and made not in _TEXTS:
        raise InvalidType(
            f"found {type(without_functions(handler)).__name__}, whose predictions are {made}, expected a model of "
            "chats, whose predictions are texts",
            fix="use TextGenerator or HttpModelHandler.chat",
        )


def _checked_pictures(columns: Sequence[str], most_bytes: int, handler: ModelHandler[Any, Any, Any]) -> tuple[str, ...]:
    """Return the columns with pictures. Raises ``InvalidArgument`` if the handler takes none."""
    if isinstance(columns, str):
        raise InvalidArgument(f"found pictures={columns!r}, expected a list of columns", fix=f"pass [{columns!r}]")
    if columns and not getattr(without_functions(handler), "takes_pictures", False):
        raise InvalidArgument(
            f"found pictures= for {type(without_functions(handler)).__name__}, which takes texts alone",
            fix="use HttpModelHandler.chat and a server whose model sees",
        )
    if columns and most_bytes < 1:
        raise InvalidArgument(f"found max_picture_bytes={most_bytes}, expected 1 or more")
    return tuple(columns)


def _shown(content: Any) -> str:
    """Return the content of a message as a text.

    >>> _shown([{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "data:..."}}])
    'What is it? [picture]'
    """
    if isinstance(content, str):
        return content
    return " ".join(part.get("text", "[picture]") for part in cast("list[dict[str, str]]", content))


def _check_keeps(handler: Handler[Any, Any, Any], arguments: Mapping[str, Any]) -> None:
    """Raise unless the answers of a model can be kept: it is known what they depend on, and they stay the same."""
    if keeper_of(handler) is None:
        raise InvalidArgument(
            f"found cache= for {handler}, but not what its answers depend on",
            fix="add a method texts_version() to the handler, which returns a text that differs for each version of "
            "the model and its settings, or leave cache= out",
        )
    if is_sampled(handler, arguments) and not has_seed(handler, arguments):
        raise InvalidArgument(
            "found cache= with answers that are sampled and no seed: one answer would stand for many",
            fix="pass a seed, or do_sample=False, or leave cache= out",
        )


def _row_of(example: Any) -> Mapping[str, Any] | None:
    """Return an example as a mapping of columns to values; None if it is the value of the only column."""
    if isinstance(example, Mapping):
        return cast("Mapping[str, Any]", example)
    for name in ("as_dict", "_asdict"):  # Beam's Row, and named tuples
        if hasattr(example, name):
            return getattr(example, name)()
    if dataclasses.is_dataclass(example) and not isinstance(example, type):
        return {each.name: getattr(example, each.name) for each in dataclasses.fields(example)}
    return None


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
