"""Who holds copies of blocks on a cluster, with a store that is a dictionary and nodes that can be lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from luminosity.engine.cluster.driver.objects import ObjectTable
from luminosity.errors import BlockLost, RunFailed


class _Store:
    """Objects by reference: (node, value). Those of dead nodes can't be read."""

    def __init__(self) -> None:
        self.dead: set[str] = set()

    def get(self, reference: Any, seconds: float, is_over: Callable[[], bool]) -> Any:
        node, value = reference
        if is_over() or node in self.dead:
            raise BlockLost(f"{node} is dead")
        return value

    def put(self, value: Any) -> Any:
        return "driver", value


class _Node:
    def __init__(self, node_id: str, store: _Store) -> None:
        self.node_id = node_id
        self._store = store
        self.asked = 0

    def copy(self, reference: Any) -> tuple[Any, Any]:
        self.asked += 1
        node = self.node_id if reference[0] not in self._store.dead else reference[0]  # it could not read the source
        return (node, reference[1]), (node, 1)


class _Cluster:
    """A table with some nodes beside the driver's."""

    def __init__(self, *names: str) -> None:
        self.store = _Store()
        self.table = ObjectTable("driver", self.store)
        self.nodes = {name: _Node(name, self.store) for name in names}
        for node in self.nodes.values():
            self.table.add_keeper(node)

    def make(self, key: str, on: str = "a") -> Any:
        """Let a worker make a block, and the loop find it."""
        self.table.secure(key.partition(".")[0], on, lambda number: ((on, f"data {number}"), (on, 7)), [key])
        return self.table.find(key)

    def kill(self, name: str) -> None:
        self.store.dead.add(name)
        self.table.node_lost(name)


def test_a_block_has_two_copies_before_the_loop_hears_of_it() -> None:
    cluster = _Cluster("a", "b", "driver")
    cluster.nodes["driver"].asked = 0

    assert set(cluster.make("w1.1").copies) in ({"a", "b"}, {"a", "driver"})
    assert set(cluster.make("w1.2", on="driver").copies) == {"driver"}  # its end is the end of the run


def test_copies_go_to_the_node_that_holds_the_least() -> None:
    cluster = _Cluster("a", "b", "c")

    held = [next(iter(set(cluster.make(f"w1.{number}").copies) - {"a"})) for number in range(1, 5)]

    assert sorted(held) == ["b", "b", "c", "c"]


def test_each_node_tells_the_bytes_that_it_holds() -> None:
    cluster = _Cluster("a", "b")
    first, second = cluster.make("w1.1"), cluster.make("w1.2")
    assert cluster.table.bytes_on_nodes() == {"a": 14, "b": 14}
    first.free()
    assert cluster.table.bytes_on_nodes() == {"a": 7, "b": 7}
    cluster.kill("b")
    assert cluster.table.bytes_on_nodes() == {"a": 7, "driver": 7}
    second.free()
    assert cluster.table.bytes_on_nodes() == {}


def test_lost_copies_are_renewed_so_that_a_second_loss_does_no_harm() -> None:
    cluster = _Cluster("a", "b", "c")
    blocks = [cluster.make(f"w1.{number}") for number in range(1, 101)]

    cluster.kill("a")
    assert all(set(block.copies) == {"b", "c"} for block in blocks)
    cluster.kill("b")

    assert all(set(block.copies) == {"c", "driver"} for block in blocks)  # no other node is left
    assert [cluster.table.fetch(block) for block in blocks] == [f"data {number}" for number in range(1, 101)]


def test_a_block_whose_copies_are_all_gone_ends_the_run_by_name() -> None:
    cluster = _Cluster("a", "b")
    block = cluster.make("w1.1")
    cluster.store.dead |= {"a", "b"}  # at the same time
    cluster.kill("a")
    cluster.kill("b")

    with pytest.raises(BlockLost, match=r"all nodes .* block w1\.1 are gone; start the pipeline again.*checkpoint_dir"):
        cluster.table.copies(block.key)
    assert issubclass(BlockLost, RunFailed)


def test_a_node_that_was_lost_can_hold_copies_again() -> None:
    cluster = _Cluster("a", "b")
    cluster.kill("b")
    cluster.store.dead.clear()
    cluster.table.add_keeper(cluster.nodes["b"])

    assert set(cluster.make("w1.1").copies) == {"a", "b"}


def test_blocks_move_away_from_a_node_that_leaves() -> None:
    cluster = _Cluster("a", "b", "c")
    block = cluster.make("w1.1")

    cluster.table.node_leaves("a")
    assert {"b", "c"} <= set(block.copies)
    asked = cluster.nodes["a"].asked
    cluster.make("w2.1", on="b")

    assert cluster.nodes["a"].asked == asked
    cluster.kill("a")
    assert cluster.table.fetch(block) == "data 1"


def test_what_a_lost_worker_has_sent_is_freed_unless_the_loop_has_it() -> None:
    cluster = _Cluster("a", "b")
    kept = cluster.make("w1.1")
    cluster.table.secure("w1", "a", lambda number: (("a", "late"), ("a", 7)), ["w1.2"])  # the loop never asks for it

    cluster.table.worker_gone("w1")

    assert cluster.table.bytes == 7
    with pytest.raises(BlockLost, match=r"given up|dead"):
        cluster.make("w1.3")
    kept.free()
    assert cluster.table.bytes == 0


def test_a_block_that_can_not_be_secured_leaves_nothing() -> None:
    cluster = _Cluster("b")
    cluster.store.dead.add("a")

    with pytest.raises(BlockLost):
        cluster.make("w1.1")

    assert cluster.table.bytes == 0


def test_a_node_that_is_lost_while_its_block_is_copied_costs_another_copy_and_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = _Cluster("a", "b", "c")
    copy = cluster.nodes["b"].copy

    def copy_and_lose(reference: Any) -> tuple[Any, Any]:
        cluster.table.node_lost("a")
        return copy(reference)

    cluster.nodes["b"].copy = copy_and_lose

    assert set(cluster.make("w1.1").copies) == {"b", "c"}
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_node_without_workers_gives_its_blocks_to_others_before_it_is_given_back() -> None:
    cluster = _Cluster("a", "b", "c")
    held = [cluster.make(f"w1.{number}") for number in range(4)]

    assert cluster.table.move_from("a")

    assert [set(each.copies) for each in held] == [{"b", "c"}] * 4
    cluster.store.dead.add("a")
    later = cluster.make("w2.1", on="b")
    assert set(later.copies) == {"b", "c"}, "no copies go to a node that was given back"
    cluster.table.add_keeper(cluster.nodes["a"])
    cluster.store.dead.clear()
    assert cluster.table.move_from("b")
    assert set(later.copies) == {"a", "c"}, "a node that is used again holds copies"


def test_a_node_whose_blocks_can_not_be_copied_stays() -> None:
    cluster = _Cluster("a", "b")
    held = cluster.make("w1.1")
    held.copies.pop("b")
    cluster.store.dead |= {"a", "b"}

    assert not cluster.table.move_from("a")
    assert set(held.copies) == {"a"}
