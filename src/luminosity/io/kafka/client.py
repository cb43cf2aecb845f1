"""How to reach the brokers: their addresses, the client's settings, and secrets that no log or plan shows."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from luminosity.errors import InvalidArgument, InvalidType, KafkaError
from luminosity.extras import require

__all__ = ["KafkaClient", "check_place", "describe", "read_secret"]

_LOGGER = logging.getLogger(__name__)

_SECRET = re.compile(r"password|secret|key\.pem$|credential|jaas|user\.?info|token$", re.IGNORECASE)
_PLACES = "'env:NAME' for an environment variable or 'file:PATH' for a file"


class KafkaClient:
    """Addresses and settings of a client, which travel with the pipeline; secrets are read where the client is made.

    ``ReadKafka`` and ``WriteKafka`` take it in the place of addresses, so that several of them can share one. Settings
    that they set themselves, such as ``group.id``, are refused then.

    >>> client = KafkaClient("broker:9092", {"client.id": "reviews"}, {"sasl.password": "env:KAFKA_PASSWORD"})
    >>> client
    KafkaClient('broker:9092')
    >>> os.environ["KAFKA_PASSWORD"] = "hush"
    >>> client.settings()["sasl.password"]
    'hush'
    >>> KafkaClient("broker:9092", {"sasl.password": "hush"})
    Traceback (most recent call last):
    luminosity.errors.InvalidArgument: found 'sasl.password' in config=, where a plan or a log may show it; ...

    Args:
        bootstrap_servers: the addresses of one or more brokers, such as ``"one:9092,two:9092"``, or a list of them.
        config: settings of librdkafka.
        secrets: settings whose values are secret, each as ``"env:NAME"`` or ``"file:PATH"``.
        reserved: settings that the transform makes itself, with the argument to use instead.
    """

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str],
        config: Mapping[str, Any] | None = None,
        secrets: Mapping[str, str] | None = None,
        *,
        reserved: Mapping[str, str] | None = None,
    ) -> None:
        listed = bootstrap_servers.split(",") if isinstance(bootstrap_servers, str) else list(bootstrap_servers)
        addresses = [address.strip() for address in listed]
        if not addresses or not all(addresses):
            raise InvalidArgument(f"found bootstrap_servers={bootstrap_servers!r}, expected one such as 'broker:9092'")
        self._servers = ",".join(addresses)
        self._config = dict(config or {})
        self._secrets = dict(secrets or {})
        _check(self._config, self._secrets, {"bootstrap.servers": "bootstrap_servers=", **(reserved or {})})

    @classmethod
    def of(
        cls,
        bootstrap_servers: str | Sequence[str] | KafkaClient,
        config: Mapping[str, Any] | None,
        secrets: Mapping[str, str] | None,
        reserved: Mapping[str, str],
    ) -> KafkaClient:
        """Return the client that a transform's arguments describe: one that is given, or a new one."""
        if not isinstance(bootstrap_servers, KafkaClient):
            return cls(bootstrap_servers, config, secrets, reserved=reserved)
        if config is not None or secrets is not None:
            raise InvalidArgument(
                "found a KafkaClient with config= or secrets=, expected the client alone",
                fix="pass them to KafkaClient(...)",
            )
        _check_reserved((*bootstrap_servers._config, *bootstrap_servers._secrets), reserved)
        return bootstrap_servers

    @property
    def servers(self) -> str:
        """The addresses of the brokers, joined by commas."""
        return self._servers

    def has(self, name: str) -> bool:
        """Return whether a setting was given."""
        return name in self._config or name in self._secrets

    def number(self, name: str, default: int) -> int:
        """Return a setting that is a number."""
        return int(self._config.get(name, default))

    def settings(self) -> dict[str, Any]:
        """Return all settings, with the secrets. Raises ``KafkaError`` if a secret is missing on this machine."""
        found = {name: read_secret(f"secrets[{name!r}]", place) for name, place in self._secrets.items()}
        return {**self._config, **found, "bootstrap.servers": self._servers}

    def consumer(self, settings: Mapping[str, Any], on_error: Callable[[Any], None]) -> Any:
        """Make a ``confluent_kafka.Consumer``, which the caller closes.

        ``on_error`` gets the client's errors, such as brokers that don't answer, in the thread that polls.
        """
        return self._make("Consumer", settings, on_error)

    def producer(self, settings: Mapping[str, Any], on_error: Callable[[Any], None]) -> Any:
        """Make a ``confluent_kafka.Producer``, which the caller flushes. ``on_error`` is as for :meth:`consumer`."""
        return self._make("Producer", settings, on_error)

    def _make(self, kind: str, settings: Mapping[str, Any], on_error: Callable[[Any], None]) -> Any:
        kafka = require("confluent_kafka", "kafka")
        # What connects to no broker is our report to make; librdkafka's own lines go to the log's debug level.
        ours = {"error_cb": on_error, "logger": _DebugLog()}
        try:
            return getattr(kafka, kind)({**self.settings(), **settings, **ours})
        except kafka.KafkaException as error:
            raise KafkaError(f"the Kafka client refuses its settings: {describe(error.args[0])}") from None
        except TypeError as error:
            raise KafkaError(f"the Kafka client refuses its settings: {error}") from None

    def __repr__(self) -> str:
        return f"KafkaClient({self._servers!r})"


