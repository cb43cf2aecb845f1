"""The drift tests that ``lum drift --test`` and a watch can name. A new test is added here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from luminosity._shared.text import did_you_mean
from luminosity.errors import DriftError
from luminosity.extras import require

if TYPE_CHECKING:
    from luminosity.drift.contract import DriftTest

__all__ = ["DEFAULT_TEST", "TESTS", "drift_test"]

DEFAULT_TEST = "mmd"


def _mmd() -> type[DriftTest]:
    require("jax", "jax")
    from luminosity.drift.compare import MMDDrift

    return MMDDrift


def _columns() -> type[DriftTest]:
    from luminosity.drift.columns import ColumnDrift

    return ColumnDrift


# Each is imported when it is used: a command's help must not wait for JAX.
TESTS: Mapping[str, Callable[[], type[DriftTest]]] = MappingProxyType({"mmd": _mmd, "columns": _columns})
"""The name of each test, and the function that imports its class."""


def drift_test(name: str) -> type[DriftTest]:
    """Return the class of a test."""
    if name not in TESTS:
        raise DriftError(
            f"found no drift test {name!r}, expected one of {', '.join(TESTS)}", fix=did_you_mean(name, TESTS) or None
        )
    return TESTS[name]()
