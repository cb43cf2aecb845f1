"""Version 1 of a library of prices: one tax, and prices in euros."""

from __future__ import annotations

__version__ = "1.0"


def gross(net: float) -> float:
    """Return the price with tax."""
    return round(net * 1.19, 2)
