"""Keeps a client of S3 for all calls: Beam makes one for each, which takes a third of a second of CPU."""

from __future__ import annotations

import threading
from typing import Any

from apache_beam.io.aws.clients.s3 import boto3_client
from apache_beam.options.pipeline_options import PipelineOptions, S3Options

__all__ = ["keep_s3_clients"]

_MOST_CLIENTS = 16  # a process has one for each set of options, so mostly one

_lock = threading.Lock()
_clients: dict[str, Any] = {}
_init = boto3_client.Client.__init__


def keep_s3_clients() -> None:
    """Let Beam use the same connections to S3 again in this process. Calling it again changes nothing.

    boto3's clients may be used by many threads. What Beam puts around one, which remembers a download, may not, and is
    made for each call as before.
    """
    boto3_client.Client.__init__ = _with_kept_client  # type: ignore[method-assign]


def _with_kept_client(self: Any, options: Any) -> None:
    given = options.view_as(S3Options) if isinstance(options, PipelineOptions) else None
    values = given.get_all_options() if given is not None else options
    key = repr(sorted((name, value) for name, value in values.items() if name.startswith("s3_")))
    with _lock:
        client = _clients.get(key)
    if client is None:
        _init(self, options)
        with _lock:
            if len(_clients) >= _MOST_CLIENTS:
                _clients.clear()
            _clients[key] = self.client
        return
    self.client = client
    self._download_request = self._download_stream = None
    self._download_pos = 0
