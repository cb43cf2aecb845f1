"""Fixtures of the tests of Kafka."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from luminosity.testing import ScriptedKafka


@pytest.fixture
def kafka() -> Iterator[ScriptedKafka]:
    """A Kafka that the test writes down."""
    with ScriptedKafka() as made:
        yield made
