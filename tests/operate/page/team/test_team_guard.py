"""A team's page attacked: whoever has not signed in, or asks from elsewhere, is refused. It is called in-process."""

from __future__ import annotations

import base64
import hmac
import ipaddress
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

from luminosity.errors import OptionError
from luminosity.operate.page import event_stream
from luminosity.operate.page.app import Sources, app_of
from luminosity.operate.page.audit import Audit
from luminosity.operate.page.team import openid, sessions, team_guard
from luminosity.operate.page.team.openid import Attempts, OpenIdProvider, SignInError
from luminosity.operate.page.team.sessions import Sessions
from luminosity.operate.page.team.settings import OpenIdSettings, ProxySettings, TeamSettings
from luminosity.runs.journal import Action
from luminosity.runs.recorder import Recorder
from tests.operate.page.asking import ACCESS, TOKEN, Answer, ask
from tests.operate.page.one_run import RUN, STARTED, ended, happenings, snapshot

pytest.importorskip("joserfc")

from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey

from tests.operate.page.team.provider import CLIENT, SECRET, Provider, provider

_ORIGIN = "https://runs.example.org"
_HOST = {"host": "runs.example.org"}
_LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
_PAGE = {"origin": _ORIGIN, "sec-fetch-site": "same-origin", "content-type": "application/json"}
_SECRET = "s" * 32
_PROXY = ProxySettings("x-user", "x-secret", _SECRET.encode(), (ipaddress.ip_network("10.0.0.7"),))
_FROM = ("10.0.0.7", 50_000)
_ACT = f"/api/runs/{RUN}/act"
_STOP = {"action": "stop", "confirmed": RUN}
_ADDRESSES = ("/runs", "/", "/api/runs", f"/api/runs/{RUN}", "/api/account", "/static/main.js", "/metrics", "/nothing")


@pytest.fixture(scope="module")
def serving() -> Iterator[Provider]:
    with provider() as found:
        yield found


@pytest.fixture
def idp(serving: Provider) -> Iterator[Provider]:
    """The provider, as a new one for each test."""
    before = dict(vars(serving))
    serving.keys, serving.asked, serving.codes = [serving.key], [], {}
    yield serving
    vars(serving).update(before)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LUMINOSITY_DRIFT_DIR", str(tmp_path / "drift"))
    return tmp_path / "runs"


@pytest.fixture
def taken() -> list[Action]:
    return []


@pytest.fixture
def live(folder: Path, taken: list[Action]) -> Recorder:
    recorder = Recorder(folder, taken.append)
    for event in [STARTED, *happenings()]:
        recorder(event)
    return recorder


def page_of(folder: Path, login: Any, **change: Any) -> Any:
    team = TeamSettings(_ORIGIN, ("*@example.org", "ben"), ("ana@example.org", "ben"), 3600, login, None)
    return app_of(Sources(folder, can_act=True, team=replace(team, **change)), ACCESS)


def settings_of(idp: Provider) -> OpenIdSettings:
    return OpenIdSettings(idp.issuer, CLIENT, SECRET, "email", "openid email")


@pytest.fixture
def app(folder: Path, idp: Provider) -> Any:
    """A page with sign-in at the provider."""
    return page_of(folder, settings_of(idp))


@pytest.fixture
def behind(folder: Path) -> Any:
    """A page behind a proxy."""
    return page_of(folder, _PROXY)


