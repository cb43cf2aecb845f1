"""From retrieved rows and what a model wrote to an answer. Nothing here runs a model or looks at a store."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from luminosity._shared.text import shorten
from luminosity.answering.answer import Answer, Bullet, Outcome, Question, SourceRow
from luminosity.answering.excerpts import clean, is_instruction, sentences_of, shared_share, words_of
from luminosity.answering.prompt import PromptStyle
from luminosity.answering.retrieval import Retrieved

__all__ = ["ParsedAnswer", "compose_answer", "parse_answer", "without_model"]

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


_MOST_CHARACTERS = 40_000  # of a model's text that are read: some 10,000 tokens, far more than an answer has
_BULLET_CHARACTERS = 400  # of a bullet: a model that writes more has not understood, and a reader does not read it
_FOLLOW_UP_CHARACTERS = 200
_LONGEST_RANGE = 20  # of [1-3]: a longer one cites everything, so nothing
_THOUGHTS = re.compile(r"<(think|thinking|reasoning)>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_TERMINAL_CODE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|.)")
_SOURCES_TITLE = re.compile(r"^[\W_]*(?:sources?|references?|citations?|cited\s+\w+)[\W_]*$", re.IGNORECASE)
_BULLET = re.compile(r"^\s*(?:[-*•‣\u2013\u2014·]+|\(?\d{1,2}[.)])\s+")
_FOLLOW_UP_LINE = re.compile(r"^\s*(?:[-*•]\s*)?(?:Q\d*[:.]|Question\s*\d*:|\?)\s*")
_ANSWER_TITLE = re.compile(r"^(?:Answer|A)\s*\d*:\s*")
_NOT_TOLD = re.compile(r"(?:not told|(?:the )?\w+ do(?:es)? not tell)")  # as the prompt asks for, and as answers say it
_FOLLOW_UP_TITLE = re.compile(r"^[\W_]*(?:follow.?ups?|further|more|other)\b[^?]{0,40}\bquestions?\b", re.IGNORECASE)
_NUMBERS = r"\#?\d{1,40}(?:\s*(?:,|;|&|and|[-\u2013])\s*(?:(?:reviews?|rows?|source)\s*)?\#?\d{1,40})*"
_OPEN, _CLOSE = r"[\[【\uff3b]", r"(?:†[^\]】\uff3d]{0,40})?[\]】\uff3d]"  # 【1†source】 is a habit of some models
_CITATION = re.compile(
    rf"(?:{_OPEN}|\()\s*\^?(?:reviews?|rows?|sources?|no\.?)\s*:?\s*({_NUMBERS})\s*(?:{_CLOSE}|\))"
    rf"|{_OPEN}\s*\^?({_NUMBERS})\s*{_CLOSE}",
    re.IGNORECASE,
)
_PART = re.compile(r"(\d{1,40})(?:\s*[-\u2013]\s*\#?(\d{1,40}))?")
_LEFTOVER = re.compile(r"[\[\]【】\uff3b\uff3d]")
_EMPHASIS = re.compile(r"\*\*|__|`+")


@dataclass(frozen=True)
class ParsedAnswer:
    """What a model's text holds: bullets whose citations all resolve, further questions, and what was removed."""

    bullets: tuple[Bullet, ...] = ()
    follow_ups: tuple[str, ...] = ()
    citations_removed: int = 0
    """Citations of rows that the model was not given."""
    citations_unsupported: int = 0
    """Citations of rows that have too few of the statement's words."""
    statements_removed: int = 0
    """Statements without a citation that resolves, repeated ones, and those beyond the limit."""


