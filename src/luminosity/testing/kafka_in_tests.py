"""What the Kafkas for tests share: their lifetime, their checks of arguments, and errors of Kafka by name."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn, TypeVar

from luminosity._shared.text import did_you_mean
from luminosity.errors import InvalidArgument, InvalidType
from luminosity.extras import require

__all__ = ["KafkaInTests", "check_partitions", "error_code", "error_codes"]

_Self = TypeVar("_Self", bound="KafkaInTests")


class KafkaInTests(abc.ABC):
    """A Kafka that lives in the process of a test, as a context, and can't be sent to workers."""

    _sent_instead = ("", "")  # what workers can use, in words, and the expression for it

    @abc.abstractmethod
    def close(self) -> None:
        """Stop it. A second call does nothing."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        words, expression = self._sent_instead
        raise InvalidType(
            f"found a {type(self).__name__} in code that goes to workers, expected its {words}",
            fix=f"take {expression} outside of the function",
        )


def check_partitions(partitions: int) -> None:
    """Raise unless a topic can have this number of partitions."""
    if partitions < 1:
        raise InvalidArgument(f"found partitions={partitions}, expected at least 1")


def error_codes(errors: Sequence[str | int]) -> list[int]:
    """Return the numbers of at least one error of ``confluent_kafka.KafkaError``."""
    if not errors:
        raise InvalidArgument("found no errors, expected at least one", fix='pass one, such as "REQUEST_TIMED_OUT"')
    return [error_code(error) for error in errors]


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
