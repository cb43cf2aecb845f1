"""The channels of a worker whose runner is on another machine: by TLS, with the worker's token and signs of life."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from apache_beam.runners.worker.channel_factory import GRPCChannelFactory

from luminosity.engine.fnapi.security import SERVER_NAME, TOKEN_KEY, TOKEN_PREFIX, WorkerAccess

__all__ = ["secure_channel", "use"]

_LOGGER = logging.getLogger(__name__)

# The machine of the runner may vanish without a word. A worker asks for a sign of life after so much silence, and its
# streams break if none comes: its harness then ends, after 40 s at most. That is longer than the server takes to find a
# frozen worker, so a runner that was frozen for a moment keeps its workers.
_SILENCE_MS = 20_000
_ANSWER_MS = 20_000
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", _SILENCE_MS),
    ("grpc.keepalive_timeout_ms", _ANSWER_MS),
    ("grpc.http2.ping_timeout_ms", _ANSWER_MS),  # gRPC waits for the longer one of the two, and this is a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.ssl_target_name_override", SERVER_NAME),
    # A proxy of the environment is for the internet; nodes of a cluster reach each other.
    ("grpc.enable_http_proxy", 0),
    # gRPC would send messages of a broken stream again, which the runner may have received already.
    ("grpc.enable_retries", 0),
]

_Channel = Callable[..., grpc.Channel]
_stock_channel: _Channel = GRPCChannelFactory.insecure_channel


def use(access: WorkerAccess, url: str) -> None:
    """Let all channels that Beam's harness opens to ``url`` be secure. Call it before the harness is made.

    Channels to other places stay as they are, and never get the token.
    """
    streams = _Streams(access.token)

    def channel(target: str, options: Any = None) -> grpc.Channel:
        if target != url:
            return _stock_channel(target, options)
        # Not with Beam's options, which say how to retry and wait five minutes for signs of life.
        return secure_channel(access, url, streams)

    # Beam's modules import the class by name; all of them call this attribute.
    GRPCChannelFactory.insecure_channel = staticmethod(channel)


def secure_channel(access: WorkerAccess, url: str, streams: _Streams | None = None) -> grpc.Channel:
    """Return a channel to the runner at ``url``. It trusts no certificate but that of ``access``."""
    credentials = grpc.ssl_channel_credentials(root_certificates=access.certificate.encode())
    channel = grpc.secure_channel(url, credentials, options=_OPTIONS)
    return grpc.intercept_channel(channel, streams or _Streams(access.token))


class _CallDetails(grpc.ClientCallDetails):
    """The details of a call, with more metadata."""

    def __init__(self, details: Any, *metadata: tuple[str, str]) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.credentials = details.credentials
        self.metadata = (*(details.metadata or ()), *metadata)


class _Streams(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Adds the token to each call, and ends the worker when one of its streams breaks.

    Beam's harness ends with the control stream. With a broken data or state stream it would go on and fail every
    bundle, so the control stream is cancelled. Beam opens a broken log stream again.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._lock = threading.Lock()
        self._control: Any = None
        self._is_broken = False

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Make a call with the token."""
        return continuation(self._with_token(client_call_details), request)

    def intercept_stream_stream(
        self, continuation: Any, client_call_details: Any, request_iterator: Iterator[Any]
    ) -> Any:
        """Open a stream with the token, and watch it."""
        call = continuation(self._with_token(client_call_details), request_iterator)
        name = client_call_details.method.rpartition("/")[2]
        if name == "Control":
            with self._lock:
                self._control = call
                is_broken = self._is_broken
            if is_broken:
                call.cancel()
        elif name != "Logging" and not call.add_callback(lambda: self._ended(name, call)):
            self._ended(name, call)
        return call

    def _with_token(self, details: Any) -> _CallDetails:
        return _CallDetails(details, (TOKEN_KEY, TOKEN_PREFIX + self._token))

    def _ended(self, name: str, call: Any) -> None:
        if call.code() == grpc.StatusCode.OK:
            return
        with self._lock:
            is_first, self._is_broken = not self._is_broken, True
            control = self._control
        if control is not None and control.is_active():
            if is_first:
                reason = f"{call.code().name}: {call.details()}"
                _LOGGER.warning("the %s stream to the runner broke, so this worker ends: %s", name.lower(), reason)
            control.cancel()
