"""The settings of a team's page, from a TOML file: its address, who may read it, and how readers sign in.

What would let strangers in is refused before the server starts.
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
import stat
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from luminosity._shared.toml_tables import TomlTable, read_toml
from luminosity.errors import OptionError
from luminosity.operate.web_server import Certificate, is_loopback

__all__ = ["Network", "OpenIdSettings", "ProxySettings", "TeamSettings", "place_of", "read_settings"]

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_SESSION = timedelta(hours=8)  # a working day
_LONGEST = timedelta(days=7)
_LEAST_SECRET = 32  # characters; as many as 16 random bytes have in hexadecimal
_MOST_SECRET = 4096
_HEADER = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,99}")
# Headers that clients send for other reasons: a proxy would pass them on.
_TAKEN_HEADERS = {"accept", "authorization", "connection", "content-type", "cookie", "host", "origin", "referer", "te"}
_PORTS = {"https": 443, "http": 80}
_DEFAULT_PORT = 4747
_LAST_PORT = 65_535


@dataclass(frozen=True)
class ProxySettings:
    """A reverse proxy that signs readers in, and names them in a header."""

    header: str
    secret_header: str
    secret: bytes
    addresses: tuple[Network, ...]


@dataclass(frozen=True)
class OpenIdSettings:
    """A provider of OpenID Connect."""

    issuer: str
    client_id: str
    client_secret: str
    claim: str  # the name of the user in an ID token
    scope: str


@dataclass(frozen=True)
class TeamSettings:
    """How a team's page is reached, by whom."""

    origin: str  # as browsers see it, such as https://runs.example.org
    users: tuple[str, ...]  # who may read: names, *@DOMAIN, or * for everyone who can sign in
    actors: tuple[str, ...]  # who of them may act
    session_s: float
    login: ProxySettings | OpenIdSettings
    certificate: Certificate | None  # none behind a proxy on this machine

    @property
    def host(self) -> str:
        """The ``Host`` header of requests for this page."""
        return urlsplit(self.origin).netloc

    @property
    def is_encrypted(self) -> bool:
        """Whether browsers use TLS."""
        return self.origin.startswith("https:")


def place_of(listen: str) -> tuple[str, int]:
    """Return the address and the port of ``--listen``.

    >>> place_of("0.0.0.0:443"), place_of("[::]:443"), place_of("127.0.0.1")
    (('0.0.0.0', 443), ('::', 443), ('127.0.0.1', 4747))
    """
    match = re.fullmatch(r"(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+)(?::(?P<port>\d{1,5}))?", listen)
    port = int(match["port"] or _DEFAULT_PORT) if match else -1
    if match is None or not 0 <= port <= _LAST_PORT:
        raise OptionError(f"--listen={listen}: expected ADDRESS:PORT, such as 0.0.0.0:443 or 127.0.0.1:4747")
    return match["host"].strip("[]"), port


def read_settings(path: str, listen_host: str) -> TeamSettings:
    """Read the file of ``--login``. Raises :class:`OptionError` for settings that would let strangers in."""
    table = read_toml(path, lambda message, fix: OptionError(message, fix=fix))
    folder = Path(path).resolve().parent
    origin = _origin(table)
    users, actors = table.texts("users"), table.texts("actors")
    for name, found in (("users", users), ("actors", actors)):
        _check_patterns(table, name, found)
    if not users:
        raise table.error("users", 'found no users, expected who may read, such as users = ["*@example.org"]')
    session = table.duration("session") or _SESSION
    if session > _LONGEST:
        raise table.error("session", f"found a session of {session}, expected at most {_LONGEST}")
    certificate = _certificate(table, folder)
    if certificate is None and not is_loopback(listen_host):
        raise table.error(
            "certificate",
            f"found no certificate, expected one: other machines can reach {listen_host}, and nothing may be sent to "
            "them without TLS",
            'add certificate = "page.crt" and key = "page.key", or listen on 127.0.0.1 behind a proxy with TLS',
        )
    if certificate is not None and not origin.startswith("https:"):
        raise table.error("url", f"found url = {origin!r} and a certificate, expected https://")
    kind = table.choose(("proxy", "openid"))
    if kind is None:
        raise table.error("login", "found neither [proxy] nor [openid], expected how readers sign in")
    inner = table.table(kind)
    login = _proxy(inner, folder) if kind == "proxy" else _openid(inner, folder)
    inner.finish(f"[{kind}]")
    table.finish("the file")
    return TeamSettings(origin, users, actors, session.total_seconds(), login, certificate)


