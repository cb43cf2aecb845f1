"""Hides what looks like a secret: passwords, tokens and keys in texts, command lines, addresses and variables."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

__all__ = ["MASK", "is_secret_name", "mask_text", "mask_words"]

MASK = "***"
_MOST_NAMES = 2_000  # whose verdicts are kept: lines of a log have the same names again and again

_PASSWORDS = frozenset({"passphrase", "passwd", "password", "passwords", "pwd", "secret", "secrets"})
_SECRETS = _PASSWORDS | {"apikey", "auth", "credential", "credentials", "token"}
_ENDINGS = ("password", "passwd", "passphrase", "secret", "apikey", "token")  # of words such as PGPASSWORD
_BEFORE_KEY = frozenset({"access", "account", "api", "auth", "encryption", "private", "secret", "signing"})
_BEFORE_PASS = frozenset(
    {"admin", "database", "db", "mail", "mysql", "pg", "postgres", "redis", "root", "smtp", "user"}
)
# A name with a secret's word that ends with one of these says something about the secret, not the secret itself.
_ABOUT = {
    *("attempts", "budget", "column", "cost", "count", "counts", "dir", "enabled", "endpoint", "expires", "expiry"),
    *("field", "file", "folder", "header", "id", "ids", "index", "key", "keys", "kind", "len", "length", "level"),
    *("limit", "limits", "mode", "name", "names", "offset", "path", "policy", "position", "provider", "rate"),
    *("required", "size", "timeout", "ttl", "type", "types", "uri", "url", "version"),
}
# A model's own tokens, such as pad_token, are words of its vocabulary.
_VOCABULARY = {
    *("bos", "cls", "eos", "first", "last", "mask", "max", "min", "next", "num", "pad", "per", "sep", "special", "unk")
}
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_OPTION = re.compile(r"(--?[A-Za-z][\w.-]*)(=)?(.*)", re.DOTALL)
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s\"'?#]+(?=@)")
# Keys of well-known services have a prefix. A JSON web token has three parts, of which the first begins with eyJ.
_KNOWN_KEYS = re.compile(
    r"\b(?:(?:sk-|[rs]k_live_|gh[pousr]_|github_pat_|hf_|xox[abeprs]-|glpat-|npm_|pypi-|ya29\.|AKIA|ASIA|AIza)"
    r"[A-Za-z0-9_-]{12,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?)"
)
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_SCHEMES = ("bearer", "basic", "digest", "negotiate", "token", "apikey")
_AUTHORIZATION = re.compile(
    r"(?i)(?P<name>\bauthorization\\{0,8}[\"']?\s{0,4}[:=,]\s{0,4}\\{0,8}[\"']?)?"
    rf"\b(?P<scheme>{'|'.join(_SCHEMES)})(?P<gap>\s+)(?P<value>[\w.~+/=:-]+)"
)
# A name before its value: password=…, "password": "…", ('password', '…'), also within a quoted text.
_NAME = re.compile(
    r"(?<![\w.-])(?:\\{0,8}[\"'])?(?P<name>-{0,2}[A-Za-z][\w.-]{0,80})(?P<close>\\{0,8}[\"'])?"
    r"(?P<between>\s{0,4}(?:=>|[=:,])\s{0,4})"
)
_VALUE = re.compile(
    r"(?P<quote>[bru]{0,2}(?:\\+[\"']|(?P<double>\")|(?P<single>')))"
    r"(?P<quoted>(?(double)(?:[^\"\\]|\\.)*|(?(single)(?:[^'\\]|\\.)*|[^\"'\\]*)))"
    r"|(?P<plain>[^\s,;&)\]}\"']+)"
)
_AFTER_OPTION = re.compile(r"(?<![\w-])(?P<name>--?[A-Za-z][\w.-]{0,80})(?P<between> +)(?P<value>[^\s-]\S*)")
# What stands in the place of a value: nothing, a placeholder or the name of a variable; or code that gets it.
_PLACEHOLDER = re.compile(
    r"\W?(?:None|null|none|True|False|true|false|str|int|bytes)?\W?|\*+|\.{2,3}|…|%[srd(].*|\{\w*\}?|<[\w ]*>?"
    r"|\$\{?[A-Z_][A-Z0-9_]*\}?"
)
_CODE = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*[(\[].*|(?:self|cls|args|config|os|options|settings)\.\w.*")
_RANDOM = re.compile(r"(?=.*[A-Za-z])(?=.*[\d_/+=-]|.*[a-z][A-Z])\S{8,}")  # what a token looks like; no word does
_WORDS = {
    *("and", "are", "expected", "for", "found", "given", "has", "if", "in", "is", "it", "must", "needs", "not", "of"),
    *("on", "or", "the", "to", "was", "with"),
}

_SIGNS_OF_NAMES = ("pass", "pwd", "secret", "token", "auth", "key", "credential")  # every secret's name has one
_SIGNS_OF_KEYS = (
    *("eyj", "sk-", "k_live_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "hf_", "xox", "glpat-", "npm_"),
    *("pypi-", "ya29", "akia", "asia", "aiza"),
)


@lru_cache(_MOST_NAMES)
def is_secret_name(name: str) -> bool:
    """Return whether the value of an option or a variable with this name is most likely a secret.

    >>> [is_secret_name(each) for each in ("--api_key", "HF_TOKEN", "sasl.password", "PGPASSWORD", "accessToken")]
    [True, True, True, True, True]
    >>> [is_secret_name(each) for each in ("--max_tokens", "--key", "pad_token", "token_count", "secret_name")]
    [False, False, False, False, False]
    """
    parts = [part.lower().rstrip("0123456789") for part in re.split(r"[-_.\s]+", _CAMEL.sub("_", name))]
    parts = [part for part in parts if part]
    if any(first in _BEFORE_KEY and second == "key" for first, second in pairwise(parts)):
        return parts[-1] == "key" or parts[-1] not in _ABOUT
    if parts[-1:] == ["pass"]:
        return bool(_BEFORE_PASS & {*parts})
    if not any(part in _SECRETS or part.endswith(_ENDINGS) for part in parts) or parts[-1] in _ABOUT:
        return False
    return not (parts[-1] == "token" and len(parts) > 1 and parts[-2] in _VOCABULARY)


def mask_text(text: str) -> str:
    """Return a text, such as an error's message, a traceback or a line of a log, with what looks like a secret hidden.

    These are values with a secret's name (``password=…``, ``--token …``, ``"api_key": "…"``), user and password in
    addresses, authorizations, private keys, and keys of well-known services. Ordinary text stays as it is.

    >>> mask_text("http://me:pw@host/x?api_key=abc&n=1")
    'http://***@host/x?api_key=***&n=1'
    >>> mask_text("can't log in with password=hunter2: Authorization: Bearer abc, {'sasl.password': 'x y'}")
    "can't log in with password=***: Authorization: Bearer ***, {'sasl.password': '***'}"
    >>> mask_text("token 5 of 7, max_tokens=12, password=None: unexpected token: 'else'")
    "token 5 of 7, max_tokens=12, password=None: unexpected token: 'else'"
    """
    # Each expression takes a while, and most lines of a log lack the sign of what it looks for.
    lower = text.lower()
    if "://" in lower and "@" in lower:
        text = _IN_ADDRESS.sub(MASK, text)
    if "-----begin" in lower:
        text = _PRIVATE_KEY.sub(rf"\1{MASK}\2", text)
    if any(sign in lower for sign in _SIGNS_OF_KEYS):
        text = _KNOWN_KEYS.sub(MASK, text)
    if "authorization" in lower or "bearer" in lower:
        text = _AUTHORIZATION.sub(_mask_authorization, text)
    if not any(sign in lower for sign in _SIGNS_OF_NAMES):
        return text
    text = _mask_pairs(text)
    return _AFTER_OPTION.sub(_mask_after_option, text) if "-" in text else text


def _mask_authorization(found: re.Match[str]) -> str:
    scheme = found["scheme"].lower()
    is_sure = bool(found["name"]) or (scheme == "bearer" and _RANDOM.fullmatch(found["value"]) is not None)
    return f"{found['name'] or ''}{found['scheme']}{found['gap']}{MASK}" if is_sure else found[0]


def _mask_pairs(text: str) -> str:
    parts: list[str] = []
    done = 0
    for found in _NAME.finditer(text):
        if found.start() < done or not is_secret_name(found["name"]):
            continue
        value = _VALUE.match(text, found.end())
        if value is not None and (kept := _after_mask(found, value)) is not None:
            parts += [text[done : found.end()], value["quote"] or "", MASK, kept]
            done = value.end()
    return "".join([*parts, text[done:]])


def _after_mask(found: re.Match[str], value: re.Match[str]) -> str | None:
    """Return what stays at the end of a value that is masked, or None if the value is no secret."""
    between, is_quoted = found["between"].strip(), value["plain"] is None
    secret: str = value["quoted"] if is_quoted else value["plain"]
    last = re.split(r"[-_.]", _CAMEL.sub("_", found["name"]))[-1].lower().rstrip("0123456789")
    if _PLACEHOLDER.fullmatch(secret) or secret in (found["name"], last) or secret.startswith(MASK):
        return None
    if not is_quoted and _CODE.fullmatch(secret):
        return None
    if between == "," and not (found["close"] and is_quoted):
        return None  # words of a list
    if last.endswith("token") and re.fullmatch(r"\d{1,4}", secret):
        return None  # a number or a position of a token
    if secret.lower() in _SCHEMES:
        return None  # what follows is masked already
    is_prose = between == ":" and not found["close"]
    if is_prose and (secret in _WORDS or (last not in (*_PASSWORDS, "key") and not _RANDOM.fullmatch(secret))):
        return None  # such as: unexpected token: 'else'
    # A sign that ends a clause is not the secret's.
    return "" if is_quoted or len(secret) == 1 else re.findall(r"[.:!?]*$", secret)[0]


def _mask_after_option(found: re.Match[str]) -> str:
    value = found["value"].strip("\"'.,:;()")
    if not is_secret_name(found["name"]) or value in _WORDS or not value or _PLACEHOLDER.fullmatch(value):
        return found[0]
    if found["value"][0] in "=:":
        return found[0]
    return f"{found['name']}{found['between']}{MASK}"


def mask_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with every value hidden that looks like a secret.

    >>> mask_words(["--api_key=abc", "--password", "xyz", "--rows=5", '{"token": "t", "n": 1}'])
    ['--api_key=***', '--password', '***', '--rows=5', '{"token": "***", "n": 1}']
    """
    masked: list[str] = []
    hides_next = False
    for word in words:
        option = _OPTION.fullmatch(word)
        if hides_next and not word.startswith("--"):
            masked.append(MASK)
            hides_next = False
            continue
        hides_next = False
        if option is None:
            masked.append(_mask_value(word))
        elif not is_secret_name(option[1]):
            masked.append(f"{option[1]}={_mask_value(option[3])}" if option[2] else mask_text(word))
        else:
            masked.append(f"{option[1]}={MASK}" if option[2] else word)
            hides_next = not option[2]
    return masked


def _mask_value(value: str) -> str:
    if value.startswith(("{", "[")):
        try:
            content = json.loads(value)
        except ValueError:
            return mask_text(value)
        hidden = _mask_json(content)
        return value if hidden == content else json.dumps(hidden)
    return mask_text(value)


def _mask_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: MASK if is_secret_name(str(name)) else _mask_json(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_mask_json(each) for each in value]
    return mask_text(value) if isinstance(value, str) else value
