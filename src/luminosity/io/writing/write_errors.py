"""What goes wrong with files, said in one place: what was found, where, and what helps."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Generator

import pyarrow as pa
from apache_beam.io.filesystem import BeamIOError

from luminosity._text import format_bytes
from luminosity.errors import WriteError
from luminosity.io.writing import filesystem

__all__ = ["clear_errors"]

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_FOLDER = (errno.ENOTDIR, errno.EEXIST)


@contextlib.contextmanager
def clear_errors(path: str) -> Generator[None]:
    """Turn what a file system says into a WriteError about the table at ``path``."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(_message(path, error)) from error
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise WriteError(f"{path}: the table can't be written in this format: {error}") from error


def _message(path: str, error: OSError) -> str:
    cause = _cause(error)
    number = cause.errno if isinstance(cause, OSError) else None
    if number in _FULL:
        return (
            f"{path}: the disk is full ({_room(path)}). Free some, or write to a folder on a larger disk; "
            "compression='zstd' takes less room than others. Nothing of the table was left half-written"
        )
    if number in _FORBIDDEN:
        reason = "the disk is read-only" if number == errno.EROFS else "this user may not write there"
        return f"{path}: {reason} ({cause}). Choose another folder, or change its owner or mode"
    if number in _NO_FOLDER:
        return f"{path}: a part of this path is a file, expected a folder ({cause})"
    return f"{path}: can't be written: {cause}"


def _cause(error: OSError) -> BaseException:
    """The first of what Beam gathers for several files, or wraps."""
    details = error.exception_details if isinstance(error, BeamIOError) else None
    if details:
        found = next(iter(details.values()))
        return _cause(found) if isinstance(found, OSError) else found or error
    inner = error.args[0] if error.args else None
    return _cause(inner) if isinstance(inner, OSError) else error


def _room(path: str) -> str:
    if not filesystem.is_local(path):
        return "no more is known of it"
    try:
        usage = shutil.disk_usage(filesystem.nearest_folder(path))
    except OSError as error:
        return str(error)
    return f"{format_bytes(usage.free)} of {format_bytes(usage.total)} are free"
