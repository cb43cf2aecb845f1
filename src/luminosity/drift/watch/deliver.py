"""Delivers alerts: to a command, as JSON on its standard input, or to a webhook, as a POST request with JSON.

Secrets come from environment variables. No message or log holds an address with its path, a header, or the output of a
command.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from luminosity._shared.text import describe_exit
from luminosity.drift.watch.state import Alert
from luminosity.errors import DriftError

__all__ = ["Target", "command_target", "webhook_target"]

_SECRET = re.compile(r"auth|token|secret|key|cookie|password", re.IGNORECASE)
_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")
_ADDRESS = re.compile(r"[!-~]+")  # what http.client takes: ASCII, without blanks
_FIRST_PAUSE_S = 1.0  # before the first retry of a request; it doubles
_BUSY = 429  # the status of a server that asks to come back later


@dataclass(frozen=True)
class Target:
    """Where alerts go. ``name`` holds no secret. ``send`` returns None, or why the alert could not be delivered."""

    name: str
    send: Callable[[Alert], str | None] = field(repr=False)


def command_target(words: Sequence[str], timeout_s: float) -> Target:
    """Return a target that starts a program for each alert, without a shell."""
    if not words:
        raise DriftError("found an empty command, expected a program and its arguments", fix='command = ["notify"]')
    if shutil.which(words[0]) is None:
        raise DriftError(f"there is no program {words[0]!r}, expected one on the path, or the path of one")
    return Target(f"command {words[0]}", lambda alert: _run(words, timeout_s, alert))


def webhook_target(
    address: str | None, variable: str | None, headers: Mapping[str, str], timeout_s: float, retries: int
) -> Target:
    """Return a target that sends a POST request for each alert.

    The address is given, or stands in an environment variable. Values of headers may be ``$VARIABLE``.
    """
    if variable is not None:
        address = _environment(variable)
    try:
        parts = urlsplit(address or "")
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is no number
        parts, is_valid = urlsplit(""), False
    if not is_valid or not _ADDRESS.fullmatch(address or ""):
        where = f"in the environment variable {variable}" if variable else f"with the scheme {parts.scheme!r}"
        raise DriftError(
            f"found a webhook {where} that is no http or https address, expected https://HOST/PATH or "
            "https://HOST:PORT/PATH, with %20 for a blank and so on"
        )
    if variable is None and (parts.username or parts.password):
        raise DriftError(
            "found a user name or password in the address of a webhook, expected secrets in environment variables",
            fix="use webhook_env, or a header with a $VARIABLE",
        )
    values = {name: _header(name, value) for name, value in headers.items()}
    values["Content-Type"] = "application/json"
    url = address or ""
    return Target(
        f"webhook {parts.scheme}://{parts.hostname}", lambda alert: _post(url, values, timeout_s, retries, alert)
    )


def _environment(variable: str) -> str:
    found = os.environ.get(variable, "")
    if not found:
        raise DriftError(f"found no environment variable {variable}, expected one that is set and not empty")
    return found


def _header(name: str, value: str) -> str:
    match = _VARIABLE.fullmatch(value)
    if match is not None:
        value = _environment(match[1])
    elif _SECRET.search(name):
        raise DriftError(
            f"found a value of the header {name} in the configuration, expected it in an environment variable",
            fix=f'write {name} = "$VARIABLE"',
        )
    if "\n" in value or "\r" in value:
        raise DriftError(f"found a line break in the value of the header {name}, expected one line")
    return value


def _body(alert: Alert) -> bytes:
    return json.dumps(alert.as_dict(), ensure_ascii=False).encode() + b"\n"


def _run(words: Sequence[str], timeout_s: float, alert: Alert) -> str | None:
    try:
        process = subprocess.Popen(
            list(words),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that what it started ends with it
        )
    except OSError as error:
        return f"can't be started: {error.strerror}"
    try:
        process.communicate(_body(alert), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"took longer than {timeout_s:g} s and was ended"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return None if process.returncode == 0 else describe_exit(process.returncode)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the next host must not get the headers."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _post(url: str, headers: Mapping[str, str], timeout_s: float, retries: int, alert: Alert) -> str | None:
    opener = urllib.request.build_opener(_NoRedirects())
    reason = ""
    for attempt in range(retries + 1):
        if attempt:
            time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
        request = urllib.request.Request(url, _body(alert), dict(headers), method="POST")
        try:
            with opener.open(request, timeout=timeout_s):
                return None
        except urllib.error.HTTPError as error:
            with error:
                reason = f"the server answered with status {error.code}"
                if error.code < 500 and error.code != _BUSY:
                    return reason
        except http.client.HTTPException as error:
            reason = f"the server's answer is no HTTP ({type(error).__name__})"
        except (OSError, ValueError) as error:  # ValueError: http.client refuses a header
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            reason = f"the server can't be reached ({type(cause).__name__})"
    return f"{reason}, {retries + 1} times" if retries else reason
