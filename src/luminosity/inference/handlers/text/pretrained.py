"""Loads models, configurations and tokenizers of transformers, without its progress bars and advice."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from luminosity._text import list_some
from luminosity.errors import InvalidArgument, ModelUnavailable
from luminosity.extras import require
from luminosity.inference.files.local import local_copy
from luminosity.inference.handlers.text.plain_tokenizer import PADDED_POSITIONS, PlainModel, read_plain

__all__ = ["Pretrained", "token_limit"]

# The loading arguments of a model that also locate its configuration and its tokenizer.
_WHERE = ("cache_dir", "gguf_file", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")


@dataclass(frozen=True)
class Pretrained:
    """A model's folder, file or name on a hub, with transformers' loading arguments."""

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def config(self) -> Any:
        """Load the model's configuration."""
        return self._load("AutoConfig", self._where)

    def tokenizer(self) -> Any:
        """Load the model's tokenizer."""
        return self._load("AutoTokenizer", self._where)

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

    def file(self, name: str) -> str | None:
        """Return the local path of a file of the model, or None if there is no such file."""
        where = {key: value for key, value in self._where.items() if key not in ("gguf_file", "trust_remote_code")}
        folder = self._folder
        if os.path.isdir(folder):
            path = os.path.join(folder, where.get("subfolder") or "", name)
            return path if os.path.isfile(path) else None
        hub = require("huggingface_hub", "transformers")
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
        if _is_path(folder) and not os.path.exists(folder):
            expanded = os.path.expanduser(folder)
            fix = f"pass {expanded!r}: `~` is not expanded" if os.path.exists(expanded) else None
            raise ModelUnavailable(f"{self.path!r}: there is no such folder here, seen from {os.getcwd()!r}", fix=fix)
        return folder

    @property
    def _where(self) -> dict[str, Any]:
        where = {name: value for name, value in self.arguments.items() if name in _WHERE}
        return {**where, "gguf_file": os.path.basename(self.path)} if self.path.endswith(".gguf") else where

    def _load(self, kind: str, arguments: Mapping[str, Any]) -> Any:
        transformers = require("transformers", "transformers")
        if "gguf_file" in arguments:
            require("gguf", "gguf")
            require("accelerate", "gguf")
        folder = self._folder
        with _without_noise():
            try:
                return getattr(transformers, kind).from_pretrained(folder, **arguments)
            except OSError as error:
                if os.path.exists(folder):
                    raise
                raise ModelUnavailable(
                    f"{self.path!r} is not a folder here, seen from {os.getcwd()!r}, and could not be loaded from the "
                    f"Hugging Face hub: {error}"
                ) from error


def _is_path(text: str) -> bool:
    """Return whether ``text`` can't be a name on a hub, which is ``name`` or ``organisation/name``.

    >>> _is_path("/models/encoder"), _is_path("./encoder"), _is_path("org/encoder")
    (True, True, False)
    """
    return os.path.isabs(text) or text.startswith((".", "~")) or text.count("/") > 1


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