class Browser:
    """Keeps cookies as a browser does, and remembers the answers."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.cookies: dict[str, str] = {}

    def get(self, target: str, **headers: str) -> Answer:
        return self._keep(ask(self.app, target, {**_HOST, **self._sent(), **headers}))

    def post(self, target: str, content: Any, token: str | None = None, **change: str) -> Answer:
        token = self.get("/api/account").json.get("token", "") if token is None else token
        headers = _HOST | _PAGE | self._sent() | {"authorization": f"Bearer {token}"} | change
        given = {name.replace("_", "-"): value for name, value in headers.items() if value}
        return self._keep(ask(self.app, target, given, "POST", body=json.dumps(content).encode()))

    def begin(self, target: str = "/login") -> str:
        """Begin to sign in; return the address to come back to, with a code of the provider."""
        answer = self.get(target)
        assert answer.status == 303
        return answer.headers["location"]

    def _sent(self) -> dict[str, str]:
        return {"cookie": "; ".join(f"{name}={value}" for name, value in self.cookies.items())} if self.cookies else {}

    def _keep(self, answer: Answer) -> Answer:
        for each in answer.cookies:
            name, _, value = each.partition(";")[0].partition("=")
            self.cookies[name] = value
            if "Max-Age=0" in each:
                del self.cookies[name]
        return answer


def back(idp: Provider, address: str) -> str:
    """Return the path to which the provider sends a browser back."""
    assert address.startswith(f"{idp.issuer}/authorize?")
    parts = urlsplit(idp.authorize(urlsplit(address).query))
    assert f"{parts.scheme}://{parts.netloc}" == _ORIGIN
    return f"{parts.path}?{parts.query}"


def signed_in(app: Any, idp: Provider, user: str = "ana@example.org") -> Browser:
    idp.user = user
    browser = Browser(app)
    assert browser.get(back(idp, browser.begin()), **_LINK).status == 303
    return browser


def test_a_reader_signs_in_reads_and_signs_out(app: Any, idp: Provider, live: Recorder) -> None:
    browser = Browser(app)
    answer = browser.get(f"/runs/{RUN}?a=1", **_LINK)  # a link in a message
    assert (answer.status, answer.headers["location"]) == (303, f"/login?to=%2Fruns%2F{RUN}%3Fa%3D1")
    address = browser.begin(answer.headers["location"])
    asked = {name: values[0] for name, values in parse_qs(urlsplit(address).query).items()}
    assert asked["redirect_uri"] == f"{_ORIGIN}/login/callback"
    assert asked["code_challenge_method"] == "S256"
    answer = browser.get(back(idp, address), **_LINK)
    assert (answer.status, answer.headers["location"]) == (303, f"/runs/{RUN}?a=1")
    (session,) = [each for each in answer.cookies if each.startswith("__Host-luminosity=")]
    assert re.fullmatch(r"__Host-luminosity=[\w-]{43}; Max-Age=3600; Path=/; HttpOnly; SameSite=Lax; Secure", session)
    assert list(browser.cookies) == ["__Host-luminosity"]  # that of the attempt has gone
    assert browser.get("/api/runs").status == 200
    account = browser.get("/api/account").json
    assert account.items() >= {"user": "ana@example.org", "signs_out": True}.items()
    cookies = dict(browser.cookies)
    assert browser.post("/logout", {}).json["next"] == "/signed-out"
    assert browser.cookies == {}
    assert b"signed out" in browser.get("/signed-out").body
    browser.cookies = cookies  # whoever has kept the cookie
    assert browser.get("/api/runs").status == 401
    assert browser.get("/runs").status == 303


@pytest.mark.parametrize("target", _ADDRESSES)
def test_nobody_reads_without_a_session(app: Any, folder: Path, live: Recorder, target: str) -> None:
    for change in (
        {},
        {"cookie": f"__Host-luminosity={TOKEN}"},
        {"cookie": "__Host-luminosity="},
        {"cookie": f"{ACCESS.cookie_name}={ACCESS.cookie_value}"},  # that of a page of one user
        {"cookie": f"luminosity-team={TOKEN}"},
        {"x-user": "ana@example.org", "x-forwarded-user": "ana@example.org", "remote-user": "ana@example.org"},
        {"authorization": f"Bearer {ACCESS.action_token}"},
    ):
        answer = ask(app, target, _HOST | change, client=("127.0.0.1", 5))
        assert (answer.status, RUN.encode() in answer.body) in ((303, False), (401, False))
        if answer.status == 303:
            assert answer.headers["location"].startswith("/login?to=%2F")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    if target != "/metrics":
        assert ask(app, f"{target}?token={TOKEN}", _HOST | {"authorization": f"Bearer {TOKEN}"}).status in (303, 401)


def test_prometheus_reads_metrics_alone_with_the_token(app: Any, live: Recorder) -> None:
    headers = _HOST | {"authorization": f"Bearer {TOKEN}"}
    assert ask(app, "/metrics", headers).status == 200
    assert ask(app, "/api/runs", headers).status == 401
    assert ask(app, "/metrics", headers, "POST").status == 405


@pytest.mark.parametrize(
    ("status", "target", "change"),
    [
        (421, "/api/runs", {"host": "127.0.0.1:4747"}),
        (421, "/api/runs", {"host": "runs.example.org:8443"}),
        (421, "/login", {"host": "rebound.example.org"}),
        (403, "/api/runs", {"origin": "https://example.org"}),
        (403, "/api/runs", {"origin": "null"}),
        (403, "/api/runs", {"origin": "http://runs.example.org"}),  # without TLS
        (403, "/api/runs", {"sec-fetch-site": "cross-site"}),
        (403, "/api/runs", {"sec-fetch-site": "same-site"}),
        (403, "/api/runs", _LINK),  # an address with data is no document
        (403, "/metrics", _LINK),
        (403, "/static/main.js", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}),
        (403, "/runs", _LINK | {"sec-fetch-dest": "iframe"}),
        (403, "/runs", _LINK | {"sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}),
    ],
)
def test_other_sites_are_refused(app: Any, idp: Provider, status: int, target: str, change: dict[str, str]) -> None:
    browser = signed_in(app, idp)
    answer = browser.get(target, **change)
    assert answer.status == status
    assert "expected" in answer.json["error"]
    assert answer.cookies == []


@pytest.mark.parametrize(
    "to",
    [
        "//evil.example",
        "/\\evil.example",
        "https://evil.example/runs",
        "/runs/\r\nset-cookie: a=b",
        "/runs\\x",
        "",
        "x",
    ],
)
def test_a_sign_in_leads_to_this_page_alone(app: Any, idp: Provider, to: str) -> None:
    browser = Browser(app)
    answer = browser.get(back(idp, browser.begin(f"/login?{urlencode({'to': to})}")))
    assert answer.headers["location"] == "/runs"
    answer = Browser(app).get("/login?to=/runs&to=/drift")
    assert "set-cookie" in answer.headers


def test_a_sign_in_counts_once_in_the_browser_that_began_it(
    app: Any, idp: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = Browser(app), Browser(app)
    target = back(idp, mine.begin())
    other.begin()
    assert other.get(target).status == 401  # the address was stolen, or sent to another reader
    mine = Browser(app)
    target = back(idp, mine.begin())
    cookies = dict(mine.cookies)
    assert mine.get(target).status == 303
    mine.cookies |= cookies
    assert mine.get(target).status == 401  # again
    for change in ("state=", "state=wrong", "code=wrong", "iss=https%3A%2F%2Fevil.example", "error=access_denied"):
        browser = Browser(app)
        target = back(idp, browser.begin())
        name = change.partition("=")[0]
        rest = [part for part in target.partition("?")[2].split("&") if not part.startswith(f"{name}=")]
        assert browser.get(f"/login/callback?{'&'.join([*rest, change])}").status == 401
        assert "__Host-luminosity" not in browser.cookies
        assert browser.get(target).status == 401  # the attempt is over
    browser = Browser(app)
    target = back(idp, browser.begin())
    assert browser.get(f"{target}&state=x").status == 401  # two of them
    browser = Browser(app)
    target = back(idp, browser.begin())
    monkeypatch.setattr(openid, "_ATTEMPT_S", 0.0)
    late = Browser(app)
    assert late.get(back(idp, late.begin())).status == 401
    assert b"&lt;script&gt;" not in browser.get("/login/callback?error=<script>").body  # no attempt: nothing is said
    assert browser.get(target).status == 401


def _signed_by(key: RSAKey, **header: Any) -> Any:
    return lambda claims: jwt.encode({"alg": "RS256", "kid": "first", **header}, claims, key)


def _packed(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _unsigned(claims: dict[str, Any], algorithm: str = "none") -> str:
    parts = ({"alg": algorithm, "kid": "first"}, claims)
    return ".".join([*(_packed(json.dumps(part).encode()) for part in parts), ""])


def _with_public_key(idp: Provider) -> Any:
    """Sign as if the public key, which everybody knows, were a secret that both sides share."""

    def sign(claims: dict[str, Any]) -> str:
        text = _unsigned(claims, "HS256")
        key = idp.key.as_pem(private=False)
        return text + _packed(hmac.digest(key, text.rstrip(".").encode(), "sha256"))

    return sign


@pytest.mark.parametrize(
    "change",
    [
        {"iss": "https://evil.example"},
        {"aud": "another client"},
        {"aud": [CLIENT, "another client"]},  # without azp
        {"azp": "another client"},
        {"aud": []},
        {"nonce": "of another attempt"},
        {"nonce": None},
        {"exp": int(time.time()) - 3_600},
        {"exp": None},
        {"iat": None},
        {"iat": int(time.time()) + 3_600},
        {"sub": None},
        {"email": None},
        {"email": ""},
        {"email": ["ana@example.org"]},
        {"email": "ana@example.org\nx"},
        {"email": "a" * 300 + "@example.org"},
        {"email_verified": False},
        {"email_verified": None},
        {"email_verified": "true"},
    ],
)
def test_id_tokens_with_other_claims_are_refused(app: Any, idp: Provider, change: dict[str, Any]) -> None:
    idp.change = lambda claims: {name: value for name, value in (claims | change).items() if value is not None}
    browser = Browser(app)
    answer = browser.get(back(idp, browser.begin()))
    assert answer.status == 401
    assert b"The provider" in answer.body or b"ID token" in answer.body
    assert "__Host-luminosity" not in browser.cookies


def test_id_tokens_with_other_signatures_are_refused(app: Any, idp: Provider) -> None:
    stranger = RSAKey.generate_key(2048)

    def cut(claims: dict[str, Any]) -> str:
        whole = _signed_by(idp.key)(claims)
        return whole[:-6] + ("AAAAAA" if not whole.endswith("AAAAAA") else "BBBBBB")

    def exchanged(claims: dict[str, Any]) -> str:
        head, _, signature = _signed_by(idp.key)(claims).split(".")
        return ".".join([head, _unsigned(claims | {"email": "ben@example.org"}).split(".")[1], signature])

    forged = (
        _unsigned,
        _with_public_key(idp),
        _signed_by(stranger),
        _signed_by(stranger, kid="unknown"),
        _signed_by(stranger, jwk=stranger.as_dict(private=False)),  # brings its own key
        cut,
        exchanged,
        lambda _: "not a token",
        lambda _: "",
    )
    for sign in forged:
        idp.sign = sign
        browser = Browser(app)
        answer = browser.get(back(idp, browser.begin()))
        assert answer.status == 401, sign
        assert "__Host-luminosity" not in browser.cookies


def test_a_provider_may_change_its_keys(app: Any, idp: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    new = RSAKey.generate_key(2048, {"kid": "second", "use": "sig"})
    idp.keys, idp.sign = [idp.key, new], _signed_by(new, kid="second")
    browser = Browser(app)
    before = idp.reads_of_keys
    assert browser.get(back(idp, browser.begin())).status == 401  # it has asked a moment ago
    assert idp.reads_of_keys == before
    monkeypatch.setattr(openid, "_KEYS_AGAIN_S", 0.0)
    signed_in(app, idp)


def test_who_is_not_a_user_gets_no_session(app: Any, idp: Provider) -> None:
    for user in ("eve@evil.example", "ana@example.org.evil", "x@evil@example.org", "@example.org", "*@example.org "):
        idp.user = user
        browser = Browser(app)
        answer = browser.get(back(idp, browser.begin()))
        assert answer.status == 403
        assert "__Host-luminosity" not in browser.cookies
    idp.user = "<b>eve</b>"
    browser = Browser(app)
    assert b"&lt;b&gt;eve" in browser.get(back(idp, browser.begin())).body


def test_a_provider_that_can_not_be_trusted_is_refused_at_the_start(
    idp: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(idp)
    whole = idp.configuration()
    for change, said in (
        ({"issuer": "https://evil.example"}, "found the issuer 'https://evil.example'"),
        ({"token_endpoint": "http://evil.example/token"}, "expected https"),
        ({"authorization_endpoint": None}, "expected https"),
        ({"authorization_endpoint": "javascript:alert(1)"}, "expected https"),
        ({"jwks_uri": f"{idp.issuer}/gone"}, "has answered with 404"),
        ({"jwks_uri": f"{idp.issuer}/moved"}, "has answered with 302"),
    ):
        monkeypatch.setattr(idp, "configuration", lambda change=change: whole | change)
        with pytest.raises(OptionError, match=said):
            OpenIdProvider(settings, _ORIGIN)
    monkeypatch.setattr(idp, "configuration", lambda: whole)
    idp.keys = [OctKey.generate_key(256)]
    with pytest.raises(OptionError, match="found no key of RSA or EC"):
        OpenIdProvider(settings, _ORIGIN)
    with pytest.raises(OptionError, match="does not answer"):
        OpenIdProvider(replace(settings, issuer="http://127.0.0.1:9"), _ORIGIN)


def test_an_action_has_the_name_of_who_did_it(
    app: Any, idp: Provider, folder: Path, live: Recorder, taken: list[Action]
) -> None:
    ana, other = signed_in(app, idp), signed_in(app, idp, "zoe@example.org")
    assert ana.get(f"/api/runs/{RUN}/actions").json["actions"] == ["stop"]
    assert other.get(f"/api/runs/{RUN}/actions").json == {"actions": [], "why": "This page only reads.", "done": []}
    token = ana.get("/api/account").json["token"]
    refused = [
        (403, other.post(_ACT, _STOP)),
        (401, other.post(_ACT, _STOP, token)),  # of another session
        (401, ana.post(_ACT, _STOP, "")),  # the cookie alone, which browsers send by themselves
        (401, ana.post(_ACT, _STOP, TOKEN)),
        (401, ana.post(_ACT, _STOP, ana.cookies["__Host-luminosity"])),
        (401, Browser(app).post(_ACT, _STOP, token)),  # without the cookie
        (403, ana.post(_ACT, _STOP, origin="https://example.org")),
        (403, ana.post(_ACT, _STOP, origin="")),
        (403, ana.post(_ACT, _STOP, sec_fetch_site="same-site")),
        (415, ana.post(_ACT, _STOP, content_type="text/plain")),
        (421, ana.post(_ACT, _STOP, host="127.0.0.1:4747")),
        (403, ana.post("/logout", {}, origin="https://example.org")),
        (401, ana.post("/logout", {}, "")),
        (405, ana.get("/logout")),
        (405, ana.get(_ACT)),
    ]
    assert [answer.status for _, answer in refused] == [status for status, _ in refused]
    live(snapshot(8.0, 260))
    assert taken == []
    assert not Audit(folder).path.exists()
    assert ana.post(_ACT, _STOP).status == 200
    live(snapshot(9.0, 260))
    assert taken == ["stop"]
    (line,) = [json.loads(line) for line in Audit(folder).path.read_text().splitlines()]
    assert line.items() >= {"user": "ana@example.org", "run": RUN, "action": "stop"}.items()


def test_a_page_without_actors_only_reads(folder: Path, idp: Provider, live: Recorder) -> None:
    app = page_of(folder, settings_of(idp), actors=())
    browser = signed_in(app, idp)
    assert browser.post(_ACT, _STOP).status == 403
    assert browser.get(f"/api/runs/{RUN}/actions").json["actions"] == []


def test_a_reply_ends_with_the_session(
    app: Any, idp: Provider, live: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "_POLL_S", 0.01)
    browser = signed_in(app, idp)
    cookie = browser._sent()
    token = browser.get("/api/account").json["token"]
    seen: list[bytes] = []

    def sign_out(body: bytes) -> bool:
        if not seen:
            app._sessions.end(app._sessions.reader(browser.cookies["__Host-luminosity"]))
            live(ended())
        seen.append(body)
        return False

    answer = ask(app, f"/api/runs/{RUN}/events?after=3", _HOST | cookie, until=sign_out)
    assert b"RunEnded" not in answer.body  # it was recorded after the session had ended
    assert browser.post("/logout", {}, token).status == 401


def test_sessions_and_attempts_are_limited_in_time_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Sessions(100.0, most=2)
    names = [held.begin(user, may_act=False) for user in ("ana", "ben", "eve")]
    assert [held.reader(name) is not None for name in names] == [False, True, True]
    reader = held.reader(names[1])
    assert reader is not None
    monkeypatch.setattr(sessions.time, "monotonic", lambda: reader.ends_at)
    assert held.reader(names[1]) is None
    monkeypatch.undo()
    assert held.reader(names[1]) is None  # for good
    attempts = Attempts(most=1)
    (first, one), (second, two) = attempts.begin("/runs"), attempts.begin("/runs")
    with pytest.raises(SignInError):
        attempts.take(first, one.state)
    assert attempts.take(second, two.state) == two


def ask_proxy(app: Any, target: str, change: dict[str, str] | None = None, client: Any = _FROM, **more: Any) -> Answer:
    headers = _HOST | {"x-user": "ana@example.org", "x-secret": _SECRET} | (change or {})
    given = {name: value for name, value in headers.items() if value}
    return ask(app, target, given, client=client, **more)


def test_behind_a_proxy_its_header_names_the_reader(
    behind: Any, folder: Path, live: Recorder, taken: list[Action]
) -> None:
    assert ask_proxy(behind, "/runs").status == 200
    account = ask_proxy(behind, "/api/account").json
    assert account.items() >= {"user": "ana@example.org", "signs_out": False}.items()
    for target in ("/login", "/login/callback", "/signed-out"):
        assert ask_proxy(behind, target).status == 404
    headers = {**_PAGE, "authorization": f"Bearer {account['token']}"}
    body = json.dumps(_STOP).encode()
    other = headers | {"x-user": "ben"}
    assert ask_proxy(behind, _ACT, other, method="POST", body=body).status == 401  # a token is of one user
    assert ask_proxy(behind, "/logout", headers, method="POST", body=b"{}").status == 404
    assert ask_proxy(behind, _ACT, headers, method="POST", body=body).status == 200
    live(snapshot(8.0, 260))
    assert taken == ["stop"]
    assert json.loads(Audit(folder).path.read_text())["user"] == "ana@example.org"
    mapped = ("::ffff:10.0.0.7", 1)
    assert ask_proxy(behind, "/api/runs", client=mapped).status == 200


@pytest.mark.parametrize("target", _ADDRESSES)
@pytest.mark.parametrize(
    ("status", "change", "client"),
    [
        (403, {}, ("10.0.0.8", 1)),  # whoever knows the secret, but is not the proxy
        (403, {}, ("127.0.0.1", 1)),
        (403, {"x-forwarded-for": "10.0.0.7", "x-real-ip": "10.0.0.7", "forwarded": "for=10.0.0.7"}, ("10.0.0.8", 1)),
        (403, {}, None),
        (403, {}, ("proxy", 1)),
        (403, {"x-secret": ""}, _FROM),
        (403, {"x-secret": "wrong"}, _FROM),
        (403, {"x-secret": f"{_SECRET}\u00e9"}, _FROM),
        (401, {"x-user": ""}, _FROM),
        (401, {"x-user": "a" * 300}, _FROM),
        (401, {"x-user": "ana\x7f"}, _FROM),
        (403, {"x-user": "eve@evil.example"}, _FROM),
        (401, {"x-user": "", "x_user": "ben"}, _FROM),
        (421, {"host": "10.0.0.9:4747"}, _FROM),
    ],
)
def test_nobody_else_plays_the_proxy(
    behind: Any, live: Recorder, target: str, status: int, change: dict[str, str], client: Any
) -> None:
    answer = ask_proxy(behind, target, change, client)
    assert answer.status == status
    assert RUN.encode() not in answer.body
    assert _SECRET.encode() not in answer.body


def test_a_header_that_comes_twice_is_refused(behind: Any) -> None:
    for name, value, status in (("x-user", "ben", 401), ("x-secret", _SECRET, 403)):
        pairs = [*_HOST.items(), ("x-user", "ana@example.org"), ("x-secret", _SECRET), (name, value)]
        scope = {"type": "http", "method": "GET", "path": "/api/runs", "query_string": b"", "client": _FROM}
        headers = [(key.encode(), text.encode()) for key, text in pairs]
        reply = behind._reader(scope, team_guard.Headers(raw=headers))
        assert reply.status_code == status


def test_hostile_names_of_users_are_text(behind: Any) -> None:
    answer = ask_proxy(behind, "/runs", {"x-user": "<script>alert(1)</script>"})
    assert answer.status == 403
    assert b"&lt;script&gt;" in answer.body
    assert b"<script>" not in answer.body


@pytest.mark.parametrize(
    "target",
    [
        "/static/../team/openid.py",
        "/static/..%2fteam%2fsettings.py",
        "/api/runs/../../etc/passwd",
        f"/api/runs/{RUN}.json",
        "/api/runs/..%2f..%2fetc%2fpasswd/log.txt",
        "/api/runs/../ui-token/log.txt",
        "/api/drift/report?id=../../etc/passwd",
        f"/api/runs/{RUN}%00/logs",
    ],
)
def test_paths_lead_nowhere_else(app: Any, idp: Provider, live: Recorder, target: str) -> None:
    assert signed_in(app, idp).get(target).status == 404
