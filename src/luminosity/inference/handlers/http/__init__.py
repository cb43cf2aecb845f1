"""Models behind HTTP: the protocols of model servers, connections, retries and the number of requests at once.

:class:`luminosity.HttpModelHandler` is the handler. The names here are what you need to write your own protocol.
"""

from __future__ import annotations

from luminosity.inference.handlers.http.protocol import HttpProtocol, Predictions, Request, Response, Send

__all__ = ["HttpProtocol", "Predictions", "Request", "Response", "Send"]
