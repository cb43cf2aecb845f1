"""Where a server is, and how much of that may be shown."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from luminosity.inference.handlers.http.secrets import looks_secret

__all__ = ["Address"]


@dataclass(frozen=True)
class Address:
    """A server's base URL, taken apart. The query is sent with every request and shown in no message."""

    scheme: str
    host: str
    port: int
    path: str
    query: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """
        >>> Address.parse("https://api.example.com/v1/").shown("/v1/embeddings")
        'https://api.example.com/v1/embeddings'
        >>> Address.parse("http://user:word@localhost:8000")
        Traceback (most recent call last):
        ValueError: found a user or a password in the address of localhost, where anyone may read it; name the ...
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            shown = f"{parts.scheme}://..." if "@" in url else repr(url)
            raise ValueError(f"found the address {shown}, expected one such as https://api.example.com")
        if "@" in parts.netloc:
            raise ValueError(
                f"found a user or a password in the address of {parts.hostname}, where anyone may read it; name the "
                "environment variable that holds the key instead: api_key_env='...'"
            )
        for name, _ in parse_qsl(parts.query, keep_blank_values=True):
            if looks_secret(name):
                raise ValueError(
                    f"found {name!r} in the query of the address of {parts.hostname}, which looks like a secret; name "
                    "the environment variable that holds it instead: api_key_env='...'"
                )
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/"), parts.query)

    def url(self, path: str) -> str:
        """
        >>> Address.parse("http://host/models?api-version=2").url("/v2/models/m/infer")
        'http://host/models/v2/models/m/infer?api-version=2'
        """
        return self.shown(path) + (f"?{self.query}" if self.query else "")

    def shown(self, path: str = "") -> str:
        """For messages: nothing that could be a secret."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == (443 if self.scheme == "https" else 80) else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self._below(path)}"

    def _below(self, path: str) -> str:
        """Many give a base that ends in the version already, as the clients of such servers want it."""
        version = "/" + path.strip("/").partition("/")[0]
        base = self.path.removesuffix(version) if path and self.path.endswith(version) else self.path
        return base + path
