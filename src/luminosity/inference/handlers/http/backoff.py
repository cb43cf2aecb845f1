"""How long to wait before a request is sent again."""

from __future__ import annotations

import random
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

__all__ = ["delay", "retry_after"]

_FIRST_S = 0.5
_MOST_S = 30.0


def delay(tries: int, asked: float | None, dice: random.Random) -> float:
    """Anything up to a bound that doubles with each try, so that those who failed together don't come back together.

    What the server `asked` for is waited in full, and a little more for the same reason.

    >>> delay(1, None, random.Random(0)) <= 0.5, 7 <= delay(1, 7.0, random.Random(0)) <= 7.5
    (True, True)
    """
    bound = min(_MOST_S, _FIRST_S * 2 ** min(tries - 1, 30))
    return dice.uniform(0, bound) if asked is None else asked + dice.uniform(0, _FIRST_S)


def retry_after(header: str | None, now: datetime | None = None) -> float | None:
    """The header `Retry-After` in seconds from now; None where it says nothing that can be read.

    >>> retry_after("12"), retry_after("soon"), retry_after(None)
    (12.0, None, None)
    >>> retry_after("Wed, 21 Oct 2015 07:28:10 GMT", datetime(2015, 10, 21, 7, 28, tzinfo=timezone.utc))
    10.0
    """
    text = (header or "").strip()
    if text.isdecimal():
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    date = date if date.tzinfo else date.replace(tzinfo=timezone.utc)
    return max(0.0, (date - (now or datetime.now(timezone.utc))).total_seconds())
