"""Settings of a team's page: what would let strangers in is refused before the server starts."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from luminosity.cli.main import main
from luminosity.errors import OptionError
from luminosity.operate.page.team.settings import OpenIdSettings, ProxySettings, place_of, read_settings

__all__ = ["write_certificate"]

_SECRET = "0123456789abcdef" * 2
_PROXY = {
    "header": '"X-Forwarded-User"',
    "secret_header": '"X-Page-Secret"',
    "secret_file": '"secret"',
    "addresses": '["10.0.0.7"]',
}
_OPENID = {"issuer": '"https://login.example.org"', "client_id": '"page"', "client_secret_file": '"secret"'}
_TOP = {
    "url": '"https://runs.example.org"',
    "users": '["*@example.org"]',
    "certificate": '"page.crt"',
    "key": '"page.key"',
}
_LISTEN = "0.0.0.0"


def write_certificate(folder: Path, host: str = "localhost") -> None:
    """Write ``page.crt`` and ``page.key``."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
    (folder / "page.crt").write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    (folder / "page.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    (folder / "page.key").chmod(0o600)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificate")
    write_certificate(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, certificate: Path) -> Path:
    for name in ("page.crt", "page.key"):
        (tmp_path / name).write_bytes((certificate / name).read_bytes())
        (tmp_path / name).chmod(0o600)
    (tmp_path / "secret").write_text(f"{_SECRET}\n")
    (tmp_path / "secret").chmod(0o600)
    return tmp_path


def written(folder: Path, top: dict[str, str | None], **tables: dict[str, str | None]) -> str:
    lines = [f"{name} = {value}" for name, value in (_TOP | top).items() if value is not None]
    for name, values in tables.items():
        lines += [f"[{name}]", *(f"{key} = {value}" for key, value in values.items() if value is not None)]
    path = folder / "team.toml"
    path.write_text("\n".join(lines))
    return str(path)


def test_a_proxy_and_a_provider(folder: Path) -> None:
    found = read_settings(written(folder, {"actors": '["ana@example.org"]', "session": '"1h"'}, proxy=_PROXY), _LISTEN)
    assert isinstance(found.login, ProxySettings)
    assert (found.login.header, found.login.secret) == ("x-forwarded-user", _SECRET.encode())
    assert (found.origin, found.host, found.session_s) == ("https://runs.example.org", "runs.example.org", 3600)
    assert found.actors == ("ana@example.org",)
    assert found.certificate is not None
    assert found.certificate.path == str(folder / "page.crt")
    found = read_settings(written(folder, {"url": '"https://runs.example.org:443/"'}, openid=_OPENID), _LISTEN)
    assert isinstance(found.login, OpenIdSettings)
    assert (found.login.claim, found.login.client_secret, found.actors) == ("email", _SECRET, ())
    assert found.origin == "https://runs.example.org"
    # A proxy on this machine has the certificate.
    bare: dict[str, str | None] = {"certificate": None, "key": None}
    assert read_settings(written(folder, bare, proxy=_PROXY), "127.0.0.1").certificate is None
    local = written(folder, bare | {"url": '"http://localhost:4747"'}, proxy=_PROXY)
    assert not read_settings(local, "localhost").is_encrypted


