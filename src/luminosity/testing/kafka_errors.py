"""Errors of Kafka by name, for tests that let requests fail."""

from __future__ import annotations

from luminosity._text import did_you_mean
from luminosity.errors import InvalidArgument
from luminosity.extras import require

__all__ = ["error_code"]


def error_code(error: str | int) -> int:
    """Return the number of an error of ``confluent_kafka.KafkaError``.

    >>> error_code("_TRANSPORT"), error_code(7)
    (-195, 7)
    """
    if isinstance(error, int):
        return error
    kind = require("confluent_kafka", extra="kafka").KafkaError
    code = getattr(kind, error.upper(), None)
    if not isinstance(code, int):
        names = [name for name in dir(kind) if name.lstrip("_").isupper()]
        raise InvalidArgument(
            f"found the error {error!r}, expected a name of confluent_kafka.KafkaError",
            fix=did_you_mean(error, names),
        )
    return code
