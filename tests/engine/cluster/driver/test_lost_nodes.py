"""What the loop makes of workers that are lost with their node, and of blocks that are lost, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from luminosity._shared.text import LOST_WITH_NODE, describe_exit
from luminosity.engine.cluster.agent.agent import check_shared_folder
from luminosity.engine.cluster.driver.shared_paths import mark
from luminosity.engine.loop.failures import MAX_ATTEMPTS, Failures
from luminosity.engine.workers.failure import Failure
from luminosity.errors import BlockLost, WorkerStartFailed


def _bundle() -> Any:
    """A bundle of one element."""
    stage = SimpleNamespace(
        plan=SimpleNamespace(label="Slow", steps=["Slow"], reads=[]), size=SimpleNamespace(shrink=lambda: None)
    )
    return SimpleNamespace(stage=stage, pieces=1, exits=0, failures=0, search=None, is_suspect=False, timers={})


def test_an_element_is_not_blamed_for_the_loss_of_nodes() -> None:
    failures, bundle = Failures(cast(Any, None)), _bundle()

    for _ in range(3 * MAX_ATTEMPTS):
        assert failures.after_exit(bundle, LOST_WITH_NODE, was_alone=True) == [bundle]

    assert not bundle.is_suspect
    assert describe_exit(LOST_WITH_NODE) == "was lost with its node or the run's agent there"


def test_input_that_can_not_be_read_ends_the_run_as_a_lost_block_and_not_as_a_failed_step() -> None:
    failures, bundle = Failures(cast(Any, None)), _bundle()
    failure = Failure.of(BlockLost("found none of the 2 copies of a block"))

    for _ in range(MAX_ATTEMPTS - 1):
        assert failures.after_exception(bundle, failure, None) == [bundle]
    with pytest.raises(BlockLost, match="none of the 2 copies"):
        failures.after_exception(bundle, failure, None)


def test_a_node_says_if_it_does_not_see_the_folder_of_the_checkpoint(tmp_path: Any) -> None:
    marker = mark(str(tmp_path))

    assert check_shared_folder(marker) == str(tmp_path)
    with pytest.raises(WorkerStartFailed, match=r"does not see the checkpoint's folder .* all nodes mount"):
        check_shared_folder(f"{marker}-of-another-run")
