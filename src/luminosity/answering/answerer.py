"""Answers to a few questions, in this process: for a command or a notebook. ``Ask`` is for pipelines."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any

from typing_extensions import Unpack

from luminosity.answering.answer import Answer, Question, question_of
from luminosity.answering.parsing import compose_answer, without_model
from luminosity.answering.prompt import messages_of
from luminosity.answering.retrieval import Retrieved, Retriever, rows_for
from luminosity.answering.settings import AskSettings, Options, text_of
from luminosity.errors import LuminosityError
from luminosity.inference.adapting.adapt import adapt

__all__ = ["Answerer"]


class Answerer:
    """Answers questions in this process; models are loaded once, at the first question that needs them.

    Not thread-safe. Use it as a context manager, or call ``close``.

    ::

        with Answerer("store", "reviews") as answerer:
            print(answerer.answer("Is the kettle loud?"))
    """

    def __init__(
        self, where: str | os.PathLike[str], collection: str | None = None, **options: Unpack[Options]
    ) -> None:
        """The arguments are those of :class:`~luminosity.answering.ask.Ask`."""
        self._settings = AskSettings.of(where, collection, options)
        self._retriever = Retriever(self._settings.search)
        self._models: dict[str, Any] = {}

    def __enter__(self) -> Answerer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Release the models and the connection to the store."""
        self._models.clear()
        self._retriever.close()

    def answer(self, question: str | Question) -> Answer:
        """Return the answer to a question. Raises if the question is empty, or the store or a model fails."""
        [answer] = self.answers([question])
        return answer

    def answers(self, questions: Iterable[str | Question], batch_size: int = 8) -> Iterator[Answer]:
        """Yield the answers to several questions in their order; models compute ``batch_size`` of them at once."""
        every = iter(questions)
        while batch := [question_of(each) for each in itertools.islice(every, batch_size)]:
            self._retriever.vectors()  # before a model is loaded: without a store, there is nothing to answer
            yield from self._batch(batch)

    def _batch(self, questions: list[Question]) -> list[Answer]:
        style = self._settings.style
        vectors: list[dict[str, list[float]]] = [{} for _ in questions]
        for name, handler in self._settings.embed.items():
            predicted = self._predict(f"embed {name}", handler, [question.text for question in questions])
            for named, vector in zip(vectors, predicted, strict=True):
                named[name] = [float(number) for number in vector]
        found: list[Retrieved] = []
        for question, hits in zip(questions, self._retriever.search(questions, vectors), strict=True):
            if isinstance(hits, LuminosityError):
                raise hits
            found.append(rows_for(question.text, hits, self._settings.search, self._retriever.id_column))
        pairs = list(zip(questions, found, strict=True))
        prompts = [messages_of(question.text, each.rows, style) for question, each in pairs if each.rows]
        texts = iter(self._predict("generator", self._settings.generator, prompts) if prompts else ())
        return [
            compose_answer(question, each, text_of(next(texts), self._settings.generator), style, self._settings.quotes)
            if each.rows
            else without_model(question, each, style)
            for question, each in pairs
        ]

    def _predict(self, name: str, handler: Any, examples: list[Any]) -> list[Any]:
        model = self._models.get(name)
        if model is None:
            adapted = adapt(handler)
            adapted.check_files()
            model = self._models[name] = (adapted, adapted.load_model())
        adapted, loaded = model
        return [prediction.inference for prediction in adapted.run_inference(examples, loaded)]
