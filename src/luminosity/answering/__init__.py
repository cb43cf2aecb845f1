"""Answer questions from the rows of a vector store, with citations.

``Ask`` is the transform, ``Answerer`` does the same in this process for a few questions, and ``parse_answer`` is the
function that takes a model's text apart.
"""

from __future__ import annotations

from luminosity.answering.answer import Answer, Bullet, Question, SourceRow
from luminosity.answering.answerer import Answerer
from luminosity.answering.ask import Ask
from luminosity.answering.parsing import ParsedAnswer, parse_answer

__all__ = ["Answer", "Answerer", "Ask", "Bullet", "ParsedAnswer", "Question", "SourceRow", "parse_answer"]
