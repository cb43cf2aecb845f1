"""librdkafka's mock cluster: a Kafka in this process, driven through the library inside ``confluent_kafka``."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

from luminosity.errors import InvalidArgument, KafkaError
from luminosity.extras import require

__all__ = ["MockCluster"]

_PRODUCER = 0  # rd_kafka_type_t; the cluster needs any client for its bookkeeping
_ERROR_BYTES = 512  # what librdkafka's own examples reserve for a message
_ALL_BROKERS = -1
_REBALANCE_DELAY_MS = 10  # with 0, a group never gets its partitions

_POINTER, _TEXT, _INT, _INT16, _INT32, _INT64, _SIZE = (
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_int16,
    ctypes.c_int32,
    ctypes.c_int64,
    ctypes.c_size_t,
)
# Name: type of the result, types of the arguments.
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "conf_new": (_POINTER, []),
    "conf_set": (_INT, [_POINTER, _TEXT, _TEXT, _TEXT, _SIZE]),
    "new": (_POINTER, [_INT, _POINTER, _TEXT, _SIZE]),
    "destroy": (None, [_POINTER]),
    "err2name": (_TEXT, [_INT]),
    "mock_cluster_new": (_POINTER, [_POINTER, _INT]),
    "mock_cluster_destroy": (None, [_POINTER]),
    "mock_cluster_bootstraps": (_TEXT, [_POINTER]),
    "mock_group_initial_rebalance_delay_ms": (None, [_POINTER, _INT32]),
    "mock_topic_create": (_INT, [_POINTER, _TEXT, _INT, _INT]),
    "mock_partition_set_leader": (_INT, [_POINTER, _TEXT, _INT32, _INT32]),
    "mock_partition_delete_records": (_INT, [_POINTER, _TEXT, _INT32, _INT64]),
    "mock_broker_set_down": (_INT, [_POINTER, _INT32]),
    "mock_broker_set_up": (_INT, [_POINTER, _INT32]),
    "mock_broker_set_rtt": (_INT, [_POINTER, _INT32, _INT]),
    "mock_push_request_errors_array": (None, [_POINTER, _INT16, _SIZE, ctypes.POINTER(_INT)]),
    "mock_clear_request_errors": (None, [_POINTER, _INT16]),
}


@cache
def _library() -> ctypes.CDLL:
    """Return the library that ``confluent_kafka`` is linked to: its extension module finds the functions in it."""
    return ctypes.CDLL(require("confluent_kafka.cimpl", extra="kafka").__file__)


def _function(name: str) -> Any:
    try:
        function = getattr(_library(), f"rd_kafka_{name}")
    except AttributeError:
        raise KafkaError(
            f"found a confluent-kafka whose library lacks rd_kafka_{name}, expected one with all of the mock cluster",
            fix="upgrade it with: pip install -U confluent-kafka",
        ) from None
    function.restype, function.argtypes = _SIGNATURES[name]
    return function


class MockCluster:
    """Owns a mock cluster: brokers that listen on the loopback address, with records in memory.

    Any thread may call the methods; each returns when the cluster's own thread has done what it asks. ``close`` stops
    the cluster. It also stops when the object is collected and when the process exits.
    """

    def __init__(self, brokers: int) -> None:
        message = ctypes.create_string_buffer(_ERROR_BYTES)
        settings = _function("conf_new")()
        # A client that connects nowhere would say so on standard error.
        _function("conf_set")(settings, b"log_level", b"2", message, _ERROR_BYTES)
        client = _function("new")(_PRODUCER, settings, message, _ERROR_BYTES)
        if not client:
            raise KafkaError(f"librdkafka can't start a client: {message.value.decode(errors='replace')}")
        cluster = _function("mock_cluster_new")(client, brokers)
        if not cluster:
            _function("destroy")(client)
            raise KafkaError(f"librdkafka can't start a mock cluster of {brokers} brokers")
        self._cluster = cluster
        self._close = weakref.finalize(self, _stop, cluster, client, os.getpid())
        self.addresses: str = _function("mock_cluster_bootstraps")(cluster).decode()
        _function("mock_group_initial_rebalance_delay_ms")(cluster, _REBALANCE_DELAY_MS)

    def close(self) -> None:
        """Stop the brokers and drop all records. A second call does nothing."""
        self._close()

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return not self._close.alive

    def check_open(self) -> None:
        """Raise if the cluster is closed."""
        if self.is_closed:
            raise InvalidArgument("found a closed broker, expected one in use", fix="call it inside the with block")

    def create_topic(self, name: str, partitions: int, replicas: int) -> None:
        """Create a topic; an existing one is an error."""
        self._call("mock_topic_create", name.encode(), partitions, replicas)

    def set_leader(self, topic: str, partition: int, broker: int | None) -> None:
        """Move the leadership of a partition to another broker, or to none."""
        self._call("mock_partition_set_leader", topic.encode(), partition, -1 if broker is None else broker)

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Let the partition begin at offset ``before``."""
        self._call("mock_partition_delete_records", topic.encode(), partition, before)

    def stop_broker(self, broker: int | None) -> None:
        """Close the connections of a broker, or of all, and refuse new ones."""
        self._call("mock_broker_set_down", _ALL_BROKERS if broker is None else broker)

    def start_broker(self, broker: int | None) -> None:
        """Accept connections again."""
        self._call("mock_broker_set_up", _ALL_BROKERS if broker is None else broker)

    def set_delay(self, delay_ms: int, broker: int | None) -> None:
        """Send each response of a broker, or of all, this much later."""
        self._call("mock_broker_set_rtt", _ALL_BROKERS if broker is None else broker, delay_ms)

    def push_errors(self, request: int, codes: Sequence[int]) -> None:
        """Answer the next requests of a kind with these errors, one each."""
        self.check_open()
        _function("mock_push_request_errors_array")(self._cluster, request, len(codes), (_INT * len(codes))(*codes))

    def clear_errors(self, request: int) -> None:
        """Forget the errors of a kind of request that no client has received yet."""
        self.check_open()
        _function("mock_clear_request_errors")(self._cluster, request)

    def _call(self, name: str, *arguments: Any) -> None:
        self.check_open()
        code = _function(name)(self._cluster, *arguments)
        if code:
            shown = ", ".join(each.decode() if isinstance(each, bytes) else str(each) for each in arguments)
            reason = _function("err2name")(code).decode()
            raise InvalidArgument(
                f"found {name.removeprefix('mock_')}({shown}), which the mock cluster refuses: {reason}"
            )


def _stop(cluster: int, client: int, pid: int) -> None:
    if os.getpid() != pid:
        return  # A forked process has the object, but not the threads that would stop.
    _function("mock_cluster_destroy")(cluster)
    _function("destroy")(client)
