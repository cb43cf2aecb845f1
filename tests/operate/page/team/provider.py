"""A provider of OpenID Connect on the loopback, with real signatures, for the tests of a team's page."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import RSAKey

__all__ = ["CLIENT", "SECRET", "Provider", "provider"]

CLIENT, SECRET = "luminosity page", "the-secret-of-the-page/1+2"
Claims = dict[str, Any]


class Provider:
    """Signs in ``user`` without a question. Tests change what it says."""

    def __init__(self, issuer: str) -> None:
        self.issuer = issuer
        self.user = "ana@example.org"
        self.key = RSAKey.generate_key(2048, {"kid": "first", "use": "sig"})
        self.keys = [self.key]  # that it publishes
        self.change: Callable[[Claims], Claims] = lambda claims: claims
        self.sign: Callable[[Claims], str] = lambda claims: jwt.encode(
            {"alg": "RS256", "kid": self.key.kid}, claims, self.key
        )
        self.asked: list[Claims] = []  # by browsers
        self.codes: dict[str, Claims] = {}
        self.reads_of_keys = 0

    def configuration(self) -> Claims:
        return {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize?tenant=1",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/keys",
        }

    def authorize(self, query: str) -> str:
        """Return where the browser goes on, with a code."""
        asked = {name: values[0] for name, values in parse_qs(query).items()}
        self.asked.append(asked)
        code = secrets.token_urlsafe()
        self.codes[code] = asked
        return f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state'], 'iss': self.issuer})}"

    def token(self, identity: str, form: Claims) -> Claims | None:
        """Return tokens for a code, which counts once; None if anything is wrong."""
        scheme, _, packed = identity.partition(" ")
        known = [unquote(part) for part in base64.b64decode(packed).decode().split(":")]
        asked = self.codes.pop(form.get("code", ""), None)
        if asked is None or scheme != "Basic" or known != [CLIENT, SECRET]:
            return None
        challenge = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest()).rstrip(b"=")
        if challenge.decode() != asked["code_challenge"] or form["redirect_uri"] != asked["redirect_uri"]:
            return None
        now = int(time.time())
        claims = {
            "iss": self.issuer,
            "aud": CLIENT,
            "sub": "4711",
            "iat": now,
            "exp": now + 300,
            "nonce": asked["nonce"],
            "email": self.user,
            "email_verified": True,
        }
        return {"access_token": "unused", "token_type": "Bearer", "id_token": self.sign(self.change(claims))}


@contextlib.contextmanager
def provider() -> Generator[Provider]:
    """Serve a provider on a free port until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, query = urlsplit(self.path).path, urlsplit(self.path).query
            if path == "/authorize":
                self.send_response(302)
                self.send_header("Location", found.authorize(query))
                self.end_headers()
            elif path == "/.well-known/openid-configuration":
                self._say(found.configuration())
            elif path == "/moved":
                self.send_response(302)
                self.send_header("Location", "/keys")
                self.end_headers()
            elif path == "/keys":
                found.reads_of_keys += 1
                self._say({"keys": [key.as_dict(private=False) for key in found.keys]})
            else:
                self.send_error(404)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            form = {name: values[0] for name, values in parse_qs(body).items()}
            tokens = found.token(self.headers.get("Authorization", ""), form)
            self._say(tokens or {"error": "invalid_grant"}, 200 if tokens else 400)

        def _say(self, content: Claims, status: int = 200) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Provider(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