class _DebugLog:
    """A logger that writes every line of librdkafka at the debug level."""

    def log(self, level: int, message: str, *args: Any) -> None:
        del level
        _LOGGER.debug(message, *args)


def describe(error: Any) -> str:
    """Return the words of a ``confluent_kafka.KafkaError``, with its name.

    >>> from confluent_kafka import KafkaError
    >>> describe(KafkaError(KafkaError._ALL_BROKERS_DOWN))
    'Local: All broker connections are down (_ALL_BROKERS_DOWN)'
    """
    return f"{error.str()} ({error.name()})"


def _check(config: Mapping[str, Any], secrets: Mapping[str, str], reserved: Mapping[str, str]) -> None:
    for name, value in config.items():
        if _SECRET.search(name) and isinstance(value, str):
            raise InvalidArgument(
                f"found {name!r} in config=, where a plan or a log may show it",
                fix=f"pass secrets={{{name!r}: ...}} with {_PLACES}",
            )
        if name != "oauth_cb" and not isinstance(value, (str, int, float, bool)):
            raise InvalidType(f"found {name!r} of type {type(value).__name__} in config=, expected a text or a number")
    _check_reserved((*config, *secrets), reserved)
    for name, place in secrets.items():
        check_place(f"secrets[{name!r}]", place)


def _check_reserved(names: Iterable[str], reserved: Mapping[str, str]) -> None:
    for name in names:
        if name in reserved:
            raise InvalidArgument(f"found {name!r} in config=, which the transform sets", fix=f"use {reserved[name]}")


def check_place(argument: str, place: str) -> None:
    """Raise ``InvalidArgument`` if an argument does not say where a secret is.

    >>> check_place("secrets['sasl.password']", "hush")
    Traceback (most recent call last):
    luminosity.errors.InvalidArgument: found no place of a secret in secrets['sasl.password'], expected 'env:NAME' ...
    """
    kind, _, where = str(place).partition(":")
    if kind not in ("env", "file") or not where:
        # The value itself is not shown: it may be the secret.
        raise InvalidArgument(f"found no place of a secret in {argument}, expected {_PLACES}")


def read_secret(argument: str, place: str) -> str:
    """Return a secret from its place. Raises ``KafkaError`` if it is missing; ``argument`` says who wants it."""
    kind, _, where = place.partition(":")
    if kind == "env":
        value = os.environ.get(where)
        if not value:
            raise KafkaError(
                f"the environment variable {where}, which {argument} names, is not set on the worker",
                fix=f"set it before the pipeline starts: export {where}=...",
            )
        return value
    try:
        with open(where, encoding="utf-8") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise KafkaError(f"the file {where}, which {argument} names, can't be read: {reason}") from None
