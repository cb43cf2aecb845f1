"""Leases that wait for a place, and nodes that join the cluster while a run lasts."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from luminosity.engine.cluster.driver import leases, node_watch
from luminosity.engine.cluster.driver.leases import Leases
from luminosity.engine.cluster.driver.node_watch import NodeWatch
from luminosity.engine.resources.machine import LeaseNeeds, Node
from tests.processes import wait_for

_PATIENCE_S = 30


class _Groups:
    """Ray's placement groups on a cluster whose only room is on one node."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, str]]] = []  # the selectors of each group
        self.removed: list[int] = []

    def placement_group(self, *_: Any, bundle_label_selector: list[dict[str, str]] | None = None, **__: Any) -> int:
        self.asked.append(bundle_label_selector or [])
        return len(self.asked)

    def placement_group_table(self, group: int) -> dict[str, Any]:
        has_room = not self.asked[group - 1]
        return {"state": "CREATED" if has_room else "PENDING", "bundles_to_node_id": {0: "back"}}

    def remove_placement_group(self, group: int) -> None:
        self.removed.append(group)


def test_a_lease_that_waits_is_asked_for_anew_when_a_node_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = _Groups()
    monkeypatch.setattr(leases, "require", lambda *_: groups)
    placed: list[str] = []
    held = Leases()
    try:
        held.ask("w1", LeaseNeeds(1.0, 0, 0), frozenset({"back"}), placed.append)
        held.ask_again(frozenset({"back"}))
        assert (len(groups.asked), placed) == (1, [])
        held.ask_again(frozenset())
        assert wait_for(lambda: placed == ["back"], _PATIENCE_S)
        assert groups.removed == [1]
        held.ask_again(frozenset())
        assert len(groups.asked) == 2
    finally:
        held.close()
    assert groups.removed == [1, 2]


class _NoAgents:
    def on_other_nodes(self) -> list[Any]:
        return []


def test_a_node_that_joins_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    found = [Node("first-node", "10.0.0.1", 2.0, 0)]
    monkeypatch.setattr(node_watch.ray_calls, "nodes", lambda: list(found))
    monkeypatch.setattr(node_watch.ray_calls, "leaving", lambda: frozenset[str]())
    watch = NodeWatch(_NoAgents(), lambda _: None, lambda _: None, lambda: None)  # type: ignore[arg-type]
    watch.close()
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        watch._look_for_new()
        found[1:] = [Node("second-node", "10.0.0.2", 2.0, 0)]
    assert [record.getMessage() for record in caplog.records] == ["node 10.0.0.2 (second-n) has joined the cluster"]
    assert [node.id for node in watch.alive] == ["first-node", "second-node"]
