"""``lum serve HANDLER``: puts a model behind HTTP."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from typing import Any

from luminosity._shared import descendants
from luminosity._shared.flags import HANDLER_HELP
from luminosity._shared.text import parse_size
from luminosity.cli.common.exits import FAILED, fail, interrupted, was_terminated
from luminosity.cli.common.options import add_command
from luminosity.errors import LuminosityError, OptionError

__all__ = ["add_to", "serve"]

_LAST_PORT = 65_535
_LOOPBACK = ("127.0.0.1", "::1", "localhost")

_DESCRIPTION = """\
Put a model behind HTTP on this machine, for example to compare a pipeline
that uses a model server with one that runs the model itself. Requests that
arrive at the same time are computed in one batch. The server has OpenAI's API
for embeddings (POST /v1/embeddings) and KServe's version 2 (POST
/v2/models/NAME/infer).
"""
_EXAMPLES = """\
examples:
  lum serve embed:models/encoder                   at http://127.0.0.1:8000
  lum serve classify:models/sentiment --port 0     at a free port
  lum serve my_models:Translator --name translate  a handler in my_models.py
  lum serve embed:MODEL --api-key-env MY_KEY       clients send the key $MY_KEY
"""


def add_to(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = add_command(commands, "serve", "put a model behind HTTP", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("handler", metavar="HANDLER", help=HANDLER_HELP)
    parser.add_argument("--name", help="the model's name in requests (default: the last part of HANDLER)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: only this machine)")
    parser.add_argument("--port", type=int, default=8000, help="the port; 0 picks a free one (default: 8000)")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME:DATATYPE[:SIZES]",
        help="declare an input for KServe clients, such as pixels:FP32:224,224,3 (text models declare their own)",
    )
    parser.add_argument(
        "--api-key-env", metavar="VARIABLE", help="the environment variable with the key that clients must send"
    )
    parser.add_argument(
        "--max-waiting",
        type=int,
        default=256,
        metavar="N",
        help="the most requests that may wait; more get 503 (default: 256)",
    )
    parser.add_argument(
        "--max-body", default="64MB", metavar="SIZE", help="the largest body of a request (default: 64MB)"
    )
    parser.set_defaults(command=serve)


def serve(parsed: argparse.Namespace) -> int:
    """Load the model, serve it until Ctrl-C or SIGTERM, and return the exit code."""
    try:
        return _serve(parsed)
    except KeyboardInterrupt:
        return interrupted("serve", " before the model was loaded")


def _serve(parsed: argparse.Namespace) -> int:
    key = _api_key(parsed.api_key_env)
    name = parsed.name or _last_part(parsed.handler)
    if "/" in name:
        raise OptionError(f"--name={name}: expected a name without '/', because it is part of URLs")
    if not 0 <= parsed.port <= _LAST_PORT:
        raise OptionError(f"--port={parsed.port}: expected a number from 0 to {_LAST_PORT}")
    from luminosity.extras import require

    require("starlette", "serve")
    require("uvicorn", "serve")
    from luminosity.inference.model_names import handler_of
    from luminosity.inference.serving.app import Limits, app_of
    from luminosity.inference.serving.kserve_api import declared_inputs
    from luminosity.inference.serving.served_model import ServedModel
    from luminosity.operate.web_server import listen, url_of
    from luminosity.operate.web_server import serve as run_server

    limits = Limits(waiting=_waiting(parsed.max_waiting), body_bytes=_body_bytes(parsed.max_body))
    inputs = declared_inputs(parsed.input)
    with listen(parsed.host, parsed.port) as listener:
        descendants.join(descendants.Keeper.shared().family)  # what the handler starts ends with this process
        model = ServedModel(handler_of(parsed.handler), name, inputs)
        try:
            model.load()
        except LuminosityError:
            raise
        except Exception as error:
            return fail("serve", f"{parsed.handler} can't be loaded: {_describe(error)}", FAILED)
        if parsed.host not in _LOOPBACK and key is None:
            print(
                f"lum serve: anyone who can reach {parsed.host} can use the model; add --api-key-env to require a key",
                file=sys.stderr,
            )
        run_server(app_of(model, limits, key), listener, lambda: _introduce(model, url_of(listener), key is not None))
        model.close()
    return interrupted("serve") if was_terminated() else 0


def _introduce(model: Any, url: str, with_key: bool) -> None:
    key = " -H 'Authorization: Bearer KEY'" if with_key else ""
    if hasattr(model.handler, "dimension"):
        path, body = "/v1/embeddings", '{"input": ["a text"]}'
    else:
        path = f"/v2/models/{model.name}/infer"
        body = '{"inputs": [{"name": "input", "datatype": "BYTES", "shape": [1], "data": ["a text"]}]}'
    print(f"Serving {model.name} ({model.handler}) at {url}")
    print(f"  curl {url}{path}{key} -d '{body}'")
    print("Ctrl-C stops the server.", flush=True)


def _describe(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})"


def _last_part(handler: str) -> str:
    """Return the default name of the model.

    >>> _last_part("embed:models/minilm/"), _last_part("my_models:Translator")
    ('minilm', 'Translator')
    """
    return re.split(r"[:/]", handler.rstrip("/"))[-1]


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()  # clients strip it, too: a key from a file ends in a line break
    if not key:
        raise OptionError(
            f"--api-key-env={variable}: there is no such variable in the environment, or it is empty",
            fix=f"set it: export {variable}=...",
        )
    return key


def _waiting(number: int) -> int:
    if number < 0:
        raise OptionError(f"--max-waiting={number}: expected a number, at least 0")
    return number


def _body_bytes(text: str) -> int:
    size = parse_size(text)
    if not size:
        raise OptionError(f"--max-body={text}: expected a size, such as 512kB or 64MB")
    return size
