"""Checks each call of a secured server, and ends the calls of workers that the runner has given up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from luminosity.engine.fnapi.connection import Connection
from luminosity.engine.fnapi.security import TOKEN_KEY, TOKEN_PREFIX, RunSecurity

__all__ = ["Guard"]

_LOGGER = logging.getLogger(__name__)


class Guard(grpc.ServerInterceptor):
    """Lets in calls with the token of a worker that is connected or expected, and ends them with its connection.

    All other calls end at once, before anything that they send is read.
    """

    def __init__(self, security: RunSecurity, connection: Callable[[str], Connection | None]) -> None:
        """``connection`` returns the connection of a worker, None for one that is unknown or disconnected."""
        self._security = security
        self._connection = connection
        self._has_warned = False

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the handler of a call, or one that refuses it. gRPC calls this on the one thread that takes calls."""
        metadata = {key: str(value) for key, value in handler_call_details.invocation_metadata}
        worker_id = metadata.get("worker_id", "")
        if not self._security.is_token(worker_id, metadata.get(TOKEN_KEY, "").removeprefix(TOKEN_PREFIX)):
            return grpc.stream_stream_rpc_method_handler(self._refuse_stranger)
        connection = self._connection(worker_id)
        if connection is None:
            return grpc.stream_stream_rpc_method_handler(_refuse_gone)
        handler = continuation(handler_call_details)
        if handler is None or handler.stream_stream is None:
            return handler
        return grpc.stream_stream_rpc_method_handler(
            _fenced(connection, handler.stream_stream), handler.request_deserializer, handler.response_serializer
        )

    def _refuse_stranger(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True  # once is enough to look into it, and a flood must not fill the log
        _LOGGER.log(level, "refused a call from %s, which is not a worker of this run", context.peer())
        context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            "found no token, or a wrong one, expected the token of the worker in worker_id; "
            "the address of this run's server is for its own workers only",
        )


def _refuse_gone(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "the runner does not expect this worker, or has given it up; end the worker: the runner starts another",
    )


def _fenced(connection: Connection, serve: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Return a handler that serves a stream until its worker's connection closes."""

    def serve_fenced(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        if not connection.enter(context):
            return _refuse_gone(requests, context)
        return serve(connection.while_open(requests), context)

    return serve_fenced
