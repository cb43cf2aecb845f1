"""Models behind HTTP: what to say to which kind of server, and how to keep asking politely.

What a protocol of one's own is written with is here; `luminosity.HttpModelHandler` is what speaks it.
"""

from __future__ import annotations

from luminosity.inference.handlers.http.protocol import Answer, Ask, HttpProtocol, Reply, Request

__all__ = ["Answer", "Ask", "HttpProtocol", "Reply", "Request"]
