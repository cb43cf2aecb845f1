"""What keeps strangers out of a run whose workers connect by TCP: a certificate and a secret, both made for this run.

The driver has the key and checks each call; a worker trusts the certificate and sends its token with each call.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from apache_beam.runners.worker.channel_factory import GRPCChannelFactory

from luminosity.engine.fnapi.connection import Connection
from luminosity.extras import require

__all__ = ["SERVER_NAME", "TOKEN_KEY", "TOKEN_PREFIX", "RunSecurity", "WorkerAccess", "secure_channel", "use"]

_LOGGER = logging.getLogger(__name__)

SERVER_NAME = "luminosity"  # the certificate's name; clients expect it whatever address the runner has
TOKEN_KEY = "authorization"  # in the metadata of each call: tools that trace calls know that it is secret
TOKEN_PREFIX = "Bearer "
_SECRET_BYTES = 32  # as long as the digest of SHA-256
_CLOCK_SKEW = datetime.timedelta(days=1)  # a node's clock may be behind that of the runner's machine
# A stream may run for years and replace workers all the time. The key never leaves the runner's memory, so an early
# end would protect nothing.
_VALIDITY = datetime.timedelta(days=3650)

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
_stock_channel: Callable[..., grpc.Channel] = GRPCChannelFactory.insecure_channel


@dataclass(frozen=True)
class WorkerAccess:
    """What one worker needs to connect: the runner's certificate, and the worker's own token."""

    certificate: str  # PEM; the only one that the worker trusts
    token: str = field(repr=False)


class RunSecurity:
    """The certificate, its private key and the secret of one run. Key and secret stay in the runner's process."""

    def __init__(self, certificate: str, key: bytes, secret: bytes) -> None:
        """Use :meth:`create`."""
        self.certificate = certificate
        self._key = key
        self._secret = secret

    def __reduce__(self) -> Any:
        """Refuse to be pickled, so that the key does not get to workers by mistake."""
        raise TypeError("found RunSecurity in something to pickle, expected WorkerAccess: use RunSecurity.access()")

    @classmethod
    def create(cls) -> RunSecurity:
        """Make a key, a certificate that it signs itself, and a secret. Takes about a millisecond."""
        x509: Any = require("cryptography.x509", "ray")
        hashes: Any = require("cryptography.hazmat.primitives.hashes", "ray")
        serialization: Any = require("cryptography.hazmat.primitives.serialization", "ray")
        ec: Any = require("cryptography.hazmat.primitives.asymmetric.ec", "ray")
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, SERVER_NAME)])
        now = datetime.datetime.now(datetime.timezone.utc)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(now + _VALIDITY)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        return cls(
            certificate.public_bytes(pem).decode(),
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
            secrets.token_bytes(_SECRET_BYTES),
        )

    def token(self, worker_id: str) -> str:
        """Return the token of a worker. Tokens of other workers do not follow from it."""
        return hmac.new(self._secret, worker_id.encode(), hashlib.sha256).hexdigest()

    def is_token(self, worker_id: str, token: str) -> bool:
        """Return whether ``token`` is that of the worker. Takes the same time however wrong it is."""
        return hmac.compare_digest(self.token(worker_id).encode(), token.encode(errors="replace"))

    def access(self, worker_id: str) -> WorkerAccess:
        """Return what a worker needs to connect."""
        return WorkerAccess(self.certificate, self.token(worker_id))

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials for the run's gRPC server."""
        return grpc.ssl_server_credentials([(self._key, self.certificate.encode())])

    def guard(self, connection: Callable[[str], Connection | None]) -> grpc.ServerInterceptor:
        """Return what checks each call; ``connection`` returns that of a worker, None if it is not expected."""
        return _Guard(self, connection)


class _Guard(grpc.ServerInterceptor):
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
