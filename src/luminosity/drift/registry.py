"""The drift tests that ``lum drift --test`` and a watch can name. A new test is added here, with one line.

Each file with a test imports Beam, JAX and NumPy inside of its functions: the help of the command must not wait for
them.
"""

from __future__ import annotations

from luminosity._shared.text import did_you_mean
from luminosity.drift.column_drift import ColumnDrift
from luminosity.drift.contract import DriftOption, DriftTest
from luminosity.drift.mmd_drift import MMDDrift
from luminosity.errors import DriftError
from luminosity.extras import require

__all__ = ["DEFAULT_TEST", "TESTS", "drift_test", "options_by_name"]

DEFAULT_TEST = MMDDrift.name
TESTS: dict[str, type[DriftTest]] = {
    MMDDrift.name: MMDDrift,
    ColumnDrift.name: ColumnDrift,
}


def drift_test(name: str) -> type[DriftTest]:
    """Return the class of a test, whose libraries are installed."""
    if name not in TESTS:
        raise DriftError(
            f"found no drift test {name!r}, expected one of {', '.join(TESTS)}", fix=did_you_mean(name, TESTS) or None
        )
    for library in TESTS[name].needs:
        require(library, library)
    return TESTS[name]


def options_by_name() -> dict[str, dict[str, DriftOption]]:
    """Return the options of all tests: for each name of an option, the tests that have it."""
    found: dict[str, dict[str, DriftOption]] = {}
    for test in TESTS.values():
        for option in test.options:
            found.setdefault(option.name, {})[test.name] = option
    return found
