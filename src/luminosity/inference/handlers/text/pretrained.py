"""Loads models, configurations and tokenizers of transformers, without its progress bars and advice.

transformers asks the hub for every file and repeats each request for half a minute if the network is down. So the hub
is asked once, with a short timeout, before transformers runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from apache_beam.io.filesystems import FileSystems

from luminosity._shared.text import first_line, list_some
from luminosity.errors import Fix, InvalidArgument, ModelUnavailable
from luminosity.extras import require
from luminosity.inference.files.local import check_exists, local_copy, near_path
from luminosity.inference.handlers.text.plain.tokenizer import PADDED_POSITIONS, PlainModel, read_plain

__all__ = ["Pretrained", "must_stay_offline", "token_limit"]
# The loading arguments of a model that also locate its configuration and its tokenizer.
_WHERE = ("cache_dir", "gguf_file", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")
_END_BYTES = 1 << 16  # of a file's beginning and of its end: whole weights take long to read
_MOST_FILES = 10_000  # of a model's folder


@dataclass(frozen=True)
class Pretrained:
    """A model's folder, file or name on a hub, with transformers' loading arguments."""

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def check(self) -> None:
        """Raise ``ModelUnavailable`` if this process can't find the model. Blocks for a few seconds at most.

        Does nothing for a model on another file system, which is found when it is fetched.
        """
        if FileSystems.get_scheme(self.path) not in (None, "file") or self._is_offline:
            return
        folder = self._folder
        if os.path.isdir(folder) and not any(_is_model_file(name) for _, _, names in os.walk(folder) for name in names):
            raise ModelUnavailable(
                f"{self.path!r}: found no config.json in the folder {os.path.abspath(folder)!r}, expected a model"
            )

    def config(self) -> Any:
        """Load the model's configuration."""
        return self._load("AutoConfig", self._where)

    def tokenizer(self) -> Any:
        """Load the model's tokenizer."""
        return self._load("AutoTokenizer", self._where, self._mlflow_tokenizer)

    def image_processor(self) -> Any:
        """Load the model's image processor, the one that uses Pillow: others need torchvision."""
        version = int(require("transformers", "transformers").__version__.partition(".")[0])
        pillow = {"backend": "pil"} if version >= 5 else {"use_fast": False}
        return self._load("AutoImageProcessor", {**self._where, **pillow})

    def plain(self) -> PlainModel | None:
        """Read the tokenizer and what preparing needs of the configuration without transformers; None if it can't."""
        where = self._where
        if "gguf_file" in where or where.get("trust_remote_code"):
            return None
        return read_plain(self)

    def model(self, kind: str, dtype: Any, optional: tuple[str, ...] = ()) -> Any:
        """Load the model in evaluation mode.

        Raises if the files lack any weights other than those whose names start with one of ``optional``: transformers
        would fill them with random numbers.
        """
        arguments = {"dtype": "auto" if dtype is None else dtype, **self._where, **self.arguments}
        model, info = self._load(kind, {**arguments, "output_loading_info": True})
        missing = sorted(key for key in info["missing_keys"] if not key.startswith(optional))
        if missing:
            raise InvalidArgument(
                f"{self.path!r} lacks weights that {type(model).__name__} needs: {list_some(missing, 3)}; it was made "
                "for another task, or is not trained yet"
            )
        return model.eval().requires_grad_(False)

    def json(self, name: str) -> Any:
        """Return the content of a JSON file of the model, or None if there is no such file."""
        path = self.file(name)
        if path is None:
            return None
        with open(path, encoding="utf-8") as file:
            return json.load(file)

    def version(self) -> str:
        """Return a digest that differs for each version of the model's files: their names, sizes, times and ends."""
        path = local_copy(self.path)
        config = None if path.endswith(".gguf") else self.file("config.json")
        top = path if config is None else os.path.dirname(config)
        digest = hashlib.sha256(top.encode())
        found = [os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names] or [top]
        for each in sorted(found)[:_MOST_FILES]:
            with open(each, "rb") as file:
                status = os.fstat(file.fileno())
                digest.update(f"\0{each}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
                digest.update(file.read(_END_BYTES))
                file.seek(max(0, status.st_size - _END_BYTES))
                digest.update(file.read(_END_BYTES))
        return digest.hexdigest()

    def file(self, name: str) -> str | None:
        """Return the local path of a file of the model, or None if there is no such file."""
        where = {key: value for key, value in self._where.items() if key not in ("gguf_file", "trust_remote_code")}
        folder = self._folder
        if os.path.isdir(folder):
            path = os.path.join(folder, where.get("subfolder") or "", name)
            if not os.path.isfile(path) and self._mlflow_tokenizer is not None:
                path = os.path.join(self._mlflow_tokenizer, name)
            return path if os.path.isfile(path) else None
        hub = require("huggingface_hub", "transformers")
        where |= self._offline_arguments
        try:
            return hub.hf_hub_download(folder, name, **where)
        except hub.errors.EntryNotFoundError:
            return None
        except (OSError, ValueError):
            # transformers retries some of these errors, and explains the others.
            cached_file = require("transformers.utils.hub", "transformers").cached_file
            return cached_file(folder, name, **where, **_NONE_IF_MISSING)

    @property
    def _folder(self) -> str:
        path = local_copy(self.path)
        folder = os.path.dirname(path) or "." if path.endswith(".gguf") else path
        if not is_hub_name(folder):
            check_exists(folder)
        return folder

    @property
    def _mlflow_tokenizer(self) -> str | None:
        """The folder of the tokenizer, if MLflow has saved it beside the model's folder; otherwise None."""
        parent = os.path.dirname(os.path.abspath(self._folder))
        folder = os.path.join(parent, "components", "tokenizer")
        return folder if os.path.isfile(os.path.join(parent, "MLmodel")) and os.path.isdir(folder) else None

    @property
    def _is_offline(self) -> bool:
        """Whether only the local cache has the model. Raises ``ModelUnavailable`` if neither it nor the hub has it."""
        folder = self._folder
        return not os.path.exists(folder) and must_stay_offline(folder, self.arguments)

    @property
    def _offline_arguments(self) -> dict[str, Any]:
        return {"local_files_only": True} if self._is_offline else {}

    @property
    def _where(self) -> dict[str, Any]:
        where = {name: value for name, value in self.arguments.items() if name in _WHERE}
        return {**where, "gguf_file": os.path.basename(self.path)} if self.path.endswith(".gguf") else where

    def _load(self, kind: str, arguments: Mapping[str, Any], folder: str | None = None) -> Any:
        transformers = require("transformers", "transformers")
        if "gguf_file" in arguments:
            require("gguf", "gguf")
            require("accelerate", "gguf")
        folder = folder or self._folder
        arguments = {**arguments, **self._offline_arguments}
        with _without_noise():
            try:
                return getattr(transformers, kind).from_pretrained(folder, **arguments)
            except OSError as error:
                if error.errno is not None:
                    raise  # the file system's own error
                where = "the folder" if os.path.exists(folder) else "the Hugging Face hub"
                raise ModelUnavailable(f"{self.path!r} can't be loaded from {where}: {error}") from error
            except ValueError as error:
                if not str(error).startswith("Unrecognized configuration class"):
                    raise
                kind_of_model = type(self.config()).model_type  # the error lists all types that there are
                raise InvalidArgument(
                    f"{self.path!r} is a model of the type {kind_of_model!r}, which {kind} of transformers can't load; "
                    "it was made for another task"
                ) from None


def _is_model_file(name: str) -> bool:
    return name.endswith((".gguf", ".json"))


_NONE_IF_MISSING = {
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
    "_raise_exceptions_for_gated_repo": False,
}


def token_limit(requested: int | None, tokenizer: Any, config: Any) -> int | None:
    """Return how many tokens of a text the model gets, or None for no limit.

    It is the requested number, or the tokenizer's own, but never more than the model has positions.
    """
    limits = [tokenizer.model_max_length if requested is None else requested]
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions > 0:
        before = (config.pad_token_id or 0) + 1 if config.model_type in PADDED_POSITIONS else 0
        limits.append(positions - before)
    smallest = min(limits)
    return int(smallest) if smallest < 10**9 else None  # a huge number is a tokenizer's "no limit"


_noise_lock = threading.Lock()
_loading = 0
_before: tuple[int, bool] = (0, False)


@contextmanager
def _without_noise() -> Generator[None, None, None]:
    """Turn off transformers' progress bars and advice while any thread loads a model."""
    global _loading, _before
    logging = require("transformers.utils.logging", "transformers")
    with _noise_lock:
        if _loading == 0:
            _before = logging.get_verbosity(), logging.is_progress_bar_enabled()
            logging.set_verbosity_error()
            logging.disable_progress_bar()
        _loading += 1
    try:
        yield
    finally:
        with _noise_lock:
            _loading -= 1
            if _loading == 0:
                verbosity, has_bars = _before
                logging.set_verbosity(verbosity)
                if has_bars:
                    logging.enable_progress_bar()


_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_TIMEOUT_S = 5.0  # a hub that has not answered by then counts as unreachable
_REMEMBERED_S = 60.0  # how long an answer, or none, holds: loading a model asks for many files
_MOST_REMEMBERED = 64  # answers
_REASON_CHARACTERS = 200
_Question: TypeAlias = tuple[str, str | None, str | bool | None, str]  # name, revision, token, endpoint


@dataclass(frozen=True)
class _Answer:
    state: Literal["found", "missing", "unreachable"]
    reason: str = ""


_answers: dict[_Question, tuple[float, _Answer]] = {}  # with the time of each; threads may replace each other's


def is_hub_name(text: str) -> bool:
    """Return whether ``text`` can be a name on a hub: ``name`` or ``organisation/name``.

    >>> is_hub_name("org/encoder"), is_hub_name("models/encoder/"), is_hub_name("./encoder"), is_hub_name("a/b/c")
    (True, False, False, False)
    """
    return _NAME.fullmatch(text) is not None


def must_stay_offline(name: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether a model must be loaded from the local cache alone, because the hub can't be reached.

    ``arguments`` are those that transformers gets. Blocks for a few seconds at most. Raises ``ModelUnavailable`` if the
    cache does not have the model either, or the hub has no such model.
    """
    constants = require("huggingface_hub.constants", "transformers")
    caches = _caches(arguments.get("cache_dir"), constants)
    is_cached = any(_has_model(cache, name) for cache in caches)
    if arguments.get("local_files_only"):
        answer = _Answer("unreachable", "local_files_only=True forbids it")
    elif constants.HF_HUB_OFFLINE:
        answer = _Answer("unreachable", "HF_HUB_OFFLINE forbids it")
    else:
        answer = _ask((name, arguments.get("revision"), arguments.get("token"), constants.ENDPOINT))
    if is_cached or answer.state == "found":
        return answer.state == "unreachable"
    hub = (
        f"no model of this name at {constants.ENDPOINT}"
        if answer.state == "missing"
        else f"{constants.ENDPOINT} can't be reached"
    )
    near = near_path(name)
    raise ModelUnavailable(
        f"{name!r}: found no folder {os.path.abspath(name)!r}, no copy in the cache {caches[0]!r}, and {hub} "
        f"({answer.reason})",
        fix=near or _advice(name, answer),
    )


def _advice(name: str, answer: _Answer) -> Fix | str:
    if answer.state == "missing":
        return "check the spelling; a private model needs a token: hf auth login"
    return f"check the path, or fetch the model where there is a network: hf download {name}"


def _caches(chosen: Any, constants: Any) -> list[str]:
    """Return the folders in which transformers looks for models of the hub."""
    if chosen is not None:
        return [os.fspath(chosen)]
    older = os.environ.get("TRANSFORMERS_CACHE")
    return [constants.HF_HUB_CACHE, *([older] if older else [])]


def _has_model(cache: str, name: str) -> bool:
    snapshots = os.path.join(cache, f"models--{name.replace('/', '--')}", "snapshots")
    return any(files for _, _, files in os.walk(snapshots))


def _ask(question: _Question) -> _Answer:
    """Return the hub's answer, which may be a minute old."""
    asked_at, answer = _answers.get(question, (-_REMEMBERED_S, _Answer("unreachable")))
    if time.monotonic() - asked_at < _REMEMBERED_S:
        return answer
    answer = _ask_now(question)
    if len(_answers) >= _MOST_REMEMBERED:
        _answers.clear()
    _answers[question] = time.monotonic(), answer
    return answer


def _ask_now(question: _Question) -> _Answer:
    found: list[_Answer] = []

    def ask() -> None:
        found.append(_request(*question))

    # On its own thread: the timeout of an HTTP client does not bound how long it looks for the hub's address.
    thread = threading.Thread(target=ask, name="ask-the-hub", daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    return found[0] if found else _Answer("unreachable", f"no answer within {_TIMEOUT_S:.0f} s")


def _request(name: str, revision: str | None, token: str | bool | None, endpoint: str) -> _Answer:
    hub = require("huggingface_hub", "transformers")
    errors = require("huggingface_hub.errors", "transformers")
    try:
        hub.HfApi(endpoint=endpoint).model_info(name, revision=revision, token=token, timeout=_TIMEOUT_S)
    except errors.GatedRepoError:
        return _Answer("found")
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        return _Answer("missing", first_line(str(error), _REASON_CHARACTERS))
    except errors.HfHubHTTPError:
        return _Answer("found")  # the hub answers; what it says about single files is for transformers to explain
    except Exception as error:  # whichever HTTP library it uses
        return _Answer("unreachable", first_line(str(error), _REASON_CHARACTERS) or type(error).__name__)
    return _Answer("found")
