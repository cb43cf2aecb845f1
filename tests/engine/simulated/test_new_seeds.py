"""New seeds with each run: a failure names its seed, and prints a small test that fails the same way.

``make soak MINUTES=…`` tries as many as one likes.
"""

from __future__ import annotations

import random

import pytest

from tests.engine.simulated.scenarios import scenario
from tests.engine.simulated.shrinking import as_test, shrunk
from tests.engine.simulated.soak import soak

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

_SEEDS, _MINUTES, _PROCESSES = 2_000, 1.0, 2


def test_new_seeds() -> None:
    tried = soak(random.randrange(1_000_000) * 10_000, _SEEDS, _MINUTES, _PROCESSES)
    assert tried.seeds
    for seed, error in tried.failures.items():
        pytest.fail(f"seed {seed}: {error}\n\n{as_test(shrunk(scenario(seed)))}")
