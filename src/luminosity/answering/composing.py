"""From retrieved rows and a model's text to an answer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from luminosity._shared.text import shorten
from luminosity.answering.answer import Answer, Bullet, Outcome, SourceRow
from luminosity.answering.excerpts import sentences_of, words_of
from luminosity.answering.parsing import parse_answer
from luminosity.answering.prompt import PromptStyle
from luminosity.answering.question import Question
from luminosity.answering.retrieval import Retrieved

__all__ = ["compose_answer", "without_model"]

_QUOTE_CHARACTERS = 240  # of a quoted sentence


def compose_answer(question: Question, found: Retrieved, raw: str, style: PromptStyle, quotes: bool) -> Answer:
    """Return the answer from what the model wrote.

    Its format is made here. The model's text gives statements, numbers and questions, never the format.
    """
    parsed = parse_answer(
        raw,
        {row.number: row.text for row in found.rows},
        question.text,
        most_bullets=style.most_bullets,
        most_follow_ups=style.most_follow_ups,
        least_shared=style.least_shared,
    )
    outcome: Outcome = "answered" if parsed.bullets else "not_told"
    bullets = parsed.bullets
    if not bullets and quotes:
        bullets = _quotes(question.text, found.rows, style.most_bullets)
        outcome = "quoted" if bullets else "not_told"
    cited = {number for bullet in bullets for number in bullet.citations}
    return Answer(
        question.text,
        outcome,
        bullets,
        tuple(row for row in found.rows if row.number in cited),
        parsed.follow_ups or _follow_ups(question.text, found.rows, style),
        found.found,
        parsed.citations_removed,
        parsed.citations_unsupported,
        found.withheld,
        question.fields,
        style.rows_name,
    )


def without_model(question: Question, found: Retrieved, style: PromptStyle) -> Answer:
    """Return the answer to a question for which no row was found, or none with text: there is nothing to ask about."""
    return Answer(
        question.text,
        "not_told" if found.found else "no_rows",
        retrieved=found.found,
        withheld=found.withheld,
        fields=question.fields,
        rows_name=style.rows_name,
    )


def _quotes(question: str, rows: Sequence[SourceRow], most: int) -> tuple[Bullet, ...]:
    """Return the sentence of each of the nearest rows that shares most words with the question."""
    wanted = words_of(question)
    bullets: list[Bullet] = []
    for row in rows:
        sentences = [each for each in sentences_of(row.text.strip("… ")) if words_of(each)]
        if sentences:
            best = max(sentences, key=lambda sentence: len(words_of(sentence) & wanted))
            bullets.append(Bullet(shorten(best, _QUOTE_CHARACTERS), (row.number,)))
    return tuple(bullets[:most])


def _follow_ups(question: str, rows: Sequence[SourceRow], style: PromptStyle) -> tuple[str, ...]:
    """Return questions about words that several rows share and the question lacks, for models that suggest none."""
    asked = words_of(question)
    counts = Counter(word for row in rows for word in words_of(row.text))
    words = [
        word
        for word, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        if count > 1 and re.fullmatch(r"[^\W\d_]{4,20}", word) and word not in asked
    ]
    return tuple(f"What do the {style.rows_name} say about “{word}”?" for word in words[: style.most_follow_ups])
