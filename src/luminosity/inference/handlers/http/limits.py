"""The limits and the budget of a model's server: what each request may take, and what it has taken."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from typing import Any, Literal

from luminosity._shared.model_sizes import NODE_FOLDER_VARIABLE
from luminosity.errors import BudgetReached, InvalidArgument, RemoteModelError
from luminosity.inference.handlers.http.ledger import Ask, Ledger, Most, Refused, Wait
from luminosity.inference.handlers.http.usage import Prices, Usage

__all__ = ["Claim", "Limiter", "RequestLimits", "use_run_budget"]

_LOGGER = logging.getLogger(__name__)
_BYTES_PER_TOKEN = 4  # of most texts; a request that may be larger than the limit must be smaller by this measure
_NANOS = 1_000_000_000
_LARGEST_COST = 1_000_000_000  # as many billionths fit a column of the ledger
_LARGEST_COUNT = 1_000_000_000_000_000


@dataclass(frozen=True)
class RequestLimits:
    """What the user allows; pickled with the handler. All workers of a run share it."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_total_tokens: int | None = None
    max_cost: float | None = None
    prices: Prices | None = None
    window_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute", "max_total_tokens", "max_cost"):
            _check_limit(name, getattr(self, name), is_cost=name == "max_cost")
        if self.max_cost is not None and self.prices is None:
            raise InvalidArgument(
                "found max_cost without prices", fix="pass what a million tokens cost: prices=(of_prompts, of_new)"
            )

    @property
    def of_tokens(self) -> list[str]:
        """The names of the limits that are set and need to know how many tokens a request may take."""
        return [name for name in ("tokens_per_minute", "max_total_tokens", "max_cost") if getattr(self, name)]

    @property
    def names(self) -> list[str]:
        """The names of all limits that are set."""
        return [*(["requests_per_minute"] if self.requests_per_minute else []), *self.of_tokens]

    def check_run_budget(self, max_cost: float, account: str) -> None:
        """Raise ``InvalidArgument`` if the cost of tokens is not known."""
        if self.prices is None:
            raise InvalidArgument(
                f"found --max_cost={max_cost:g}, but no prices for the tokens of {account}",
                fix="pass them to its handler: prices=(of_prompts, of_new), for a million tokens, or prices=FILE",
            )

    def check_tokens(self, counts_tokens: bool, most_new: int | None) -> None:
        """Raise ``InvalidArgument`` if a limit of tokens is set, and nothing bounds a request's tokens."""
        names = self.of_tokens or (["--max_cost"] if counts_tokens and _run_budget["max_cost"] is not None else [])
        if not names:
            return
        if not counts_tokens:
            raise InvalidArgument(
                f"found {names[0]}, but this protocol's server does not count tokens",
                fix="use requests_per_minute, or another protocol",
            )
        if most_new is None:
            raise InvalidArgument(
                f"found {names[0]} without max_tokens: an answer may take any number of tokens",
                fix='pass the most tokens of an answer: parameters={"max_tokens": 200}',
            )


