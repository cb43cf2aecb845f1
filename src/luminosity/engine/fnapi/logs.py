"""Passes log records of workers to the loggers of the same names in the runner."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from apache_beam.portability.api import beam_fn_api_pb2, beam_fn_api_pb2_grpc

__all__ = ["PRINTED", "LoggingServicer", "WorkerOrigin", "add_logger_name", "worker_origin"]

PRINTED = "luminosity.printed"  # and the name of a standard stream: the logger of what workers elsewhere print

_SEPARATOR = "|"  # between the logger's name and the file
_UNNAMED = "luminosity.worker"  # the logger for records without a name
_LEVELS = {
    beam_fn_api_pb2.LogEntry.Severity.TRACE: logging.DEBUG,
    beam_fn_api_pb2.LogEntry.Severity.DEBUG: logging.DEBUG,
    beam_fn_api_pb2.LogEntry.Severity.INFO: logging.INFO,
    beam_fn_api_pb2.LogEntry.Severity.NOTICE: logging.INFO,
    beam_fn_api_pb2.LogEntry.Severity.WARN: logging.WARNING,
    beam_fn_api_pb2.LogEntry.Severity.ERROR: logging.ERROR,
    beam_fn_api_pb2.LogEntry.Severity.CRITICAL: logging.CRITICAL,
}


@dataclass(frozen=True)
class WorkerOrigin:
    """Where a log record of a worker comes from."""

    url: str  # of the server that the worker is connected to
    worker: str
    step: str = ""  # empty if it is not known
    traceback: str = ""


_here = threading.local()


def worker_origin() -> WorkerOrigin | None:
    """Return where the record comes from that this thread passes on; None if the record is of this process."""
    return getattr(_here, "origin", None)


def add_logger_name(record: logging.LogRecord) -> bool:
    """Put the logger's name before the record's path. Beam's messages have a field for the path, but not for the name.

    Workers use it as a filter of Beam's log handler.
    """
    record.pathname = f"{record.name}{_SEPARATOR}{record.pathname}"
    return True


class LoggingServicer(beam_fn_api_pb2_grpc.BeamFnLoggingServicer):
    """Receives the log records of all workers, on the server's threads."""

    def __init__(self, url: str) -> None:
        """``url`` is the address of the server."""
        self._url = url

    def Logging(self, request_iterator: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """Pass on a worker's log records until it closes the stream. Sends no responses."""
        worker = str(dict(context.invocation_metadata()).get("worker_id", ""))
        for entries in request_iterator:
            for entry in entries.log_entries:
                _here.origin = WorkerOrigin(self._url, worker, entry.transform_id, entry.trace)
                try:
                    _log(entry)
                finally:
                    _here.origin = None
        return
        yield  # makes this a generator, as gRPC needs for a stream


def _log(entry: beam_fn_api_pb2.LogEntry) -> None:
    place, _, line = entry.log_location.rpartition(":")
    name, _, path = place.rpartition(_SEPARATOR)
    if name.startswith(PRINTED):
        # Looked up each time, because a live view replaces the stream.
        print(entry.message, file=sys.stderr if name.endswith("stderr") else sys.stdout, flush=True)
        return
    logger = logging.getLogger(name if name != "root" else None) if name else logging.getLogger(_UNNAMED)
    level = _LEVELS.get(entry.severity, logging.INFO)
    if logger.isEnabledFor(level):
        number = int(line) if line.isdigit() else 0
        logger.handle(logger.makeRecord(logger.name, level, path, number, entry.message, (), None))
