"""Digests of models: one number for the contents of a file, or of a folder with all names in it."""

from __future__ import annotations

import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor

from luminosity._shared.file_digest import file_digest
from luminosity.errors import ModelUnavailable

__all__ = ["check_digest", "is_digest", "model_digest"]

_AT_ONCE = 4  # files; hashing releases Python's lock
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    """Return whether ``text`` is a digest as :func:`model_digest` returns it."""
    return _DIGEST.fullmatch(text) is not None


def model_digest(path: str | os.PathLike[str]) -> str:
    """Return the digest of a model on this machine: ``sha256:`` and 64 hexadecimal digits.

    For a file it is the SHA-256 of its bytes. For a folder it is the SHA-256 of what ``sha256sum`` prints for all files
    in it: a line with digest, two spaces and relative path for each file, sorted by path. Links to files are
    followed; links to folders and empty folders do not count.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "config.json").write_text("{}")
    ...     model_digest(folder)[:15], model_digest(f"{folder}/config.json")[:15]
    ('sha256:f0c39c91', 'sha256:44136fa3')
    """
    path = os.fspath(path)
    if not os.path.isdir(path):
        return f"sha256:{file_digest(path)}"
    names = sorted(_files_in(path), key=os.fsencode)
    if not names:
        raise ModelUnavailable(f"{path!r}: found an empty folder, expected a model")
    with ThreadPoolExecutor(min(_AT_ONCE, len(names)), "digest-model") as threads:
        digests = threads.map(file_digest, (os.path.join(path, name) for name in names))
        whole = hashlib.sha256()
        for name, digest in zip(names, digests, strict=True):
            whole.update(digest.encode() + b"  " + os.fsencode(name) + b"\n")
    return f"sha256:{whole.hexdigest()}"


def check_digest(path: str, expected: str, name: str) -> None:
    """Raise ``ModelUnavailable`` if the model ``name`` at ``path`` has not the expected digest."""
    found = model_digest(path)
    if found != expected:
        raise ModelUnavailable(
            f"{name}: the files at {path!r} have the digest {found}, expected {expected}, as the registry says; they "
            "have changed since the version was registered",
            fix="restore the files, or register them as a new version",
        )


def _files_in(folder: str) -> list[str]:
    return [
        os.path.relpath(os.path.join(parent, name), folder) for parent, _, names in os.walk(folder) for name in names
    ]
