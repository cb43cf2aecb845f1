"""What a chat with a batch API may be asked for, and how the answers in its files are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from luminosity._shared.text import parse_duration
from luminosity.core import InferenceMetrics
from luminosity.errors import InvalidArgument, RemoteModelError
from luminosity.inference.blocks import rows
from luminosity.inference.handler import PartlyFailed, note
from luminosity.inference.handlers.http.batches.model import BatchAnswer
from luminosity.inference.handlers.http.openai_client import Chat
from luminosity.inference.handlers.http.protocol import HttpProtocol, Predictions
from luminosity.inference.handlers.http.retries import RetryableError, check_status
from luminosity.inference.handlers.http.usage import Prices

__all__ = ["SHARE_OF_PRICE", "check_window", "values_of"]

SHARE_OF_PRICE = 0.5
"""What servers take for requests in files, as a share of the usual price."""


def values_of(
    answers: Sequence[BatchAnswer], protocol: HttpProtocol, prices: Prices | None
) -> tuple[list[Any] | PartlyFailed, str | None]:
    """Return the prediction in each answer, or its error, and the server's name of the model. Counts their tokens."""
    values: list[Any] = []
    errors: dict[int, Exception] = {}
    model_id: str | None = None
    for place, answer in enumerate(answers):
        try:
            found = _read(answer, protocol, prices)
        except RemoteModelError as error:
            values.append(None)
            errors[place] = error
        else:
            values.append(rows(found.values)[0])
            model_id = found.model_id or model_id
    return (PartlyFailed(values, errors) if errors else values), model_id


def _read(answer: BatchAnswer, protocol: HttpProtocol, prices: Prices | None) -> Predictions:
    if answer.is_cached:
        note(InferenceMetrics.CACHED_ANSWERS)
    else:
        note(InferenceMetrics.REQUESTS, answer.attempts)
        if answer.attempts > 1:
            note(InferenceMetrics.RETRIES, answer.attempts - 1)
    try:
        check_status(answer.response)
    except RetryableError as error:
        raise RemoteModelError(f"{error}. Sent in {answer.attempts} batches.", may_pass=True) from error
    usage = None if answer.is_cached else protocol.usage(answer.response)
    if usage is not None:
        usage.note(prices)
    return protocol.read(answer.response, 1, None)


def check_window(window: str, protocol: HttpProtocol, has_rates: bool) -> float:
    """Return the seconds of a completion window. Raises ``InvalidArgument`` if requests can't go in files."""
    seconds = parse_duration(window)
    if seconds is None or seconds.total_seconds() <= 0:
        raise InvalidArgument(
            f"found completion_window={window!r}, expected a time that the server knows, such as '24h'"
        )
    if not isinstance(protocol, Chat) or protocol.is_stream:
        raise InvalidArgument(
            "found completion_window= for a server that is not asked for whole answers of chats",
            fix="use HttpModelHandler.chat without stream=True",
        )
    if has_rates:
        raise InvalidArgument(
            "found completion_window= with requests_per_minute or tokens_per_minute, which don't count in files",
            fix="leave them out; max_total_tokens and max_cost hold for files, too",
        )
    return seconds.total_seconds()
