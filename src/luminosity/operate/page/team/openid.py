"""Sign-in with OpenID Connect: the code flow with PKCE. joserfc checks signatures and claims of ID tokens."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote, urlencode, urlsplit

import urllib3

from luminosity._shared.text import first_line
from luminosity.errors import OptionError
from luminosity.extras import require
from luminosity.operate.page.team.settings import OpenIdSettings
from luminosity.operate.web_server import is_loopback

__all__ = ["Attempt", "Attempts", "OpenIdProvider", "SignInError"]

# Signatures with the provider's public keys. Anyone could make those of "none", and those of HS256 with a public key.
_ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512"]
_KINDS = ("RSA", "EC")  # of keys
_LEEWAY_S = 60  # between two clocks
_TIMEOUT = urllib3.Timeout(connect=5.0, read=10.0)
_MOST_BYTES = 1_000_000  # of an answer
_KEYS_AGAIN_S = 60.0  # between two questions for keys, so that strangers can't make this server ask all the time
_ATTEMPT_S = 600.0  # to enter a password and a second factor
_MOST_ATTEMPTS = 10_000  # the oldest one is forgotten
_MOST_USER = 200  # characters
_SHOWN = 200  # characters of what a provider says


class SignInError(Exception):
    """A reader could not be signed in. The message is for the reader."""


@dataclass(frozen=True)
class Attempt:
    """One attempt to sign in."""

    state: str
    nonce: str
    verifier: str  # of PKCE: whoever has stolen the code lacks it
    path: str
    ends_at: float


class Attempts:
    """Attempts to sign in that have not ended. Each counts once, in the browser that has begun it."""

    def __init__(self, most: int = _MOST_ATTEMPTS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._attempts: OrderedDict[str, Attempt] = OrderedDict()

    def begin(self, path: str) -> tuple[str, Attempt]:
        """Begin an attempt that leads to a path of the page; return its name, for a cookie, and the attempt."""
        name, *words = (secrets.token_urlsafe(32) for _ in range(4))
        attempt = Attempt(words[0], words[1], words[2], path, time.monotonic() + _ATTEMPT_S)
        with self._lock:
            self._attempts[name] = attempt
            while len(self._attempts) > self._most:
                self._attempts.popitem(last=False)
        return name, attempt

    def take(self, name: str, state: str) -> Attempt:
        """Return an attempt, which counts no more. Raises :class:`SignInError` if there is none with this state."""
        with self._lock:
            found = self._attempts.pop(name, None)
        is_right = found is not None and hmac.compare_digest(found.state.encode(), state.encode("utf-8", "replace"))
        if found is None or not is_right or time.monotonic() > found.ends_at:
            raise SignInError("This sign-in was not begun in this browser, is over, or took too long.")
        return found


class OpenIdProvider:
    """A provider of OpenID Connect. Its methods block, and may be called on several threads."""

    def __init__(self, settings: OpenIdSettings, origin: str) -> None:
        """Ask the provider for its addresses and keys. Raises :class:`OptionError` if it can't be used."""
        for module in ("joserfc.jwt", "joserfc.jwk", "joserfc.errors"):
            require(module, "team")
        self._settings = settings
        self._redirect = f"{origin}/login/callback"
        self._pool = urllib3.PoolManager(timeout=_TIMEOUT, retries=False)
        self._lock = threading.Lock()
        try:
            found = self._ask(f"{settings.issuer.rstrip('/')}/.well-known/openid-configuration")
            if found.get("issuer") != settings.issuer:
                raise SignInError(f"found the issuer {found.get('issuer')!r:.200}")
            self._authorize, self._token, self._jwks = (
                self._address(found.get(name)) for name in ("authorization_endpoint", "token_endpoint", "jwks_uri")
            )
            self._keys, self._keys_at = self._read_keys(), time.monotonic()
        except SignInError as error:
            raise OptionError(
                f"the OpenID provider {settings.issuer} can't be used: {error}", fix="correct issuer in [openid]"
            ) from None

    def address(self, attempt: Attempt) -> str:
        """Return where a browser goes to sign in."""
        challenge = base64.urlsafe_b64encode(hashlib.sha256(attempt.verifier.encode()).digest()).rstrip(b"=").decode()
        asked = {
            "response_type": "code",
            "client_id": self._settings.client_id,
            "redirect_uri": self._redirect,
            "scope": self._settings.scope,
            "state": attempt.state,
            "nonce": attempt.nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        return f"{self._authorize}{'&' if '?' in self._authorize else '?'}{urlencode(asked)}"

    def user(self, code: str, attempt: Attempt) -> str:
        """Return who has signed in. Raises :class:`SignInError`."""
        identity = f"{quote(self._settings.client_id, safe='')}:{quote(self._settings.client_secret, safe='')}"
        given = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._redirect,
            "code_verifier": attempt.verifier,
        }
        headers = {"authorization": f"Basic {base64.b64encode(identity.encode()).decode()}"}
        token = self._ask(self._token, given, headers).get("id_token")
        if not isinstance(token, str):
            raise SignInError("the provider has sent no ID token")
        return self._user_of(self._claims(token, attempt.nonce))

    def _claims(self, token: str, nonce: str) -> dict[str, Any]:
        """Return what an ID token says, if this provider has made it for this page and this attempt."""
        jwt, errors = require("joserfc.jwt", "team"), require("joserfc.errors", "team")
        expected = {"iss": self._settings.issuer, "aud": self._settings.client_id, "nonce": nonce}
        rules: dict[str, Any] = {name: {"essential": True, "value": value} for name, value in expected.items()}
        rules |= {name: {"essential": True} for name in ("exp", "iat", "sub")}
        try:
            try:
                decoded = jwt.decode(token, self._keys, algorithms=_ALGORITHMS)
            except errors.InvalidKeyIdError:
                self._renew_keys()
                decoded = jwt.decode(token, self._keys, algorithms=_ALGORITHMS)
            claims: dict[str, Any] = decoded.claims
            jwt.JWTClaimsRegistry(leeway=_LEEWAY_S, **rules).validate(claims)
        except (errors.JoseError, ValueError, TypeError) as error:
            raise SignInError(f"the provider's ID token is refused: {first_line(str(error), _SHOWN)}") from None
        is_for_several = isinstance(claims["aud"], list) and len(cast("list[Any]", claims["aud"])) > 1
        if claims.get("azp", None if is_for_several else expected["aud"]) != expected["aud"]:
            raise SignInError("the provider's ID token is refused: it was made for another client")
        return claims

    def _user_of(self, claims: dict[str, Any]) -> str:
        name = self._settings.claim
        found = claims.get(name)
        if not isinstance(found, str) or not found or len(found) > _MOST_USER or not found.isprintable():
            raise SignInError(f"the provider's ID token has no {name}")
        if name == "email" and claims.get("email_verified") is not True:
            raise SignInError("the provider's ID token does not say that the email is verified")
        return found

    def _renew_keys(self) -> None:
        with self._lock:
            if time.monotonic() - self._keys_at < _KEYS_AGAIN_S:
                return
            self._keys_at = time.monotonic()
        self._keys = self._read_keys()

    def _read_keys(self) -> Any:
        keys = self._ask(self._jwks).get("keys")
        if not isinstance(keys, list):
            raise SignInError("it has sent no keys")
        usable = [
            each
            for each in cast("list[Any]", keys)
            if isinstance(each, dict) and each.get("kty") in _KINDS and each.get("use", "sig") == "sig"
        ]
        if not usable:
            raise SignInError("found no key of RSA or EC, expected one: it signs the tokens")
        errors = require("joserfc.errors", "team")
        try:
            return require("joserfc.jwk", "team").KeySet.import_key_set({"keys": usable})
        except (errors.JoseError, ValueError, TypeError, KeyError) as error:
            raise SignInError(f"its keys can't be read: {first_line(str(error), _SHOWN)}") from None

    def _address(self, found: Any) -> str:
        parts = urlsplit(found if isinstance(found, str) else "")
        is_local = parts.scheme == "http" and is_loopback(parts.netloc) and self._settings.issuer.startswith("http:")
        if not is_local and not (parts.scheme == "https" and parts.hostname):
            raise SignInError(f"found the address {found!r:.200}, expected https://")
        return str(found)

    def _ask(self, url: str, form: dict[str, str] | None = None, headers: dict[str, str] | None = None) -> Any:
        """Return the JSON object at an address of the provider. No redirect is followed."""
        body = None if form is None else urlencode(form)
        kind = {} if form is None else {"content-type": "application/x-www-form-urlencoded"}
        try:
            answer = self._pool.request(
                "GET" if form is None else "POST",
                url,
                body=body,
                headers={"accept": "application/json", **kind, **(headers or {})},
                redirect=False,
                preload_content=False,
            )
            try:
                content = answer.read(_MOST_BYTES + 1)
            finally:
                answer.close()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            reason = first_line(str(error), _SHOWN)
            raise SignInError(f"{urlsplit(url).netloc} does not answer: {reason}") from None
        if answer.status != 200 or len(content) > _MOST_BYTES:
            raise SignInError(f"{urlsplit(url).netloc} has answered with {answer.status}, expected 200")
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise SignInError(f"{urlsplit(url).netloc} has sent something else than JSON")
        return cast("dict[str, Any]", found)
