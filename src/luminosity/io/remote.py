"""Addresses on other file systems: what Beam needs for them, and what to do if they can't be reached."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from apache_beam.io.filesystem import BeamIOError
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.options.value_provider import RuntimeValueProvider

from luminosity._shared.text import first_line

__all__ = ["explain_remote", "give_options"]

_SHOWN_CHARACTERS = 300  # of the error of a file system's library


@dataclass(frozen=True)
class _FileSystem:
    library: str
    extra: str
    access: str  # the advice if the library is there


_KNOWN = {
    "s3": _FileSystem(
        "boto3", "aws", "check the address, and your credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    ),
    "gs": _FileSystem(
        "google.cloud.storage",
        "gcp",
        "check the address, and your credentials: run gcloud auth application-default login",
    ),
    "hdfs": _FileSystem("hdfs", "hadoop", "pass --hdfs_host, --hdfs_port and --hdfs_user as options of the pipeline"),
    "azfs": _FileSystem(
        "azure.storage.blob",
        "azure",
        "check the address, and your credentials: set AZURE_STORAGE_CONNECTION_STRING",
    ),
}
_OTHER_NAMES = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}


def give_options() -> None:
    """Give Beam's file systems the options of the command line, as long as no pipeline has given them its own.

    Without any options, Beam refuses even to look for files on S3 or Azure before a pipeline is made.
    """
    given = FileSystems._pipeline_options or RuntimeValueProvider.runtime_options  # pyright: ignore[reportPrivateUsage]
    if given is None:
        FileSystems.set_options(PipelineOptions())


def explain_remote(path: str, error: BaseException, *, is_read: bool = True) -> tuple[str, str | None]:
    """Return what is wrong with an address that Beam can't use, and the remedy.

    >>> explain_remote("https://example.com/a.csv", ValueError())[1]
    'download the file first'
    """
    scheme, _, rest = path.partition("://")
    name = scheme.lower()
    if name in ("http", "https"):
        message = "found an address of the web, expected a file, or an address such as s3://bucket/file"
        return message, "download the file first" if is_read else None
    if name == "file":
        return "found file://, expected a plain path", f"write {rest if rest.startswith('/') else '/' + rest}"
    usual = _OTHER_NAMES.get(name, name)
    if usual != scheme and usual in _KNOWN:
        return f"found {scheme}://, which Beam calls {usual}://", f"write {usual}://{rest}"
    if name not in _KNOWN:
        if _knows(path):
            return f"can't be reached: {_cause(error)}", None
        known = ", ".join(f"{each}://" for each in _KNOWN)
        return f"no file system is known for {scheme}://, expected a path of this machine or one of {known}", None
    known_system = _KNOWN[name]
    if not _is_installed(known_system.library):
        install = f"install it with: pip install 'apache-beam[{known_system.extra}]'"
        return f"the library for {scheme}:// is not installed ({known_system.library})", install
    return f"can't be reached: {_cause(error)}", known_system.access


def _is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ImportError:  # a package above it is missing
        return False


def _knows(path: str) -> bool:
    """Return whether a file system for this address is registered with Beam, such as one of the user's own."""
    try:
        FileSystems.get_filesystem(path)
    except (ValueError, BeamIOError):
        return False
    return True


def _cause(error: BaseException) -> str:
    """Return the text of the error inside those that Beam wraps around it."""
    while isinstance(error, BeamIOError) and error.exception_details:
        inner = next(iter(error.exception_details.values()))
        if not isinstance(inner, BaseException):
            break
        error = inner
    return first_line(str(error) or type(error).__name__, _SHOWN_CHARACTERS)
