"""Passes log records of workers to the loggers of the same names in the runner."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import grpc
from apache_beam.portability.api import beam_fn_api_pb2, beam_fn_api_pb2_grpc

__all__ = ["LoggingServicer", "add_logger_name"]

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


def add_logger_name(record: logging.LogRecord) -> bool:
    """Put the logger's name before the record's path. Beam's messages have a field for the path, but not for the name.

    Workers use it as a filter of Beam's log handler.
    """
    record.pathname = f"{record.name}{_SEPARATOR}{record.pathname}"
    return True


class LoggingServicer(beam_fn_api_pb2_grpc.BeamFnLoggingServicer):
    """Receives the log records of all workers, on the server's threads."""

    def Logging(self, request_iterator: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """Pass on a worker's log records until it closes the stream. Sends no responses."""
        for entries in request_iterator:
            for entry in entries.log_entries:
                _log(entry)
        return
        yield  # makes this a generator, as gRPC needs for a stream


def _log(entry: beam_fn_api_pb2.LogEntry) -> None:
    place, _, line = entry.log_location.rpartition(":")
    name, _, path = place.rpartition(_SEPARATOR)
    logger = logging.getLogger(name if name != "root" else None) if name else logging.getLogger(_UNNAMED)
    level = _LEVELS.get(entry.severity, logging.INFO)
    if logger.isEnabledFor(level):
        number = int(line) if line.isdigit() else 0
        logger.handle(logger.makeRecord(logger.name, level, path, number, entry.message, (), None))
