"""A server that speaks as much of Kafka's protocol as a client needs to be refused."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator

_API_VERSIONS, _HANDSHAKE, _AUTHENTICATE = 18, 17, 36
_UNSUPPORTED_VERSION, _UNSUPPORTED_MECHANISM, _AUTHENTICATION_FAILED = 35, 33, 58
_SUPPORTED = ((_API_VERSIONS, 0, 0), (_HANDSHAKE, 0, 1), (_AUTHENTICATE, 0, 0), (3, 0, 2))


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while head := self.rfile.read(4):
                request = self.rfile.read(struct.unpack(">i", head)[0])
                kind, version, correlation = struct.unpack_from(">hhi", request)
                body = self._answer(kind, version, request)
                self.wfile.write(struct.pack(">ii", 4 + len(body), correlation) + body)

    def _answer(self, kind: int, version: int, request: bytes) -> bytes:
        if kind == _API_VERSIONS:
            code = _UNSUPPORTED_VERSION if version else 0
            listed = b"".join(struct.pack(">hhh", *each) for each in _SUPPORTED)
            return struct.pack(">hi", code, len(_SUPPORTED)) + listed
        if kind == _HANDSHAKE:
            known = request.endswith(b"PLAIN") and not request.endswith(b"-PLAIN")
            return struct.pack(">hi", 0 if known else _UNSUPPORTED_MECHANISM, 1) + _text("PLAIN")
        return struct.pack(">h", _AUTHENTICATION_FAILED) + _text("wrong user or password") + struct.pack(">i", 0)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    address_family = socket.AF_INET


def _text(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


@contextlib.contextmanager
def sasl_broker() -> Iterator[str]:
    """Yield the address of a broker that refuses every client: it knows the mechanism PLAIN, and no password."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(10)
