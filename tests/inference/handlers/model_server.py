"""A real HTTP server on this machine, whose responses a test scripts."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class Seen:
    """A request that the server received."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    number: int

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Said:
    """A response of the server."""

    body: Any = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    drip_s: float = 0.0
    """Seconds between the bytes."""
    breaks_off: bool = False
    """Whether the connection ends in the middle of the body."""

    @property
    def bytes(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


Script = Callable[[Seen], Said]


class ModelServer:
    """Responds to each request with ``script``; records all requests, and how many there were at once."""

    def __init__(self, script: Script, port: int = 0) -> None:
        self.script = script
        self.seen: list[Seen] = []
        self.peak = 0
        self.connections = 0
        self.stopped = threading.Event()
        """Set at the end; a script that hangs waits for it."""
        self._now = 0
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30

            def setup(self) -> None:
                super().setup()
                server.connections += 1
                with server._lock:
                    server._sockets.add(self.connection)

            def finish(self) -> None:
                with server._lock:
                    server._sockets.discard(self.connection)
                super().finish()

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                with server._lock:
                    seen = Seen(self.command, self.path, dict(self.headers.items()), body, len(server.seen))
                    server.seen.append(seen)
                    server._now += 1
                    server.peak = max(server.peak, server._now)
                try:
                    said = server.script(seen)
                finally:
                    with server._lock:
                        server._now -= 1
                self.send_response(said.status)
                for name, value in said.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(said.bytes)))
                self.end_headers()
                if said.breaks_off:
                    self.wfile.write(said.bytes[: len(said.bytes) // 2])
                    self.close_connection = True
                    return
                if not said.drip_s:
                    self.wfile.write(said.bytes)
                    return
                for byte in said.bytes:
                    self.wfile.write(bytes([byte]))
                    if server.stopped.wait(said.drip_s):
                        return

            do_POST = do_GET = handle_any

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing."""

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Ignore clients that disconnect: some tests do so on purpose."""

        self._make = lambda port: Server(("127.0.0.1", port), Handler)
        self.http = self._make(port)
        self.scheme = "http"
        self._thread: threading.Thread | None = None

    def listen(self) -> None:
        """Answer in a thread."""
        poll = {"poll_interval": 0.05}
        self._thread = threading.Thread(target=self.http.serve_forever, kwargs=poll, daemon=True)
        self._thread.start()

    def stop_listening(self) -> None:
        """Take no new connections."""
        self.http.shutdown()
        self.http.server_close()
        if self._thread is not None:
            self._thread.join(10)

    def restart(self, down_s: float) -> None:
        """Break off all connections, with what is under way, and listen again at the same address after some time."""
        self.stop_listening()
        with self._lock:
            broken = list(self._sockets)
        for each in broken:
            with contextlib.suppress(OSError):  # the client has closed it meanwhile
                each.shutdown(socket.SHUT_RDWR)
        time.sleep(down_s)
        self.http = self._make(self.http.server_address[1])
        self.listen()

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.http.server_address[1]}"

    @property
    def posts(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.method == "POST"]


@contextlib.contextmanager
def serving(script: Script, certificate: Path | None = None, port: int = 0) -> Iterator[ModelServer]:
    server = ModelServer(script, port)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.http.socket = context.wrap_socket(server.http.socket, server_side=True, do_handshake_on_connect=False)
        server.scheme = "https"
    server.listen()
    try:
        yield server
    finally:
        server.stopped.set()
        server.stop_listening()


def self_signed(folder: Path) -> Path:
    """Write a key and a certificate for this machine into one file."""
    key, certificate, both = folder / "key.pem", folder / "certificate.pem", folder / "both.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(
        [*command.split(), *names, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60
    )
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    return both


def vector_of(text: str) -> list[float]:
    """Return the vector that the test servers compute for a text."""
    return [float(len(text)), float(text.count("a")), 0.5]


def embeddings(seen: Seen, base64_too: bool = True) -> Said:
    """Respond like OpenAI's servers, with vectors in another order than the texts, as their indices say."""
    asked = seen.json
    data = []
    for index, text in enumerate(asked["input"]):
        vector: Any = vector_of(text)
        if base64_too and asked.get("encoding_format") == "base64":
            vector = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        data.append({"object": "embedding", "index": index, "embedding": vector})
    return Said({"object": "list", "data": data[::-1], "model": f"{asked['model']}-2026", "usage": {}})


def chat(seen: Seen) -> Said:
    asked = seen.json
    text = asked["messages"][-1]["content"].upper() + f" at {asked.get('temperature')}"
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return Said({"object": "chat.completion", "choices": [choice], "model": asked["model"]})


def kserve(seen: Seen, binary: bool = True) -> Said:
    """Serve a model ``sums`` with the inputs ``x`` and ``scale``, and a model ``shout`` with text."""
    if seen.path == "/v2":
        return Said({"name": "tests", "version": "1", "extensions": ["binary_tensor_data"] if binary else []})
    name = seen.path.split("/")[3]
    inputs = {"sums": [("x", "FP32", [-1, 3]), ("scale", "INT32", [-1, 1])], "shout": [("text", "BYTES", [-1])]}
    if name not in inputs:
        return Said({"error": f"Request for unknown model: '{name}' is not found"}, status=400)
    if not seen.path.endswith("/infer"):
        described = [dict(zip(("name", "datatype", "shape"), each, strict=True)) for each in inputs[name]]
        return Said({"name": name, "versions": ["3"], "platform": "python", "inputs": described, "outputs": []})
    values = _tensors(seen)
    if name == "shout":
        outputs = {"loud": [text.upper() for text in values["text"]]}
    else:
        total = values["x"].sum(axis=1, dtype=np.float32) * values["scale"][:, 0]
        outputs = {"total": total.astype(np.float32), "halves": (values["x"] / 2).astype(np.float32)}
    wanted = [output["name"] for output in _header(seen).get("outputs", [])] or list(outputs)
    return _answer(name, {each: outputs[each] for each in wanted}, binary)


def _header(seen: Seen) -> Any:
    return json.loads(seen.body[: int(seen.headers.get("Inference-Header-Content-Length", len(seen.body)))])


def _tensors(seen: Seen) -> dict[str, Any]:
    header = _header(seen)
    rest = seen.body[int(seen.headers.get("Inference-Header-Content-Length", 0)) :]
    values: dict[str, Any] = {}
    for tensor in header["inputs"]:
        data = tensor.get("data")
        if data is None:
            size = tensor["parameters"]["binary_data_size"]
            data, rest = rest[:size], rest[size:]
        if tensor["datatype"] == "BYTES":
            values[tensor["name"]] = _texts(data) if isinstance(data, bytes) else data
        else:
            kind = {"FP32": "<f4", "INT32": "<i4"}[tensor["datatype"]]
            array = np.frombuffer(data, kind) if isinstance(data, bytes) else np.array(data, kind)
            values[tensor["name"]] = array.reshape(tensor["shape"])
    return values


def _texts(data: bytes) -> list[str]:
    found = []
    while data:
        (length,) = struct.unpack_from("<I", data)
        found.append(data[4 : 4 + length].decode())
        data = data[4 + length :]
    return found


def _packed(texts: list[str]) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in (each.encode() for each in texts))


def _answer(name: str, outputs: dict[str, Any], binary: bool) -> Said:
    described, blobs = [], []
    for output, values in outputs.items():
        is_text = isinstance(values, list)
        shape = [len(values)] if is_text else list(values.shape)
        tensor: dict[str, Any] = {"name": output, "datatype": "BYTES" if is_text else "FP32", "shape": shape}
        if binary:
            blobs.append(_packed(values) if is_text else values.astype("<f4").tobytes())
            tensor["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            tensor["data"] = values if is_text else values.reshape(-1).tolist()
        described.append(tensor)
    header = json.dumps({"model_name": name, "model_version": "3", "outputs": described}).encode()
    if not binary:
        return Said(header)
    return Said(header + b"".join(blobs), headers={"Inference-Header-Content-Length": str(len(header))})
