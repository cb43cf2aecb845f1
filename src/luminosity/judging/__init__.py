"""Score texts with models before ``Evaluate``: an embedding model, and a judge with a rubric.

``ScoreTexts`` is the transform, ``Judge`` says what a judge is asked, and ``read_verdict`` reads what it has written.
"""

from __future__ import annotations

from luminosity.judging.score_texts import ScoreTexts
from luminosity.judging.verdict import Judge, read_verdict

__all__ = ["Judge", "ScoreTexts", "read_verdict"]