def _origin(table: TomlTable) -> str:
    url = table.text("url") or ""
    example = "such as https://runs.example.org: the address in the browser"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise table.error("url", f"found url = {url!r}, expected one {example}") from None
    if parts.scheme not in _PORTS or not parts.hostname or parts.path.strip("/") or parts.query or parts.fragment:
        raise table.error("url", f"found url = {url!r}, expected one without a path, {example}")
    if parts.username is not None:
        raise table.error("url", f"found a user in the url, expected none, {example}")
    if parts.scheme == "http" and not is_loopback(parts.netloc):
        raise table.error("url", f"found url = {url!r}, expected https://: sessions would be sent without encryption")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + ("" if port in (None, _PORTS[parts.scheme]) else f":{port}")


def _check_patterns(table: TomlTable, name: str, patterns: tuple[str, ...]) -> None:
    for each in patterns:
        is_domain = each.startswith("*@") and "*" not in each[2:] and len(each) > 2
        if each != "*" and "*" in each and not is_domain:
            raise table.error(name, f"found {each!r} in {name}, expected a whole name, *@DOMAIN or *")


def _certificate(table: TomlTable, folder: Path) -> Certificate | None:
    named = {name: table.text(name) for name in ("certificate", "key")}
    given = {name: str(folder / value) for name, value in named.items() if value is not None}
    if not given:
        return None
    if len(given) == 1:
        raise table.error(next(iter(given)), f"found {next(iter(given))} alone, expected certificate and key")
    found = Certificate(given["certificate"], given["key"])
    try:
        is_open = os.stat(found.key).st_mode & stat.S_IROTH
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(found.path, found.key, lambda: "")
    except (OSError, ValueError) as error:  # an error of TLS is an OSError
        raise table.error("certificate", f"certificate and key can't be used: {error}") from None
    if is_open:
        raise table.error("key", f"every user of this machine can read {found.key}", f"chmod o-rwx {found.key}")
    return found


def _proxy(table: TomlTable, folder: Path) -> ProxySettings:
    header, secret_header = _header(table, "header"), _header(table, "secret_header")
    if header == secret_header:
        raise table.error("secret_header", f"found the header {header} twice, expected two headers")
    found: list[Network] = []
    for text in table.texts("addresses"):
        try:
            network = ipaddress.ip_network(text)
        except ValueError as error:
            raise table.error("addresses", f"found {text!r}, expected an address or a network ({error})") from None
        if network.prefixlen == 0:
            raise table.error("addresses", f"found {text!r}, which is every address, expected those of the proxy")
        found.append(network)
    if not found:
        raise table.error("addresses", 'found no addresses, expected those of the proxy, such as ["127.0.0.1"]')
    secret = _secret(table, "secret_file", folder)
    if len(secret) < _LEAST_SECRET:
        raise table.error(
            "secret_file",
            f"found a secret of {len(secret)} characters, expected at least {_LEAST_SECRET}",
            "make one with: openssl rand -hex 32",
        )
    return ProxySettings(header, secret_header, secret.encode(), tuple(found))


def _header(table: TomlTable, name: str) -> str:
    found = (table.text(name) or "").lower()
    if not _HEADER.fullmatch(found) or found in _TAKEN_HEADERS or found.startswith("sec-"):
        raise table.error(name, f"found {name} = {found!r}, expected the name of a header that only the proxy sets")
    return found


def _openid(table: TomlTable, folder: Path) -> OpenIdSettings:
    issuer = table.text("issuer") or ""
    parts = urlsplit(issuer)
    is_local = parts.scheme == "http" and is_loopback(parts.netloc)
    if not (is_local or (parts.scheme == "https" and parts.hostname)) or parts.query or parts.fragment:
        raise table.error("issuer", f"found issuer = {issuer!r}, expected one such as https://login.example.org")
    client = table.text("client_id")
    if client is None:
        raise table.error("client_id", "found no client_id, expected the name that the provider has given this page")
    secret = _secret(table, "client_secret_file", folder)
    return OpenIdSettings(
        issuer, client, secret, table.text("claim", "email") or "", table.text("scope", "openid email") or ""
    )


def _secret(table: TomlTable, name: str, folder: Path) -> str:
    """Return what a file holds that only this user can read."""
    given = table.text(name)
    if given is None:
        raise table.error(name, f"found no {name}, expected a file that only you can read")
    path = folder / given
    try:
        with open(path, encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_MOST_SECRET).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise table.error(name, f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise table.error(name, f"other users may read or write {path}", f"chmod 600 {path}")
    if not text:
        raise table.error(name, f"{path} is empty, expected a secret")
    return text