def _check_limit(name: str, value: Any, is_cost: bool) -> None:
    """Raise ``InvalidArgument`` unless a limit is None or a number above 0 that the ledger can hold."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float if is_cost else int):
        raise InvalidArgument(f"found {name}={value!r}, expected {'a number' if is_cost else 'a whole number'}")
    largest = _LARGEST_COST if is_cost else _LARGEST_COUNT
    if not 0 < value <= largest:
        raise InvalidArgument(f"found {name}={value!r}, expected more than 0, and at most {largest:,}")


class Limiter:
    """Lets a request go when the limits have room for all that it may take. Any number of threads may use it."""

    def __init__(self, limits: RequestLimits, account: str, counts_tokens: bool, folder: str | None = None) -> None:
        """Open the ledgers.

        ``account`` is the endpoint and the model, for which all handlers of a run are counted together; for the limits
        of a minute those of all runs with the same ``folder``, so that a run that starts again waits.
        """
        self._limits = limits
        self._account = account
        run_budget = _run_budget["max_cost"]
        names = [*limits.names, *(["--max_cost"] if run_budget is not None else [])]
        if names and os.environ.get(NODE_FOLDER_VARIABLE):
            raise InvalidArgument(
                f"found {names[0]} on a cluster, where each node would have the whole limit to itself",
                fix="run on one machine, without --ray_address: waiting for a server takes few cores",
            )
        if run_budget is not None and counts_tokens:
            limits.check_run_budget(run_budget, account)
        rates = limits.requests_per_minute, limits.tokens_per_minute
        has_folder = folder is not None and rates != (None, None)
        self._most = Most(
            *((None, None) if has_folder else rates),
            limits.window_s,
            limits.max_total_tokens,
            None if limits.max_cost is None else int(limits.max_cost * _NANOS),
            None if run_budget is None else int(run_budget * _NANOS),
        )
        self._ledger = Ledger.of_run() if names else None
        self._most_of_minute = Most(*rates, limits.window_s)
        self._of_minute = Ledger.in_folder(folder) if folder is not None and has_folder else None
        self._has_warned = False

    def claim(
        self, num_bytes: int, most_new: int, seconds: float, name: str = "", since: float = math.inf
    ) -> Claim | float:
        """Reserve what a request may take, or return the seconds to wait before the next try.

        ``name`` is of the request, which waits ``since`` a time of ``time.monotonic()``.

        A text has at most as many tokens as bytes, whatever the tokenizer, and the request's body holds more than the
        text. Raises ``BudgetReached`` if a budget has no room.
        """
        usage = Usage(num_bytes, most_new)
        if self._ledger is None:
            return Claim(self, None, usage)
        ask = self._ask(usage, seconds, name, since)
        found = self._ledger.take(self._account, ask, self._most)
        if isinstance(found, Refused):
            raise self._reached(found)
        if isinstance(found, Wait):
            return found.seconds
        if self._of_minute is None:
            return Claim(self, found, usage)
        of_minute = self._of_minute.take(self._account, ask, self._most_of_minute)
        if isinstance(of_minute, int):
            return Claim(self, found, usage, of_minute)
        self._ledger.give_back(found)
        assert isinstance(of_minute, Wait), "a minute has no budget"
        return of_minute.seconds

    def settle(self, number: int | None, usage: Usage, of_minute: int | None = None) -> None:
        """End a reservation with what the request has taken. If it can't be ended, it counts in full, with a warning.

        The answer that the request got is paid for, and must not be lost.
        """
        if self._ledger is None or number is None:
            return
        try:
            self._ledger.settle(number, usage.tokens, self._nanos(usage), self._limits.window_s)
            if self._of_minute is not None and of_minute is not None:
                self._of_minute.settle(of_minute, usage.tokens, 0, self._limits.window_s)
        except RemoteModelError as error:
            if not self._has_warned:
                self._has_warned = True
                _LOGGER.warning("%s. Requests count as if they had taken all that they might have.", error)

    @property
    def prices(self) -> Prices | None:
        """The prices of tokens, if they are known."""
        return self._limits.prices

    def _ask(self, usage: Usage, seconds: float, name: str, since: float) -> Ask:
        tokens, most = usage.tokens, self._limits.tokens_per_minute
        if most is not None and tokens > most:
            likely = usage.prompt_tokens // _BYTES_PER_TOKEN + usage.new_tokens
            if likely > most:
                raise RemoteModelError(
                    f"found a request of about {likely:,} tokens with its answer, more than tokens_per_minute={most:,}",
                    fix="pass a larger tokens_per_minute, a smaller max_tokens, or shorter prompts",
                )
            tokens = most  # it goes alone
        return Ask(tokens, self._nanos(usage), seconds, name, since)

    def _nanos(self, usage: Usage) -> int:
        return 0 if self.prices is None else self.prices.nanos(usage)

    def _reached(self, refused: Refused) -> BudgetReached:
        limits, name = self._limits, refused.budget
        if name == "max_total_tokens":
            spent, budget = f"{refused.spent:,} tokens", f"{limits.max_total_tokens:,}"
        else:
            currency = "" if self.prices is None or not self.prices.currency else f" {self.prices.currency}"
            spent = f"{refused.spent / _NANOS:.6g}{currency}"
            budget = f"{_run_budget['max_cost'] if name == '--max_cost' else limits.max_cost:g}{currency}"
        return BudgetReached(
            f"the budget {name}={budget} of {self._account} is reached: {spent} spent, and another request might take "
            "more than the rest",
            fix=f"pass a larger {name}, and cache=FOLDER, so that a rerun pays for no answer again",
        )


class Claim:
    """What one attempt of a request may take. Counts as taken in full unless it is settled."""

    def __init__(self, limiter: Limiter, number: int | None, most: Usage, of_minute: int | None = None) -> None:
        self._limiter = limiter
        self._number = number
        self._of_minute = of_minute
        self.most = most
        self._is_settled = False

    def took(self, usage: Usage | None) -> None:
        """Settle for what the server says it has counted; for all that was reserved if it says nothing."""
        self._settle(self.most if usage is None else usage)

    def took_nothing(self) -> None:
        """Settle for a request that the server has not answered with anything that costs."""
        self._settle(Usage(0, 0))

    def _settle(self, usage: Usage) -> None:
        if not self._is_settled:
            self._is_settled = True
            self._limiter.settle(self._number, usage, self._of_minute)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *error: object) -> Literal[False]:
        self.took(None)
        return False


_run_budget: dict[str, float | None] = {"max_cost": None}


def use_run_budget(max_cost: float | None) -> None:
    """Set the value of ``--max_cost`` for the models that this process loads from now on."""
    _run_budget["max_cost"] = max_cost