def parse_answer(
    raw: str,
    rows: Mapping[int, str],
    question: str = "",
    *,
    most_bullets: int = 5,
    most_follow_ups: int = 3,
    least_shared: float = 0.0,
) -> ParsedAnswer:
    """Return the parts of an answer. ``rows`` are the texts that the model was given, by number.

    A statement counts only with a citation that resolves. Models that don't write bullets are read sentence by
    sentence.

    >>> rows = {1: "The lid leaks.", 2: "A blue kettle."}
    >>> found = parse_answer("Sure!\\n- The lid leaks [1][9].\\n- It is blue.\\n? Is it loud?", rows)
    >>> found.bullets, found.follow_ups
    ((Bullet(text='The lid leaks.', citations=(1,)),), ('Is it loud?',))
    >>> found.citations_removed, found.statements_removed
    (1, 2)

    Args:
        raw: the model's text.
        rows: the texts of the rows, by the number that the prompt gives them.
        question: the question, which is not suggested again.
        most_bullets: further bullets are removed.
        most_follow_ups: further questions are removed.
        least_shared: the least share of a statement's words that a row must have to be cited for it.
    """
    bullets: list[Bullet] = []
    follow_ups: list[str] = []
    removed = unsupported = dropped = 0
    seen: set[str] = {_plain(question)}
    in_follow_ups = False
    for line in _lines(raw):
        if _SOURCES_TITLE.match(line):
            break  # the model lists the rows, which the answer does itself
        if _FOLLOW_UP_TITLE.match(line):
            in_follow_ups = True
            continue
        if (asked := _follow_up(line, in_follow_ups)) is not None:
            if asked and _plain(asked) not in seen and len(follow_ups) < most_follow_ups:
                follow_ups.append(asked)
                seen.add(_plain(asked))
            continue
        for statement in _statements(line):
            cited, missing = _citations(statement, rows)
            removed += missing
            text = _statement_text(statement)
            supported = tuple(number for number in cited if shared_share(text, rows[number]) >= least_shared)
            unsupported += len(cited) - len(supported)
            tells = _has_words(text) and not is_instruction(text) and not _NOT_TOLD.fullmatch(_plain(text))
            is_useful = supported and tells and _plain(text) not in seen
            if not is_useful or len(bullets) >= most_bullets:
                dropped += 1
            else:
                seen.add(_plain(text))
                bullets.append(Bullet(text, supported))
    return ParsedAnswer(tuple(bullets), tuple(follow_ups), removed, unsupported, dropped)


def _lines(raw: str) -> list[str]:
    text = _THOUGHTS.sub("\n", _TERMINAL_CODE.sub("", raw[:_MOST_CHARACTERS])).replace("\x00", "")
    return [line for line in text.splitlines() if line.strip()]


def _follow_up(line: str, in_follow_ups: bool) -> str | None:
    """Return a line's question, an empty text if it has none to show, or None if the line is no further question."""
    marked = _FOLLOW_UP_LINE.match(line)
    text = clean(_EMPHASIS.sub("", _BULLET.sub("", _FOLLOW_UP_LINE.sub("", line, count=1))))
    if not (marked or in_follow_ups or text.endswith("?")) or (not text.endswith("?") and not marked):
        return None
    if _CITATION.search(line):
        return None if not marked else ""
    if not text.endswith("?") or len(text) > _FOLLOW_UP_CHARACTERS or is_instruction(text) or not _has_words(text):
        return ""
    return text


def _statements(line: str) -> list[str]:
    """Return a bullet as it is, and the sentences of another line, each with the citations behind its full stop."""
    if _BULLET.match(line):
        return [_BULLET.sub("", line, count=1)]
    found: list[str] = []
    for sentence in sentences_of(line):
        if found and not _CITATION.sub("", sentence).strip(" .,;"):
            found[-1] += f" {sentence}"
        elif found and (start := _CITATION.match(sentence)):
            found[-1] += f" {start[0]}"
            found.append(sentence[start.end() :])
        else:
            found.append(sentence)
    return found


def _citations(statement: str, numbers: Container[int]) -> tuple[tuple[int, ...], int]:
    """Return the citations that resolve, each once, and how many do not."""
    cited: dict[int, None] = {}
    missing = 0
    for match in _CITATION.finditer(statement):
        for first, last in _PART.findall(match[1] or match[2]):
            low, high = int(first), int(last or first)
            if not low <= high < low + _LONGEST_RANGE:
                missing += 1
                continue
            for number in range(low, high + 1):
                if number in numbers:
                    cited[number] = None
                else:
                    missing += 1
    return tuple(cited), missing


def _statement_text(statement: str) -> str:
    text = _ANSWER_TITLE.sub("", _EMPHASIS.sub("", _CITATION.sub(" ", statement)))
    text = clean(_LEFTOVER.sub(" ", text))
    text = re.sub(r"\s+([.,;:!?])", r"\1", text).strip(" ,;:-")
    return shorten(re.sub(r"([.!?])[.,;]+$", r"\1", text), _BULLET_CHARACTERS)


def _has_words(text: str) -> bool:
    return any(character.isalpha() for character in text)


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))
