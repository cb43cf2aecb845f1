"""Turn the errors of file systems into errors that say what was found, where, and how to fix it."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Generator

import pyarrow as pa
from apache_beam.io.filesystem import BeamIOError

from luminosity._shared.text import format_bytes
from luminosity.errors import Fix, WriteError, may_pass
from luminosity.io.writing import filesystem

__all__ = ["clear_errors"]

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_FOLDER = (errno.ENOTDIR, errno.EEXIST)
_ANOTHER_PATH = "choose another path"
_FREE_SPACE = Fix(
    "free some space, write to a larger disk, or pass compression='zstd', which takes the least space",
    command="free some space, or write to a larger disk",
)


@contextlib.contextmanager
def clear_errors(path: str) -> Generator[None]:
    """Turn the errors of a file system into a ``WriteError`` about the table at ``path``."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise _explained(path, error) from error
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise WriteError(f"{path}: the table can't be written in this format: {error}") from error


def _explained(path: str, error: OSError) -> WriteError:
    cause = _cause(error)
    number = cause.errno if isinstance(cause, OSError) else None
    if number in _FULL:
        message = f"{path}: the disk is full ({_free_space(path)}); no incomplete files of the table are left"
        return WriteError(message, fix=_FREE_SPACE)
    if number in _FORBIDDEN:
        reason = "the disk is read-only" if number == errno.EROFS else "this user may not write there"
        return WriteError(f"{path}: {reason} ({cause})", fix="choose another folder, or change its owner or mode")
    if number in _NO_FOLDER:
        return WriteError(f"{path}: found a file in this path, expected folders ({cause})", fix=_ANOTHER_PATH)
    is_outage = not filesystem.is_local(path) and may_pass(cause, in_user_code=False)
    fix = _ANOTHER_PATH if filesystem.is_local(path) else None
    return WriteError(f"{path}: can't be written: {cause}", fix=fix, may_pass=is_outage)


def _cause(error: OSError) -> BaseException:
    """Return the first of the errors that Beam collects for several files, or the error that it wraps."""
    details = error.exception_details if isinstance(error, BeamIOError) else None
    if details:
        found = next(iter(details.values()))
        return _cause(found) if isinstance(found, OSError) else found or error
    inner = error.args[0] if error.args else None
    return _cause(inner) if isinstance(inner, OSError) else error


def _free_space(path: str) -> str:
    if not filesystem.is_local(path):
        return "its free space is unknown"
    try:
        usage = shutil.disk_usage(filesystem.nearest_folder(path))
    except OSError as error:
        return str(error)
    return f"{format_bytes(usage.free)} of {format_bytes(usage.total)} are free"
