"""Version 2 of a library of prices: taxes of countries, and prices in cents. It contradicts version 1."""

from __future__ import annotations

__version__ = "2.0"

_TAXES = {"de": 0.19, "fr": 0.20, "lu": 0.17}


def gross(net_cents: int, country: str) -> int:
    """Return the price with the tax of a country."""
    return round(net_cents * (1 + _TAXES[country]))
