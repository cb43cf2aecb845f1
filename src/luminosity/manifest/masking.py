"""Hides what looks like a secret: passwords, tokens and keys in command lines, addresses and variables."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

__all__ = ["MASK", "is_masked", "is_secret_name", "mask_text", "mask_words"]

MASK = "***"

_SECRETS = frozenset({"apikey", "auth", "credential", "credentials", "passphrase", "passwd", "password", "pwd"}) | {
    "secret",
    "secrets",
    "token",
}
_BEFORE_KEY = frozenset({"access", "account", "api", "auth", "encryption", "private", "secret", "signing"})
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_OPTION = re.compile(r"(--?[A-Za-z][\w.-]*)(=)?(.*)", re.DOTALL)
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_IN_QUERY = re.compile(r"(?<=[?&;])([\w.-]+)=([^&;#\s]+)")
# Keys of well-known services have a prefix.
_KNOWN_KEYS = re.compile(r"\b(?:sk-|gh[pousr]_|github_pat_|hf_|xox[abp]-|glpat-|AKIA|AIza)[A-Za-z0-9_-]{12,}")


def is_secret_name(name: str) -> bool:
    """Return whether the value of an option or a variable with this name is most likely a secret.

    >>> [is_secret_name(each) for each in ("--api_key", "HF_TOKEN", "sasl.password", "--max_tokens", "--key")]
    [True, True, True, False, False]
    """
    parts = [part.lower() for part in re.split(r"[-_.\s]+", _CAMEL.sub("_", name)) if part]
    pairs = pairwise(parts)
    return bool(_SECRETS & {*parts}) or any(first in _BEFORE_KEY and second == "key" for first, second in pairs)


def mask_text(text: str) -> str:
    """Return a text with user names, passwords and keys in addresses, and keys of well-known services, hidden.

    >>> mask_text("http://me:pw@host/x?api_key=abc&n=1")
    'http://***@host/x?api_key=***&n=1'
    """
    text = _KNOWN_KEYS.sub(MASK, _IN_ADDRESS.sub(MASK, text))
    return _IN_QUERY.sub(lambda found: f"{found[1]}={MASK}" if is_secret_name(found[1]) else found[0], text)


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


def is_masked(words: Sequence[str]) -> bool:
    """Return whether a command line has lost a value to :func:`mask_words`."""
    return any(MASK in word for word in words)


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