@pytest.mark.parametrize(
    ("said", "top"),
    [
        ("nothing may be sent to them without TLS", {"certificate": None, "key": None}),
        ("expected certificate and key", {"key": None}),
        ("can't be used", {"certificate": '"page.key"'}),
        ("can't be used", {"key": '"gone.key"'}),
        ("sessions would be sent without encryption", {"url": '"http://runs.example.org"'}),
        ("and a certificate, expected https", {"url": '"http://localhost"'}),
        ("without a path", {"url": '"https://runs.example.org/page"'}),
        ("found url = ''", {"url": None}),
        ("found url = 'https://h:x'", {"url": '"https://h:x"'}),
        ("found a user in the url", {"url": '"https://me@runs.example.org"'}),
        ("found no users", {"users": None}),
        ("expected a whole name", {"users": '["*example.org"]'}),
        ("expected a whole name", {"actors": '["a*"]'}),
        ("expected at most 7 days", {"session": '"30d"'}),
        ("unknown key 'actor'", {"actor": '["ana"]'}),
        ("found both proxy and openid", {"proxy": "{}", "openid": "{}"}),
    ],
)
def test_wrong_settings_are_refused(folder: Path, said: str, top: dict[str, str | None]) -> None:
    tables = {} if "proxy" in top else {"proxy": _PROXY}
    with pytest.raises(OptionError) as found:
        read_settings(written(folder, top, **tables), _LISTEN)  # type: ignore[arg-type]
    assert said in str(found.value)
    assert "team.toml:" in str(found.value)


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("found no addresses", {"addresses": None}),
        ("which is every address", {"addresses": '["0.0.0.0/0"]'}),
        ("expected an address or a network", {"addresses": '["proxy.example.org"]'}),
        ("found no secret_file", {"secret_file": None}),
        ("gone can't be read", {"secret_file": '"gone"'}),
        ("found a secret of 5 characters", {"secret_file": '"short"'}),
        ("other users may read or write", {"secret_file": '"open"'}),
        ("expected the name of a header", {"header": None}),
        ("expected the name of a header", {"header": '"Host"'}),
        ("expected the name of a header", {"header": '"cookie"'}),
        ("expected the name of a header", {"header": '"sec-fetch-site"'}),
        ("expected the name of a header", {"header": '"a b"'}),
        ("expected two headers", {"secret_header": '"x-forwarded-user"'}),
        ("unknown key 'adresses'", {"adresses": "[]"}),
    ],
)
def test_a_proxy_that_anyone_could_play_is_refused(folder: Path, said: str, change: dict[str, str | None]) -> None:
    for name, text, mode in (("short", "short", 0o600), ("open", _SECRET, 0o640)):
        (folder / name).write_text(text)
        (folder / name).chmod(mode)
    with pytest.raises(OptionError, match=said):
        read_settings(written(folder, {}, proxy=_PROXY | change), _LISTEN)


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("found issuer = ''", {"issuer": None}),
        ("found issuer = 'http://login", {"issuer": '"http://login.example.org"'}),
        ("found issuer = 'login", {"issuer": '"login.example.org"'}),
        ("found no client_id", {"client_id": None}),
        ("found no client_secret_file", {"client_secret_file": None}),
        ("unknown key 'secret'", {"secret": '"in the file"'}),
    ],
)
def test_an_incomplete_provider_is_refused(folder: Path, said: str, change: dict[str, str | None]) -> None:
    with pytest.raises(OptionError, match=said):
        read_settings(written(folder, {}, openid=_OPENID | change), _LISTEN)


def test_a_page_without_a_sign_in_or_with_a_readable_key_does_not_start(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(folder, {}, proxy=_PROXY)
    run_dir = f"--run_dir={folder / 'runs'}"
    for words, said in {
        ("--listen=0.0.0.0:0",): "found --listen without --login",
        (f"--login={path}",): "found --login without --listen",
        (f"--login={path}", "--listen=0.0.0.0:0", "--port=1"): "found --listen and --host or --port",
        (f"--login={path}", "--listen=0.0.0.0:99999"): "expected ADDRESS:PORT",
        (f"--login={path}.gone", "--listen=0.0.0.0:0"): "team.toml.gone can't be read",
        ("--host=0.0.0.0",): "expected localhost",
    }.items():
        assert main(["ui", "--no-browser", run_dir, *words]) == 2
        assert said in capsys.readouterr().err
    (folder / "page.key").chmod(0o604)
    with pytest.raises(OptionError, match="every user of this machine can read"):
        read_settings(path, _LISTEN)
    with pytest.raises(OptionError):
        place_of("0.0.0.0:443/path")
